"""The pages of the reference name what is public, and docstrings, which the site shows there, say what they have to."""

from __future__ import annotations

import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import littrainer
from littrainer.compat.trainer_attributes import TrainerAttributes
from littrainer.lightning.lightning_extras import LightningExtras
from tests.docs.command_lines import help_of, options_in

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "api"
BLOCK = re.compile(r"^::: (\S+)\n((?:    .*\n)*)", re.MULTILINE)
PARAMETERS = re.compile(r"^Parameters:\n((?: +.*\n?|\n)+)", re.MULTILINE)
DESCRIBED = re.compile(r"^    ([\w, ]+): ", re.MULTILINE)
# Parameters of events are documented once for all events, and arguments in arguments.md.
DESCRIBED_ELSEWHERE = ("TrainerCallback", "TrainingArguments", "Seq2SeqTrainingArguments", "TFTrainingArguments")
# Only their additional parameters are documented; the others are the Trainer's.
ADDS_TO_ANOTHER = ("Seq2SeqTrainer",)


def documented(page: str = "*.md") -> dict[str, dict[str, Any]]:
    """Names that pages document, and how."""
    return {
        name: (yaml.safe_load(options) or {}).get("options", {})
        for path in sorted(REFERENCE.glob(page))
        for name, options in BLOCK.findall(path.read_text(encoding="utf-8") + "\n")
    }


PAGES = sorted(page.name for page in REFERENCE.glob("*.md") if documented(page.name))


def public(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def shown_members(name: str, options: dict[str, Any]) -> list[str]:
    """The members of a class that its page shows: those that it lists, or else all that are public."""
    members, found = options.get("members"), public(name)
    if members is None and inspect.isclass(found) and found.__name__ not in DESCRIBED_ELSEWHERE:
        return [member for member, value in vars(found).items() if not member.startswith("_") and callable(value)]
    return members or []


def shown_with_parameters(page: str) -> Iterator[tuple[str, Any]]:
    """Functions and classes of a page by name."""
    for name, options in documented(page).items():
        found = public(name)
        if inspect.isfunction(found) or (inspect.isclass(found) and not issubclass(found, enum.Enum)):
            yield name, found
        for member in shown_members(name, options):
            value = getattr(found, member)
            if callable(value) and not inspect.isclass(value):
                yield f"{name}.{member}", value


def undescribed(found: Any) -> list[str]:
    """Parameters that a docstring does not describe."""
    text = inspect.getdoc(found) or ""
    described = {
        name
        for section in PARAMETERS.findall(text)
        for names in DESCRIBED.findall(section)
        for name in names.split(", ")
    }
    own = inspect.signature(found).parameters
    return [name for name in own if name != "self" and not name.startswith("_") and name not in described]


def test_each_public_name_is_in_the_reference() -> None:
    ours = {name for name in littrainer.__all__ if name != "__version__" and not is_of_transformers(name)}
    assert ours <= {name.removeprefix("littrainer.") for name in documented()}
    pages = ("arguments.md", "collators.md", "optimization.md")
    text = "".join((REFERENCE / page).read_text(encoding="utf-8") for page in pages)
    assert [name for name in filter(is_of_transformers, littrainer.__all__) if f"`{name}`" not in text] == []


def is_of_transformers(name: str) -> bool:
    return str(getattr(getattr(littrainer, name), "__module__", "")).startswith("transformers.")


def test_each_public_method_of_the_trainer_is_in_the_reference() -> None:
    listed = documented()["littrainer.Trainer"]["members"]
    methods = {
        name
        for kind in (littrainer.Trainer, LightningExtras, TrainerAttributes)
        for name in vars(kind)
        if not name.startswith("_") and callable(getattr(kind, name))
    }
    assert len(listed) == len(methods)
    assert set(listed) == methods


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_documents_is_there_and_says_what_it_is_for(page: str) -> None:
    for name, options in documented(page).items():
        found = public(name)
        if inspect.isfunction(found) or inspect.isclass(found):
            assert (inspect.getdoc(found) or "").partition("\n")[0].endswith((".", ":")), name
        assert [member for member in shown_members(name, options) if not hasattr(found, member)] == []


@pytest.mark.parametrize("page", PAGES)
def test_docstrings_of_a_page_describe_each_parameter(page: str) -> None:
    missing = {
        name: undescribed(found)
        for name, found in shown_with_parameters(page)
        if found.__name__ not in (*DESCRIBED_ELSEWHERE, *ADDS_TO_ANOTHER)
    }
    assert missing and {name: parameters for name, parameters in missing.items() if parameters} == {}


def test_the_page_of_the_command_line_has_each_command_and_option() -> None:
    page = (REFERENCE / "command-line.md").read_text(encoding="utf-8")
    for command in ("run", "explain", "report", "list", "verify", "compare", "env"):
        section = page.partition(f"## littrainer {command}\n")[2].partition("\n## ")[0]
        options = {option for option in options_in(help_of(command)) if re.fullmatch(r"--[a-z-]+", option)}
        missing = [option for option in sorted(options - {"--help"}) if option not in section]
        assert section and not missing, f"littrainer {command}: {missing}"
