"""Words that a second-language reader has to look up twice are not in pages, help, docstrings or messages."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from littrainer import Seq2SeqTrainingArguments
from littrainer.cli import COMMANDS
from tests.docs.blocks import ROOT, pages
from tests.docs.command_lines import help_of
from tests.docs.markdown_links import INLINE_CODE, prose

BETTER = {
    r"of (its|their|one's) own": "its, their, separate, or nothing",
    r"\ban own\b": "your own, a separate",
    r"\banew\b": "again, new, or the verb with re-",
    r"\bbeside\b": "next to, with, in addition to, compared with",
    r"\b(is|are|was|were|be|been|being) told\b": "log, warn, report, or name who says it to whom",
    r"\btells? of\b": "reports, logs, describes",
    r"\bas \w+ (has|have) it\b": "as in ...",
    r"\b(has|have|had) not(?= (a|an|the|any)\b|[.,;:])": "does not have",
    r"^(\W*)Those (of|that|which|who|with)\b": "name the subject",
    r"\bwhere (there (is|are)|none|nothing|nobody)\b": "if",
    r"\bwhichever way\b": "in both cases, in each case",
    r"\bwhat else\b": "everything else, other",
    r"\bin the place of\b": "instead of",
    r"\bin the midst of\b": "in the middle of",
    r"\b(in|at) hand\b": "current, this",
    r"\bbroken off\b": "interrupted, stopped",
    r"\bgo(es)? by\b": "follows, uses",
    r"\b(is|are|was|were) passed over\b": "skip",
    r"\btakes? down\b": "record",
    r"\ball the same\b": "anyway",
    r"\bfor want of\b": "because there is too little",
    r"\bas it were\b|\bthereof\b|\bwhereof\b|\bwherein\b": "leave it out",
}
"""A pattern -> the better word; DESIGN and CONTRIBUTING have the rules behind it."""


def find_phrases(text: str) -> list[str]:
    """Each phrase of a text that has a better word, with the sentence around it."""
    hits = []
    for pattern, better in BETTER.items():
        for hit in re.finditer(pattern, text, re.IGNORECASE | re.MULTILINE):
            around = " ".join(text[max(hit.start() - 40, 0) : hit.end() + 30].split())
            hits.append(f"{hit[0].strip()!r} (better: {better}) in: ... {around} ...")
    return hits


@pytest.mark.parametrize("page", [page for page in pages() if page != "CHANGELOG.md"])
def test_a_page_is_in_plain_english(page: str) -> None:
    text = INLINE_CODE.sub("`code`", prose(Path(ROOT, page)))
    # A phrase may begin on one line and end on the next.
    assert find_phrases(re.sub(r"(?<=\S)\n(?=[a-z])", " ", text)) == []


def test_help_is_in_plain_english() -> None:
    texts = {" ".join(arguments): help_of(*arguments) for arguments in [(), *((name,) for name in COMMANDS)]}
    for field in dataclasses.fields(Seq2SeqTrainingArguments):
        texts[f"--{field.name}"] = field.metadata["help"]
    results = {name: find_phrases(" ".join(text.split())) for name, text in texts.items()}
    assert {name: hits for name, hits in results.items() if hits} == {}


SOURCE = Path(ROOT, "src", "littrainer")


def public_docstrings(node: ast.AST) -> Iterator[str]:
    """The docstrings of a module's, or a class's, public classes, functions and methods."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, (ast.ClassDef, ast.FunctionDef)) and not inner.name.startswith("_"):
            yield ast.get_docstring(inner) or ""
            yield from public_docstrings(inner) if isinstance(inner, ast.ClassDef) else ()


def messages(tree: ast.Module) -> Iterator[str]:
    """The strings in what a module raises and in its calls of `logger.warning`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and ast.unparse(node.func) == "logger.warning"):
            values = (leaf.value for leaf in ast.walk(node) if isinstance(leaf, ast.Constant))
            yield from (value for value in values if isinstance(value, str))


@pytest.mark.parametrize("module", [str(path.relative_to(SOURCE)) for path in sorted(SOURCE.rglob("*.py"))])
def test_docstrings_and_messages_are_in_plain_english(module: str) -> None:
    tree = ast.parse(Path(SOURCE, module).read_text(encoding="utf-8"))
    texts = [ast.get_docstring(tree) or "", *public_docstrings(tree), *messages(tree)]
    assert find_phrases("\n".join(re.sub(r"(?<=\S)\n *(?=[a-z])", " ", text) for text in texts)) == []


def test_a_phrase_is_reported_with_the_better_word() -> None:
    (hit,) = find_phrases("Each process has a folder of its own.")
    assert hit.startswith("'of its own' (better: its, their, separate, or nothing)")
