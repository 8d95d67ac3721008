from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from littrainer.checkpoint import run_record
from littrainer.cli import main
from littrainer.commands.compare import LAYER
from tests.scenarios.data import vector_rows
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import quiet_trainer

from .report_folders import LOGGED, write_state


def trained(folder: Path, given: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A run of four steps that logs each, evaluates twice and saves twice."""
    settings = {"max_steps": 4, "logging_strategy": "steps", "logging_steps": 1, "eval_strategy": "steps"}
    settings |= {"eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    quiet_trainer(folder, given=given, **{**settings, **changes}).train()
    return folder


def compared(capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[int, str]:
    """Exit status of the command, and what it printed."""
    capsys.readouterr()
    return main(["compare", *map(str, words)]), capsys.readouterr().out


def rows_below(printed: str, title: str) -> list[str]:
    """The rows of the table with this title, below its headings."""
    table = next(part for part in printed.split("\n\n") if part.startswith(title))
    return [line.strip() for line in table.splitlines()[2:]]


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.com"]
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


def repository(folder: Path) -> Path:
    """A repository with a script in it, and a module that the script uses."""
    folder.mkdir()
    (folder / "train.py").write_text("import model\n")
    (folder / "model.py").write_text("layers = 2\n")
    git(folder, "init")
    git(folder, "add", ".")
    git(folder, "commit", "-m", "first", "--date", "2026-01-01T00:00:00")
    return folder


def run_from(monkeypatch: pytest.MonkeyPatch, script: Path, folder: Path) -> Path:
    monkeypatch.setattr(run_record.sys.modules["__main__"], "__file__", str(script), raising=False)
    return trained(folder)


Pair = tuple[Path, Path]


def other_rate(folder: Path, _: Any = None) -> Pair:
    return trained(folder / "one"), trained(folder / "two", learning_rate=0.02)


def other_given(**given: Any) -> Callable[[Path, pytest.MonkeyPatch], Pair]:
    return lambda folder, _: (trained(folder / "one"), trained(folder / "two", given=given))


def other_release(folder: Path, _: pytest.MonkeyPatch) -> Pair:
    pair = trained(folder / "one"), trained(folder / "two")
    record = pair[1] / "littrainer_run.json"
    record.write_text(record.read_text().replace(torch.__version__, "2.6.0+cu124"))
    return pair


def other_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    one = repository(folder / "code")
    two = Path(shutil.copytree(one, folder / "later"))
    (two / "model.py").write_text("layers = 3\n")
    git(two, "commit", "-am", "second")
    first, second = (run_from(monkeypatch, place / "train.py", place / "out") for place in (one, two))
    return first, second


def other_weights() -> VectorClassifier:
    torch.manual_seed(4)
    return VectorClassifier()


# The row that has to be the only one below "What differs from the start" -> two runs of which it is true.
PAIRS: dict[str, Callable[[Path, pytest.MonkeyPatch], Pair]] = {
    "learning_rate": other_rate,
    "train data": other_given(train_dataset=[*vector_rows(9), {"x": torch.ones(6), "labels": 0}]),
    "weights at the start": lambda folder, _: (
        trained(folder / "one"),
        trained(folder / "two", model=other_weights()),
    ),
    "torch": other_release,
    "commit": other_code,
}


def test_each_pair_of_runs_is_told_apart_by_its_one_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    named = []
    for cause, make in PAIRS.items():
        (tmp_path / cause).mkdir()
        with monkeypatch.context() as patch:
            _, printed = compared(capsys, *make(tmp_path / cause, patch))
        (row,) = rows_below(printed, "What differs from the start")
        named += [cause] if row.startswith(f"{cause}  ") else []
    assert named == list(PAIRS)


def test_the_first_step_the_last_values_and_the_layers_are_named_on_the_console_and_on_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair, target = other_rate(tmp_path), tmp_path / "page.html"
    status, printed = compared(capsys, *pair, "--html", target)
    assert status == 1
    # The schedule is linear: after the first step the rates have fallen by a quarter.
    assert printed.startswith("The logs differ first at step 1: learning_rate is 0.01 and 0.02. 0 values before it are")
    assert rows_below(printed, "First difference, at step 1") == ["learning_rate  0.01  0.02"]
    values = rows_below(printed, "Last values")
    assert any(row.startswith("eval_loss  ") for row in values) and not any("runtime" in row for row in values)
    assert {
        row.split()[0]
        for row in rows_below(printed, f"Weights in {pair[0]}/checkpoint-4 and {pair[1]}/checkpoint-4: 3 of 3")
    } == {"inner", "norm", "head"}
    page = target.read_text()
    assert "What differs from the start" in page and "learning_rate is 0.01 and 0.02" in page
    assert "<td>0.02</td>" in page and '"title":"Loss"' in page


def test_equal_runs_and_runs_of_transformers_are_equal_and_status_is_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = trained(tmp_path / "one"), trained(tmp_path / "two")
    status, printed = compared(capsys, one, two)
    assert status == 0 and printed.startswith("Equal: ") and "and all weights" in printed.splitlines()[0]
    assert rows_below(printed, "What differs from the start") == ["nothing that is known"]

    transformers = pytest.importorskip("transformers")
    (two / "littrainer_run.json").unlink()
    args = transformers.TrainingArguments("elsewhere", learning_rate=0.25, hub_token="hf_secret", use_cpu=True)
    for folder in (two, two / "checkpoint-4", two / "checkpoint-2"):
        torch.save(args, folder / "training_args.bin")
    status, printed = compared(capsys, one, two)
    assert status == 0 and "hf_secret" not in printed
    (rate,) = [row for row in rows_below(printed, "What differs from the start") if row.startswith("learning_rate")]
    assert rate.split() == ["learning_rate", "0.01", "0.25"]
    assert "one of the runs has no littrainer_run.json" in printed


def test_runs_without_a_common_step_and_without_weights_are_not_called_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = (write_state(tmp_path / str(step), [{"step": step, "loss": 1.0}]) for step in (1, 2))
    status, printed = compared(capsys, one, two)
    assert status == 2 and printed.startswith("The runs cannot be compared: no step was logged by both")


class RunsCode:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


def test_arguments_that_would_run_code_are_not_read_and_run_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = write_state(tmp_path / "one"), write_state(tmp_path / "two")
    torch.save({"args": RunsCode(tmp_path / "made")}, two / "training_args.bin")
    status, printed = compared(capsys, one, two)
    assert status == 0 and not (tmp_path / "made").exists()
    assert f"two: The arguments are not known: {two / 'training_args.bin'} is not readable" in printed
    assert "one of the runs has none in its folder" in printed


def test_runs_that_logged_at_other_steps_are_compared_where_both_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write_state(tmp_path / "one")
    two = write_state(tmp_path / "two", [{"step": 1, "loss": 9.0}, *LOGGED[1:3], {"step": 6, "loss": 9.0}])
    status, printed = compared(capsys, one, two)
    assert status == 0 and "of 2 and 3, 1 are common" in printed
    assert printed.startswith("Equal: 6 logged values.")


def test_weights_of_another_shape_or_a_nan_differ_and_those_of_the_last_common_step_are_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = trained(tmp_path / "one")
    two = trained(tmp_path / "two", model=VectorClassifier(hidden=9), max_steps=2)
    shutil.copytree(two / "checkpoint-2", two / "checkpoint-1")
    status, printed = compared(capsys, one, two)
    layers = rows_below(printed, f"Weights in {one}/checkpoint-2 and {two}/checkpoint-2: 3 of 3 layers differ")
    assert status == 1 and all("another shape, or nan" in row for row in layers)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("bert.encoder.layer.0.output.dense.weight", "bert.encoder.layer.0"),
        ("lm_head.weight", "lm_head"),
        ("scale", "scale"),
    ],
)
def test_a_weight_belongs_to_its_layer(name: str, layer: str) -> None:
    found = LAYER.match(name)
    assert found is not None and found[0] == layer


def test_what_cannot_be_compared_is_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = trained(tmp_path / "one"), trained(tmp_path / "two")
    (two / "checkpoint-4" / "model.safetensors").write_bytes(b"no weights")
    capsys.readouterr()
    for words, said in (
        ((one, one), "give the folders of two trainings"),
        ((one, tmp_path / "nothing"), "nothing does not exist"),
        ((one, two), "checkpoint-4/model.safetensors is damaged"),
    ):
        assert main(["compare", *map(str, words)]) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and said in printed.err and printed.err.count("\n") == 1
    assert main(["compare", str(one), str(trained(tmp_path / "three")), "--html", str(tmp_path / "no" / "x.html")]) == 2
    assert "nothing was written" in capsys.readouterr().err


def test_a_record_of_an_earlier_release_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = trained(tmp_path / "one"), trained(tmp_path / "two")
    record = json.loads((one / "littrainer_run.json").read_text())
    for name in ("code", "data", "model"):
        record.pop(name)
    (one / "littrainer_run.json").write_text(json.dumps(record))
    status, printed = compared(capsys, one, two)
    assert status == 0 and "train data" in printed
