"""The examples in docstrings, lines after `>>>`, print the text below them."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

SOURCES = ROOT / "src"


def modules_with_examples(sources: Path) -> list[str]:
    """Names of the modules below a folder that have an example anywhere."""
    with_examples = [path for path in sorted(sources.rglob("*.py")) if ">>> " in path.read_text(encoding="utf-8")]
    return [
        ".".join(path.relative_to(sources).with_suffix("").parts).removesuffix(".__init__") for path in with_examples
    ]


def failures_in(module: str) -> str:
    """Return what the examples of a module print instead, or nothing."""
    messages: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    examples = [test for test in doctest.DocTestFinder().find(importlib.import_module(module)) if test.examples]
    assert examples, f"{module} has `>>>` outside of docstrings, where nobody executes it"
    for test in examples:
        runner.run(test, out=messages.append)
    return "".join(messages)


def test_the_examples_in_our_docstrings_print_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert {module: messages for module in modules_with_examples(SOURCES) if (messages := failures_in(module))} == {}
