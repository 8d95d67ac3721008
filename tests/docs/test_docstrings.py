"""The examples in docstrings, lines after `>>>`, print the text below them."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import ROOT
from tests.scenarios.data import tiny_tokenizer, translation_rows, vector_rows
from tests.scenarios.models import VectorClassifier, tiny_t5
from tests.scenarios.trainers import quiet_trainer

SOURCES = ROOT / "src"


def modules_with_examples(sources: Path) -> list[str]:
    """Names of the modules below a folder that have an example anywhere."""
    with_examples = [path for path in sorted(sources.rglob("*.py")) if ">>> " in path.read_text(encoding="utf-8")]
    return [
        ".".join(path.relative_to(sources).with_suffix("").parts).removesuffix(".__init__") for path in with_examples
    ]


def create_objects_of_examples(folder: Path) -> dict[str, Any]:
    """Create what the examples name without making it: a model, data and a checkpoint."""
    trainer = quiet_trainer(folder / "trained", max_steps=2, save_strategy="steps", save_steps=2)
    trainer.train()
    return {
        "model": VectorClassifier(),
        "train_dataset": vector_rows(8),
        "eval_dataset": vector_rows(4),
        "checkpoint": folder / "trained" / "checkpoint-2",
        "t5": tiny_t5(),
        "translations": translation_rows(4),
        "tokenizer": tiny_tokenizer(),
    }


def failures_in(module: str, objects: dict[str, Any]) -> str:
    """Return what the examples of a module print instead, or nothing."""
    messages: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    tests = doctest.DocTestFinder().find(importlib.import_module(module), extraglobs=objects)
    examples = [test for test in tests if test.examples]
    assert examples, f"{module} has `>>>` outside of docstrings, where nobody executes it"
    for test in examples:
        runner.run(test, out=messages.append)
    return "".join(messages)


def test_the_examples_in_our_docstrings_print_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    objects = create_objects_of_examples(tmp_path)
    failures = {module: failures_in(module, objects) for module in modules_with_examples(SOURCES)}
    assert not any(failures.values()), "".join(failures.values())
