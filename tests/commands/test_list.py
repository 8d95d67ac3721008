from __future__ import annotations

import contextlib
import csv
import json
from pathlib import Path
from typing import Any

import pytest

from littrainer import EarlyStoppingCallback, TrainerCallback
from littrainer.checkpoint.store import open_store
from littrainer.cli import main
from tests.commands.report_folders import write_state
from tests.scenarios.trainers import quiet_trainer


def list_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return the listed trainings by name."""
    # A training printed its logs.
    capsys.readouterr()
    assert main(["list", "--json", str(folder)]) == 0
    return {run["name"]: run for run in json.loads(capsys.readouterr().out)}


class StopOrFail(TrainerCallback):
    """Callback that stops or fails at the second optimizer step."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = control.should_training_stop or state.global_step == 2
        if self.error is not None and state.global_step == 2:
            raise self.error


# Callback, further arguments, step and reason.
ENDS: dict[str, tuple[Any, dict[str, Any], int, str]] = {
    "complete": (StopOrFail, {"max_steps": 2}, 2, "completed"),
    "callback": (StopOrFail, {}, 2, "stopped before its last step, by a callback, a file STOP or the end of a stream"),
    "early stopping": (EarlyStoppingCallback, {}, 2, "stopped early: quality did not improve for 1 evaluation"),
    "max_minutes": (StopOrFail, {"max_minutes": 0}, 1, "stopped by max_minutes=0"),
    "error": (StopOrFail(ArithmeticError("secret")), {}, 2, "failed: ArithmeticError"),
    "Ctrl-C": (StopOrFail(KeyboardInterrupt()), {}, 2, "interrupted by Ctrl-C"),
    "exit": (StopOrFail(SystemExit(0)), {}, 2, "ended by the script"),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_training_is_listed_with_the_reason_of_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    callback, changes, step, reason = ENDS[name]
    trainer = quiet_trainer(
        tmp_path / "runs" / "first",
        trainer_kwargs={"callbacks": [callback], "compute_metrics": lambda _: {"quality": 0.5}},
        **{"max_steps": 4, "metric_for_best_model": "quality", **changes},
        **dict.fromkeys(("eval_strategy", "save_strategy"), "steps"),
        **dict.fromkeys(("eval_steps", "save_steps"), 1),
    )
    with contextlib.suppress(ArithmeticError, KeyboardInterrupt, SystemExit):
        trainer.train()
    run = list_runs(tmp_path, capsys)["runs/first"]
    assert (run["step"], run["end"]) == (step, reason)
    assert (run["metric"], run["best"], run["best_step"]) == ("quality", 0.5, 1)
    assert main(["list", str(tmp_path)]) == 0
    heading, row = capsys.readouterr().out.splitlines()
    assert heading.split()[:3] == ["NAME", "DATE", "STEPS"] and row.startswith("runs/first  20")
    assert f"{step}/{trainer.state.max_steps}" in row and "quality 0.5 (step 1)" in row and row.endswith(reason)
    # The record of the end stays when a script saves the state.
    if name == "complete":
        trainer.save_state()
        assert list_runs(tmp_path, capsys)["runs/first"]["end"] == reason


def test_folders_of_transformers_and_lightning_are_listed_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_state(tmp_path / "complete")
    write_state(tmp_path / "ended" / "checkpoint-3", global_step=3)
    write_state(tmp_path / "damaged")
    (tmp_path / "damaged" / "trainer_state.json").write_text("{")
    log = tmp_path / "lightning_logs" / "version_0"
    log.mkdir(parents=True)
    (log / "hparams.yaml").write_text("{}")
    (tmp_path / "metrics.csv").write_text("of another program\n")
    with (log / "metrics.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("step", "val_loss"), (9, 0.5), (19, 0.25)])
    runs = list_runs(tmp_path, capsys)
    shown = {name: (run["step"], run["metric"], run["best"], run["end"]) for name, run in runs.items()}
    assert shown == {
        "complete": (4, "loss", 0.625, "completed"),
        "ended": (3, "loss", 0.625, "stopped before its last step, by a callback or a time limit"),
        "damaged": (None, None, None, "not readable"),
        "lightning_logs/version_0": (20, "loss", 0.25, None),
    }


def test_a_training_without_a_recorded_end_is_running_or_was_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "littrainer_run.json").write_text('{"run": {"started": "2026-01-02 03:04:05+00:00"}}')
    assert list_runs(tmp_path, capsys)["run"]["end"] == "killed"
    with open_store(tmp_path / "run"):
        run = list_runs(tmp_path, capsys)["run"]
    assert (run["end"], run["step"], run["date"]) == ("running", None, "2026-01-02 03:04:05+00:00")


@pytest.mark.parametrize(("started", "end"), [("2026-01-02", "completed"), ("2999-01-02", "killed")])
def test_a_complete_state_of_this_start_is_of_a_completed_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], started: str, end: str
) -> None:
    write_state(tmp_path / "run")
    (tmp_path / "run" / "littrainer_run.json").write_text(f'{{"run": {{"started": "{started} 03:04:05+00:00"}}}}')
    assert list_runs(tmp_path, capsys)["run"]["end"] == end


@pytest.mark.parametrize(
    "record",
    [
        {"started": "yesterday"},
        {"started": 3},
        {"started": "2026-01-02 03:04:05"},
        *({"started": "2026-01-02 03:04:05+00:00", "end": end} for end in ("x", {"reason": 3}, {"step": []})),
    ],
)
def test_a_malformed_record_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], record: dict[str, Any]
) -> None:
    write_state(tmp_path / "damaged")
    (tmp_path / "damaged" / "littrainer_run.json").write_text(json.dumps({"run": record}))
    write_state(tmp_path / "sound")
    assert list_runs(tmp_path, capsys)["damaged"]["step"] == 4
    assert main(["list", str(tmp_path)]) == 0


def test_a_folder_without_trainings_is_said_to_have_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no training below {tmp_path}\n"
    assert main(["list", str(tmp_path / "missing")]) == 2
    assert "missing is no folder" in capsys.readouterr().err
