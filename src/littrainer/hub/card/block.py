"""README.md as a block of metadata and a text, and whether a person has changed either since it was generated."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

from littrainer.hub.card.elsewhere import FOUND_ANEW, GENERATED_BY_TRANSFORMERS, is_as_generated

CARD_NAME = "README.md"
# What the Hub takes for the block of metadata.
BLOCK = re.compile(r"^\s*---(?:\r\n|\r|\n)(.*?)(?:\r\n|\r|\n)---[ \t]*(?:\r\n|\r|\n|$)", re.DOTALL)
EMPTY_BLOCK = re.compile(r"^\s*---(?:\r\n|\r|\n)---[ \t]*(?:\r\n|\r|\n|$)")
# Stands in the text, unseen by who reads the page: digests of the text and of each entry of the metadata, as they were
# generated, and of the whole block, as it was written. It tells what somebody has changed since.
SEAL = re.compile(
    r"<!-- littrainer card: text ([0-9a-f]{16})(?: block ([0-9a-f]{8}) entries)?((?: [\w-]+=[0-9a-f]{8})*) -->"
)
SEAL_PLACE = f"<!-- littrainer card: text {'0' * 16} -->"


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
        return not is_as_generated(self.text, self.metadata)

    def entries_of_a_person(self) -> dict[str, Any]:
        """The entries of the metadata that somebody has added or changed."""
        entries = self.metadata or {}
        generated = self._sealed_entries()
        if generated is not None:
            return {name: entry for name, entry in entries.items() if generated.get(name) != _digest_of_entry(entry)}
        is_of_transformers = GENERATED_BY_TRANSFORMERS in self.text
        return {name: entry for name, entry in entries.items() if not (is_of_transformers and name in FOUND_ANEW)}

    def entries_taken_out(self) -> set[str]:
        """Names of the generated entries that somebody has deleted."""
        return set(self._sealed_entries() or ()) - set(self.metadata or ())

    @property
    def has_block_of_a_person(self) -> bool:
        """Whether somebody has changed the metadata since the card was written, or has written them."""
        seal = SEAL.search(self.text)
        return seal is None or seal[2] != _digest_of_entry(self.metadata)

    def with_metadata(self, metadata: dict[str, Any]) -> str:
        """The README.md of this text with other metadata; what a person has changed stays known."""
        seal = SEAL.search(self.text)
        if seal is None:
            return _as_file(metadata, self.text)
        return _as_file(metadata, SEAL.sub(_seal(seal[1], metadata, seal[3]), self.text))

    def _sealed_entries(self) -> dict[str, str] | None:
        seal = SEAL.search(self.text)
        return None if seal is None else dict(entry.split("=") for entry in seal[3].split())


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
    return Card(metadata if _are_entries(metadata) else None, content[block.end() :])


def written_card(metadata: dict[str, Any], text: str, generated: dict[str, Any] | None = None) -> str:
    """A README.md of metadata and a text, sealed where the text has a place for that.

    Parameters:
        generated: the metadata as they were generated, where somebody's own are among those that are written.
    """
    entries = (f" {name}={_digest_of_entry(entry)}" for name, entry in (generated or metadata).items())
    return _as_file(metadata, SEAL.sub(_seal(_digest_of_text(text), metadata, "".join(entries)), text))


def _as_file(metadata: dict[str, Any], text: str) -> str:
    import yaml

    block = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True) if metadata else ""
    return f"---\n{block}---\n{text}"


def _seal(text: str, metadata: dict[str, Any], entries: str) -> str:
    return f"<!-- littrainer card: text {text} block {_digest_of_entry(metadata)} entries{entries} -->"


def _are_entries(metadata: Any) -> bool:
    """Whether a block is of a kind that can be taken over: entries with names, and tags that are text."""
    if not isinstance(metadata, dict) or not all(isinstance(name, str) for name in metadata):
        return False
    tags = metadata.get("tags") or []
    return isinstance(tags, str) or (isinstance(tags, list) and all(isinstance(tag, str) for tag in tags))


def _digest_of_text(text: str) -> str:
    # Editors and libraries change the ends of lines, and add or drop the last one.
    lines = [line.rstrip() for line in SEAL.sub("", text).strip().splitlines()]
    return _digest("\n".join(lines))


def _digest_of_entry(entry: Any) -> str:
    try:
        text = json.dumps(entry, sort_keys=True, default=str)
    except (TypeError, ValueError):
        # Below an entry YAML has keys of all kinds.
        text = repr(entry)
    return _digest(text)[:8]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]
