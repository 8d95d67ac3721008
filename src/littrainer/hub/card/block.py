"""README.md as a block of metadata and a text, and whether a person has changed either since it was generated."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

CARD_NAME = "README.md"
# What the Hub takes for the block of metadata.
BLOCK = re.compile(r"^\s*---(?:\r\n|\r|\n)(.*?)(?:\r\n|\r|\n)---[ \t]*(?:\r\n|\r|\n|$)", re.DOTALL)
EMPTY_BLOCK = re.compile(r"^\s*---(?:\r\n|\r|\n)---[ \t]*(?:\r\n|\r|\n|$)")
# Stands in the text, unseen by who reads the page: digests of the text and of each entry of the metadata, as they were
# generated. It tells what somebody has changed since.
SEAL = re.compile(r"<!-- littrainer card: text ([0-9a-f]{16})((?: [\w-]+=[0-9a-f]{8})*) -->")
SEAL_PLACE = f"<!-- littrainer card: text {'0' * 16} -->"
# transformers says so in the cards that it generates, and has this sentence in each section that is left to the user.
GENERATED_BY_TRANSFORMERS = "has been generated automatically according to the information the Trainer had access to"
LEFT_TO_THE_USER = "More information needed"
SECTIONS_LEFT_TO_THE_USER = 3
# The card that PEFT and huggingface_hub begin with.
TEMPLATE_TITLE = "# Model Card for Model ID"
LEFT_IN_THE_TEMPLATE = "[More Information Needed]"
FEWEST_LEFT_IN_THE_TEMPLATE = 10


@dataclass(frozen=True)
class Card:
    """What a README.md holds.

    Parameters:
        metadata: the entries of its block, None where they cannot be read.
        text: what follows the block.
    """

    metadata: dict[str, Any] | None
    text: str

    @property
    def has_text_of_a_person(self) -> bool:
        """Whether somebody has written the text, or changed a generated one; or the metadata cannot be read."""
        if self.metadata is None:
            return True
        if not self.text.strip():
            return False
        seal = SEAL.search(self.text)
        if seal is not None:
            return seal[1] != _digest_of_text(self.text)
        if GENERATED_BY_TRANSFORMERS in self.text:
            return self.text.count(LEFT_TO_THE_USER) < SECTIONS_LEFT_TO_THE_USER
        is_template = TEMPLATE_TITLE in self.text
        return not (is_template and self.text.count(LEFT_IN_THE_TEMPLATE) >= FEWEST_LEFT_IN_THE_TEMPLATE)

    def entries_of_a_person(self) -> dict[str, Any]:
        """The entries of the metadata that somebody has added or changed."""
        generated = self._sealed_entries()
        if generated is None:
            return {} if GENERATED_BY_TRANSFORMERS in self.text else dict(self.metadata or {})
        entries = (self.metadata or {}).items()
        return {name: entry for name, entry in entries if generated.get(name) != _digest_of_entry(entry)}

    def entries_taken_out(self) -> set[str]:
        """Names of the generated entries that somebody has deleted."""
        return set(self._sealed_entries() or ()) - set(self.metadata or ())

    def _sealed_entries(self) -> dict[str, str] | None:
        seal = SEAL.search(self.text)
        return None if seal is None else dict(entry.split("=") for entry in seal[2].split())


def read_card(content: str) -> Card:
    """Part a README.md into metadata and text."""
    import yaml

    content = content.removeprefix("\ufeff")
    empty = EMPTY_BLOCK.match(content)
    if empty is not None:
        return Card({}, content[empty.end() :])
    block = BLOCK.match(content)
    if block is None:
        return Card({}, content)
    try:
        metadata = yaml.safe_load(block[1])
    except (yaml.YAMLError, ValueError):
        metadata = False
    if metadata is None:
        metadata = {}
    return Card(metadata if isinstance(metadata, dict) else None, content[block.end() :])


def written_card(metadata: dict[str, Any], text: str, generated: dict[str, Any] | None = None) -> str:
    """A README.md of metadata and a text, sealed where the text has a place for that.

    Parameters:
        generated: the metadata as they were generated, where somebody's own are among those that are written.
    """
    import yaml

    entries = (f" {name}={_digest_of_entry(entry)}" for name, entry in (generated or metadata).items())
    seal = f"<!-- littrainer card: text {_digest_of_text(text)}{''.join(entries)} -->"
    block = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True) if metadata else ""
    return f"---\n{block}---\n{SEAL.sub(seal, text)}"


def is_kept(content: str) -> bool:
    """Whether a README.md, here or on the Hub, holds a person's text, so that no generated one may take its place."""
    return read_card(content).has_text_of_a_person


def _digest_of_text(text: str) -> str:
    # Editors and libraries change the ends of lines, and add or drop the last one.
    lines = [line.rstrip() for line in SEAL.sub("", text).strip().splitlines()]
    return _digest("\n".join(lines))


def _digest_of_entry(entry: Any) -> str:
    return _digest(json.dumps(entry, sort_keys=True, default=str))[:8]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]
