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


def train(folder: Path, trainer_kwargs: dict[str, Any] | None = None, **changes: Any) -> Path:
    """Train four steps, with a log of each, two evaluations and two saves."""
    settings = {"max_steps": 4, "logging_strategy": "steps", "logging_steps": 1, "eval_strategy": "steps"}
    settings |= {"eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    quiet_trainer(folder, trainer_kwargs=trainer_kwargs, **{**settings, **changes}).train()
    return folder


def compare(capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[int, str]:
    """Run the command; return its exit status and output."""
    capsys.readouterr()
    return main(["compare", *map(str, words)]), capsys.readouterr().out


def rows_below(printed: str, title: str) -> list[str]:
    """Return the rows of the table with this title."""
    table = next(part for part in printed.split("\n\n") if part.startswith(title))
    return [line.strip() for line in table.splitlines()[2:]]


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.com"]
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


def create_repository(folder: Path) -> Path:
    """Create a repository with a script, and a module that the script imports."""
    folder.mkdir()
    (folder / "train.py").write_text("import model\n")
    (folder / "model.py").write_text("layers = 2\n")
    git(folder, "init")
    git(folder, "add", ".")
    git(folder, "commit", "-m", "first", "--date", "2026-01-01T00:00:00")
    return folder


def run_from(monkeypatch: pytest.MonkeyPatch, script: Path, folder: Path) -> Path:
    monkeypatch.setattr(run_record.sys.modules["__main__"], "__file__", str(script), raising=False)
    return train(folder)


Pair = tuple[Path, Path]


def other_rate(folder: Path, _: Any = None) -> Pair:
    return train(folder / "left"), train(folder / "right", learning_rate=0.02)


def other_objects(**kwargs: Any) -> Callable[[Path, pytest.MonkeyPatch], Pair]:
    return lambda folder, _: (train(folder / "left"), train(folder / "right", trainer_kwargs=kwargs))


def other_release(folder: Path, _: pytest.MonkeyPatch) -> Pair:
    pair = train(folder / "left"), train(folder / "right")
    record = pair[1] / "littrainer_run.json"
    record.write_text(record.read_text().replace(torch.__version__, "2.6.0+cu124"))
    return pair


def other_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    old = create_repository(folder / "code")
    new = Path(shutil.copytree(old, folder / "later"))
    (new / "model.py").write_text("layers = 3\n")
    git(new, "commit", "-am", "second")
    first, second = (run_from(monkeypatch, code / "train.py", code / "out") for code in (old, new))
    return first, second


def other_weights() -> VectorClassifier:
    torch.manual_seed(4)
    return VectorClassifier()


# Row expected in "What differs from the start" -> right runs with this difference.
PAIRS: dict[str, Callable[[Path, pytest.MonkeyPatch], Pair]] = {
    "learning_rate": other_rate,
    "train data": other_objects(train_dataset=[*vector_rows(9), {"x": torch.ones(6), "labels": 0}]),
    "weights at the start": lambda folder, _: (
        train(folder / "left"),
        train(folder / "right", model=other_weights()),
    ),
    "torch": other_release,
    "commit": other_code,
}


def test_each_cause_of_a_difference_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    named = []
    for cause, make in PAIRS.items():
        (tmp_path / cause).mkdir()
        with monkeypatch.context() as patch:
            _, printed = compare(capsys, *make(tmp_path / cause, patch))
        (row,) = rows_below(printed, "What differs from the start")
        named += [cause] if row.startswith(f"{cause}  ") else []
    assert named == list(PAIRS)


def test_the_first_step_the_last_values_and_the_layers_are_named_on_the_console_and_on_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair, target = other_rate(tmp_path), tmp_path / "page.html"
    status, printed = compare(capsys, *pair, "--html", target)
    assert status == 1
    # The schedule is linear: after the first step the rates have fallen by a quarter.
    assert printed.startswith("The logs differ first at step 1: learning_rate is 0.01 and 0.02. No value before it is")
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
    left, right = train(tmp_path / "left"), train(tmp_path / "right")
    status, printed = compare(capsys, left, right)
    assert status == 0 and printed.startswith("Equal: ") and "and all weights" in printed.splitlines()[0]
    assert rows_below(printed, "What differs from the start") == ["nothing that is known"]

    transformers = pytest.importorskip("transformers")
    (right / "littrainer_run.json").unlink()
    args = transformers.TrainingArguments("elsewhere", learning_rate=0.25, hub_token="hf_secret", use_cpu=True)
    for folder in (right, right / "checkpoint-4", right / "checkpoint-2"):
        torch.save(args, folder / "training_args.bin")
    status, printed = compare(capsys, left, right)
    assert status == 0 and "hf_secret" not in printed
    (rate,) = [row for row in rows_below(printed, "What differs from the start") if row.startswith("learning_rate")]
    assert rate.split() == ["learning_rate", "0.01", "0.25"]
    assert "one of the runs has no littrainer_run.json" in printed


def test_runs_without_a_common_step_and_without_weights_are_not_called_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left, right = (write_state(tmp_path / str(step), [{"step": step, "loss": 1.0}]) for step in (1, 2))
    status, printed = compare(capsys, left, right)
    assert status == 2 and printed.startswith("The runs cannot be compared: no step was logged by both")


class RunsCode:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


def test_arguments_that_would_run_code_are_not_read_and_run_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left, right = write_state(tmp_path / "left"), write_state(tmp_path / "right")
    torch.save({"args": RunsCode(tmp_path / "created")}, right / "training_args.bin")
    status, printed = compare(capsys, left, right)
    assert status == 0 and not (tmp_path / "created").exists()
    assert f"right: The arguments are not known: {right / 'training_args.bin'} is not readable" in printed
    assert "one of the runs has none in its folder" in printed


def test_runs_that_logged_at_other_steps_are_compared_where_both_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left = write_state(tmp_path / "left")
    right = write_state(tmp_path / "right", [{"step": 1, "loss": 9.0}, *LOGGED[1:3], {"step": 6, "loss": 9.0}])
    status, printed = compare(capsys, left, right)
    assert status == 0 and "of 2 and 3, 1 are common" in printed
    assert printed.startswith("Equal: 6 logged values.")


def test_weights_of_the_last_common_step_are_compared_and_differ_in_shape(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left = train(tmp_path / "left")
    right = train(tmp_path / "right", model=VectorClassifier(hidden=9), max_steps=2)
    shutil.copytree(right / "checkpoint-2", right / "checkpoint-1")
    status, printed = compare(capsys, left, right)
    layers = rows_below(printed, f"Weights in {left}/checkpoint-2 and {right}/checkpoint-2: 3 of 3 layers differ")
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
    match = LAYER.match(name)
    assert match is not None and match[0] == layer


def test_incomparable_folders_are_reported_in_a_line_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left, right = train(tmp_path / "left"), train(tmp_path / "right")
    (right / "checkpoint-4" / "model.safetensors").write_bytes(b"no weights")
    capsys.readouterr()
    for words, message in (
        ((left, left), "give the folders of two trainings"),
        ((left, tmp_path / "nothing"), "nothing does not exist"),
        ((left, right), "checkpoint-4/model.safetensors is damaged"),
    ):
        assert main(["compare", *map(str, words)]) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and message in printed.err and printed.err.count("\n") == 1
    assert main(["compare", str(left), str(train(tmp_path / "three")), "--html", str(tmp_path / "no" / "x.html")]) == 2
    assert "nothing was written" in capsys.readouterr().err


def test_a_record_of_an_earlier_release_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left, right = train(tmp_path / "left"), train(tmp_path / "right")
    record = json.loads((left / "littrainer_run.json").read_text())
    for name in ("code", "data", "model"):
        record.pop(name)
    (left / "littrainer_run.json").write_text(json.dumps(record))
    status, printed = compare(capsys, left, right)
    assert status == 0 and "train data" in printed
