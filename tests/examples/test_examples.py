"""Each example runs under `littrainer run` at a small setting, and ends with its table; several share a process."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from littrainer.cli import main
from tests.compat.processes import run_python
from tests.examples.small_settings import PROCESSES, Example, rows_of


def check(example: Example, folder: Path) -> None:
    """An example that has run in `folder` trained with our Trainer, printed its table and left its files."""
    facts = json.loads((folder / "facts.json").read_text())
    assert facts["traceback"] is None, facts["traceback"]
    # Programs for Lightning's Trainer have none of that name.
    assert (facts["trainer_module"] or "littrainer").startswith("littrainer")
    printed = (folder / "stdout").read_text()
    for name, numbers in rows_of(printed, example).items():
        assert len(numbers) == example.columns and all(map(math.isfinite, numbers)), (name, numbers, printed)
    for pattern in example.prints:
        assert re.search(pattern, printed, re.MULTILINE), (pattern, printed)
    missing = [name for name in example.leaves if not (folder / "out" / name).exists()]
    assert not missing, missing
    assert re.search(r"^charts: +littrainer report out", printed, re.MULTILINE), printed
    assert main(["report", str(folder / "out"), "--no-png"]) == 0
    if example.also:
        example.also(folder, printed)


@pytest.mark.parametrize("process", PROCESSES)
def test_examples_end_with_their_tables_and_leave_what_they_say(process: str, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    pytest.importorskip("matplotlib")
    if process == "on Lightning":
        pytest.importorskip("lightning", minversion="2.6")
    lines = [f"{example.name} --output_dir out {example.options}" for example in PROCESSES[process]]
    runner = Path(__file__).with_name("in_one_process.py")
    done = run_python("-m", "littrainer", "run", str(runner), str(tmp_path), *lines, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    failures = {}
    for example in PROCESSES[process]:
        try:
            check(example, tmp_path / Path(example.name).stem)
        except AssertionError as error:
            failures[example.name] = str(error)
    assert not failures, "\n\n".join(f"{name}: {failure}" for name, failure in failures.items())


def test_every_example_is_run_by_a_test_and_has_a_row_on_its_page() -> None:
    root = Path(__file__).parents[2]
    scripts = {path.name for path in (root / "examples").glob("*.py") if "__main__" in path.read_text(encoding="utf-8")}
    tests = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("*.py"))
    assert {name for name in scripts if f'"{name}"' not in tests} == set()
    page = (root / "docs" / "examples.md").read_text(encoding="utf-8")
    assert {name for name in scripts if f"(../examples/{name})" not in page} == set()
