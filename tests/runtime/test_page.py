"""Messages on docs/errors.md exist in the sources."""

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
# Placeholder for variable text.
GAP = "..."
NAME_OF_AN_ERROR = re.compile(r"^\w+: ")


def blocks() -> list[str]:
    """Return the text blocks of the page."""
    return re.findall(r"^```text\n(.*?)\n```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@cache
def texts_in_the_sources() -> tuple[str, ...]:
    """Return all strings of the sources, with gaps for variables."""
    texts = []
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else GAP for part in node.values]
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return tuple(texts)


def is_in_the_sources(line: str) -> bool:
    """Return whether a line matches a string of the sources."""
    text = NAME_OF_AN_ERROR.sub("", line)
    return any(matches_template(text, template) for template in texts_in_the_sources())


def matches_template(text: str, template: str) -> bool:
    """Return whether a text is a template with filled gaps."""
    first, *parts = template.split(GAP)
    # A template of gaps would match any text.
    if len(first) + sum(map(len, parts)) < 20 or not text.startswith(first):
        return False
    if not parts:
        return text == first
    *inner, last = parts
    at = len(first)
    for part in inner:
        index = text.find(part, at)
        if index < 0:
            return False
        at = index + len(part)
    return text.endswith(last) and len(text) - len(last) >= at


def errors_of(name: str, folder: Path) -> list[str]:
    """Return the lines of a mistake's error and its notes."""
    with pytest.raises(BaseException) as caught:
        MISTAKES[name](folder)
    error = caught.value
    lines = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]
    return "\n".join(lines).replace(str(folder), GAP).split("\n")


@pytest.fixture(scope="module")
def produced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return {name: errors_of(name, tmp_path_factory.mktemp(name)) for name in MISTAKES}


def test_the_page_has_the_error_of_each_mistake(produced: dict[str, list[str]]) -> None:
    for name, lines in produced.items():
        matches = [block.split("\n") for block in blocks() if block.split("\n")[0] == lines[0]]
        assert matches, f"docs/errors.md does not have the error of {name}: {lines}"
        for block in matches:
            assert [line for line in block if line not in lines] == [], name
            # The page has the advice too, with or without the line about the batch.
            assert [line for line in lines if line not in block and not line.startswith("It came ")] == [], name


def test_other_messages_on_the_page_are_in_the_sources(produced: dict[str, list[str]]) -> None:
    first_lines = {lines[0] for lines in produced.values()}
    unproduced = [block for block in blocks() if block.split("\n")[0] not in first_lines]
    assert len(unproduced) >= 10
    assert [line for block in unproduced for line in block.split("\n") if not is_in_the_sources(line)] == []


def test_a_line_that_no_source_has_is_noticed() -> None:
    assert is_in_the_sources(
        "OSError: No checkpoint can be written to ... (...). Give an output_dir that can be "
        "written to, or train with save_strategy='no'"
    )
    assert not is_in_the_sources("OSError: No checkpoint can be written to ... (...). Buy a larger disk")
