"""Each message on docs/errors.md is one that somebody gets."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.scenarios.mistakes import MISTAKES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "errors.md"
SOURCES = ROOT / "src" / "littrainer"
# Where something stands that differs each time, on the page and between the parts of a text in the sources.
GAP = "..."
NAME_OF_AN_ERROR = re.compile(r"^\w+: ")


def blocks() -> list[str]:
    """What the page shows as text."""
    return re.findall(r"^```text\n(.*?)\n```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@cache
def texts_in_the_sources() -> tuple[str, ...]:
    """All texts of our code, with gaps where something is filled in."""
    found = []
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else GAP for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return tuple(found)


def is_in_the_sources(line: str) -> bool:
    """Whether the fixed parts of a line are those of one text of ours, filled in as the line has it."""
    text = NAME_OF_AN_ERROR.sub("", line)
    return any(has_the_form_of(text, template) for template in texts_in_the_sources())


def has_the_form_of(text: str, template: str) -> bool:
    """Whether a text is a template with something in the place of each gap."""
    first, *parts = template.split(GAP)
    # A template of gaps fits anything.
    if len(first) + sum(map(len, parts)) < 20 or not text.startswith(first):
        return False
    if not parts:
        return text == first
    *inner, last = parts
    at = len(first)
    for part in inner:
        found = text.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return text.endswith(last) and len(text) - len(last) >= at


def errors_of(name: str, folder: Path) -> list[str]:
    """The lines that a mistake ends in: the error, and the notes below it."""
    with pytest.raises(BaseException) as caught:
        MISTAKES[name](folder)
    error = caught.value
    lines = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]
    return "\n".join(lines).replace(str(folder), GAP).split("\n")


@pytest.fixture(scope="module")
def produced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return {name: errors_of(name, tmp_path_factory.mktemp(name)) for name in MISTAKES}


def test_each_mistake_ends_in_the_words_that_the_page_has(produced: dict[str, list[str]]) -> None:
    for name, lines in produced.items():
        about_it = [block.split("\n") for block in blocks() if block.split("\n")[0] == lines[0]]
        assert about_it, f"docs/errors.md does not have what {name} ends in: {lines}"
        for block in about_it:
            assert [line for line in block if line not in lines] == [], name
            # What to do stands on the page too, with or without the line that says where.
            assert [line for line in lines if line not in block and not line.startswith("It came ")] == [], name


def test_other_messages_on_the_page_are_in_the_sources(produced: dict[str, list[str]]) -> None:
    own = {lines[0] for lines in produced.values()}
    others = [block for block in blocks() if block.split("\n")[0] not in own]
    assert len(others) >= 10
    assert [line for block in others for line in block.split("\n") if not is_in_the_sources(line)] == []


def test_a_line_that_no_source_has_is_noticed() -> None:
    assert is_in_the_sources(
        "OSError: No checkpoint can be written to ... (...). Give an output_dir that can be "
        "written to, or train with save_strategy='no'"
    )
    assert not is_in_the_sources("OSError: No checkpoint can be written to ... (...). Buy a larger disk")
