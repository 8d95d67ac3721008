from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from littrainer import Trainer, TrainerCallback, get_last_checkpoint
from littrainer.checkpoint import distributed_resume
from littrainer.checkpoint.checksums import MANIFEST_NAME
from littrainer.checkpoint.distributed_resume import identify_checkpoints
from littrainer.checkpoint.layout import RESUME_RECORD_NAME
from littrainer.checkpoint.safe_loading import load_tensors
from littrainer.distributed import environment
from littrainer.loop.resuming import read_resume_record
from tests.scenarios.data import Stream, vector_rows
from tests.scenarios.trainers import quiet_trainer

SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}


def broken_off(folder: Path, step: int, **changes: Any) -> str:
    """Train up to a step and return its checkpoint."""

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == step

    given = {"callbacks": [Stop()], **changes.pop("given", {})}
    quiet_trainer(folder, **{**SAVING, "rows": 18, "num_train_epochs": 2, **changes}, given=given).train()
    return str(folder / f"checkpoint-{step}")


def resumed(folder: Path, checkpoint: str | bool, **changes: Any) -> Trainer:
    trainer = quiet_trainer(folder, **{**SAVING, "rows": 18, "num_train_epochs": 2, **changes})
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


def without_record(checkpoint: str) -> str:
    """Make a checkpoint one of transformers', which has no record of ours."""
    for file in Path(checkpoint).glob("littrainer_*"):
        file.unlink()
    return checkpoint


def test_the_record_is_read_without_running_code_and_says_where_training_goes_on(tmp_path: Path) -> None:
    record = load_tensors(Path(broken_off(tmp_path, 7)) / RESUME_RECORD_NAME)
    assert record["position"] == {"epoch": 1, "micro_batches": 2, "epoch_end_is_due": False}
    assert record["sizes"]["epoch_length"] == 5 and record["arguments"]["per_device_train_batch_size"] == 4


@pytest.mark.parametrize("record", [[1], {"position": {}}, {"version": 2}], ids=["a list", "no version", "version 2"])
def test_a_record_of_another_kind_is_refused_by_name(tmp_path: Path, record: Any) -> None:
    torch.save(record, tmp_path / RESUME_RECORD_NAME)
    with pytest.raises(ValueError, match=r"littrainer_resume\.pt .*Use .* or delete"):
        read_resume_record(tmp_path)


IN_RECORD = "(from littrainer_resume.pt)"


@pytest.mark.parametrize("as_transformers", [False, True])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"per_device_train_batch_size": 2},
            [
                "per_device_train_batch_size: 2 (from args) != 4 (from trainer_state.json)",
                "9 micro-batches per epoch (5)",
            ],
        ),
        (
            {"gradient_accumulation_steps": 2},
            [
                f"gradient_accumulation_steps: 2 (from args) != 1 {IN_RECORD}",
                "behind the 12 rows of epoch 0 that were trained, and takes 7 optimizer steps in all",
            ],
        ),
        ({"rows": 30}, ["8 micro-batches per epoch (5)", "30 training samples (18)"]),
        ({"learning_rate": 0.5}, [f"learning_rate: 0.5 (from args) != 0.01 {IN_RECORD}, which is kept"]),
        ({"save_steps": 2}, ["save_steps: 2 (from args) != 1 (from trainer_state.json), which is kept"]),
        (
            {"seed": 7, "optim": "adamw_torch"},
            [
                f"seed: 7 (from args) != 42 {IN_RECORD}",
                f"optim: adamw_torch (from args) != adamw_torch_fused {IN_RECORD}",
            ],
        ),
    ],
    ids=lambda value: next(iter(value), "") if isinstance(value, dict) else "",
)
def test_what_differs_from_the_training_that_wrote_the_checkpoint_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], words: list[str], as_transformers: bool
) -> None:
    checkpoint = broken_off(tmp_path, 3)
    if as_transformers:
        without_record(checkpoint)
        # Its trainer state tells of these only.
        words = [word for word in words if "trainer_state.json" in word]
        if not words:
            return
    caplog.clear()
    resumed(tmp_path, checkpoint, **changes)
    assert caplog.text.count("written by another training") == 1
    for word in words:
        assert word in caplog.text


@pytest.mark.parametrize("as_transformers", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gradient_accumulation_steps": 3, "num_train_epochs": 4},
        {"logging_steps": 0.5, "logging_strategy": "steps"},
    ],
    ids=str,
)
def test_the_same_training_is_resumed_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], as_transformers: bool
) -> None:
    checkpoint = broken_off(tmp_path, 4, **changes)
    if as_transformers:
        without_record(checkpoint)
    caplog.clear()
    resumed(tmp_path, checkpoint, **changes)
    assert "another training" not in caplog.text


def test_a_stream_is_no_other_data_because_training_is_longer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = {"train_dataset": Stream(vector_rows(18))}
    checkpoint = broken_off(tmp_path, 7, given=given, max_steps=8)
    caplog.clear()
    with caplog.at_level("INFO", "littrainer"):
        trainer = resumed(tmp_path, checkpoint, given=given, max_steps=9)
    assert f"max_steps: 9 (from args) != 8 {IN_RECORD}" in caplog.text and "micro-batches per epoch" not in caplog.text
    # The second pass over the stream's five batches goes on, and is not begun anew.
    assert trainer.state.epoch == pytest.approx(1 + 4 / 9)


@pytest.mark.parametrize("changes", [{"max_steps": 2}, {"num_train_epochs": 0.4}], ids=str)
def test_a_training_that_is_finished_says_that_no_step_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any]
) -> None:
    checkpoint = broken_off(tmp_path, 3)
    output = quiet_trainer(tmp_path, rows=18, **changes).train(resume_from_checkpoint=checkpoint)
    assert output.global_step == 3 and "train_loss" in output.metrics
    assert "No step is left" in caplog.text and "has 3 optimizer steps" in caplog.text


def resumed_weights(checkpoint: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(Path(checkpoint) / "model.safetensors")


BEST: dict[str, Any] = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "metric_for_best_model": "quality",
    "load_best_model_at_end": True,
}


def falling() -> dict[str, Any]:
    values = iter(range(9, -9, -1))
    return {"compute_metrics": lambda _: {"quality": next(values)}}


@pytest.mark.parametrize("copied", [False, True], ids=["moved", "copied"])
def test_the_best_checkpoint_is_found_where_the_run_was_moved_to(tmp_path: Path, copied: bool) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    broken_off(old, 3, given=falling(), **BEST)
    shutil.copytree(old, new)
    if not copied:
        shutil.rmtree(old)
    left = iter([-10.0] * 20)
    given = {"compute_metrics": lambda _: {"quality": next(left)}}
    trainer = resumed(new, True, given=given, save_total_limit=1, **BEST)
    assert trainer.state.best_model_checkpoint == str(new / "checkpoint-1")
    assert [path.name for path in new.glob("checkpoint-*")] == ["checkpoint-1"]
    weights = resumed_weights(str(new / "checkpoint-1"))
    assert all(torch.equal(value, weights[name]) for name, value in trainer.model.state_dict().items())


def test_a_best_checkpoint_in_another_folder_is_no_reason_to_delete_all_here(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    checkpoint = broken_off(old, 3, given=falling(), **BEST)
    left = iter([-10.0] * 20)
    given = {"compute_metrics": lambda _: {"quality": next(left)}}
    trainer = resumed(new, checkpoint, given=given, save_total_limit=1, **BEST)
    assert trainer.state.best_model_checkpoint == str(old / "checkpoint-1")
    assert (new / f"checkpoint-{trainer.state.global_step}").is_dir()


def test_a_best_checkpoint_that_is_gone_is_forgotten_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = broken_off(tmp_path, 3, given=falling(), **BEST)
    shutil.rmtree(tmp_path / "checkpoint-1")
    trainer = resumed(tmp_path, checkpoint, given=falling(), **BEST)
    assert "checkpoint-1, is gone" in caplog.text
    assert trainer.state.best_model_checkpoint is None and trainer.state.best_metric == 9


def test_an_evaluation_of_the_epoch_that_the_checkpoint_was_written_in_is_made_after_a_resume(tmp_path: Path) -> None:
    settings = {"eval_strategy": "epoch", "logging_strategy": "no"}
    checkpoint = broken_off(tmp_path, 5, **settings)
    steps = [
        entry["step"] for entry in resumed(tmp_path, checkpoint, **settings).state.log_history if "eval_loss" in entry
    ]
    assert steps == [5, 10]


def test_a_stop_at_the_evaluation_that_was_due_ends_the_training(tmp_path: Path) -> None:
    class StopAtEvaluation(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = True

    settings = {"eval_strategy": "epoch"}
    checkpoint = broken_off(tmp_path, 5, **settings)
    trainer = resumed(tmp_path, checkpoint, given={"callbacks": [StopAtEvaluation()]}, **settings)
    assert trainer.state.global_step == 5


def test_auto_resumes_from_the_newest_intact_checkpoint(tmp_path: Path) -> None:
    def trained(resume: Any, **changes: Any) -> int:
        trainer = quiet_trainer(tmp_path / "run", max_steps=3, save_strategy="steps", save_steps=1, **changes)
        trainer.train(resume_from_checkpoint=resume)
        return trainer.session.first_step

    assert (trained("auto"), trained("auto")) == (0, 3)
    (tmp_path / "run" / "checkpoint-3" / "optimizer.pt").unlink()
    assert trained(None, resume_from_checkpoint="auto") == 2
    # Who says that it begins, begins.
    assert trained(False, resume_from_checkpoint="auto") == 0
    assert trained(None, resume_from_checkpoint=True) == 0


def test_a_script_that_is_started_again_goes_on_from_what_it_wrote_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*folders: str) -> list[int]:
        # The script's trainings are numbered in the order in which they begin.
        monkeypatch.setattr(distributed_resume, "_trainings", itertools.count())
        first_steps = []
        for folder in folders:
            trainer = quiet_trainer(tmp_path / folder, max_steps=2, save_strategy="steps", save_steps=1)
            trainer.train()
            first_steps.append(trainer.session.first_step)
        return first_steps

    # Not what an earlier run has left in the folder.
    assert started("run") == [0]
    monkeypatch.setenv(environment.REPORTS, f"{os.getppid()}:{tmp_path}")
    monkeypatch.setenv(environment.TRAININGS, str(tmp_path / "trainings.json"))
    assert started("run") == [0]
    # A folder may be named by the time, and a further training begins.
    assert started("run at noon", "second") == [2, 0]
    assert started("run at one", "second") == [2, 2]
    # A program that the script starts is not started again.
    monkeypatch.setenv(environment.REPORTS, f"1:{tmp_path}")
    assert started("run") == [0]


@pytest.mark.parametrize("is_at_address", [False, True])
def test_a_script_that_is_started_again_does_not_take_an_older_run_for_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_at_address: bool
) -> None:
    place = f"file://{tmp_path}/there" if is_at_address else str(tmp_path / "run")

    def started(is_interrupted: bool = False) -> int:
        monkeypatch.setattr(distributed_resume, "_trainings", itertools.count())
        trainer = quiet_trainer(place, max_steps=2, save_strategy="steps", save_steps=1)
        if is_interrupted:
            trainer.add_callback(Interrupted())
        trainer.train()
        return trainer.session.first_step

    class Interrupted(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            raise InterruptedError

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "one"))
    assert started() == 0
    # An empty disk.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "two"))
    monkeypatch.setenv(environment.REPORTS, f"{os.getppid()}:{tmp_path}")
    monkeypatch.setenv(environment.TRAININGS, str(tmp_path / "trainings.json"))
    with pytest.raises(InterruptedError):
        started(is_interrupted=True)
    # Somebody looks at it, and makes a note.
    newest = get_last_checkpoint(place)
    assert newest is not None
    (Path(newest) / "README.md").write_text("from yesterday")
    assert (started(), started()) == (0, 2)


@pytest.mark.parametrize("changes", [{"max_steps": 12}, {"num_train_epochs": 3}], ids=str)
def test_the_same_training_prolonged_is_no_other_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any]
) -> None:
    checkpoint, (name, now) = broken_off(tmp_path, 3), next(iter(changes.items()))
    caplog.clear()
    with caplog.at_level("INFO", "littrainer"):
        resumed(tmp_path, checkpoint, **changes)
    (record,) = [record for record in caplog.records if f"{name}: {now} (from args) !=" in record.getMessage()]
    assert record.levelname == "INFO" and "another training" not in caplog.text


def test_checkpoints_are_distinguished_without_a_manifest_that_can_be_read(tmp_path: Path) -> None:
    for step in (2, 4):
        (tmp_path / f"checkpoint-{step}").mkdir()
    # Reading it is an input/output error.
    (tmp_path / "checkpoint-4" / MANIFEST_NAME).symlink_to("/proc/self/mem")
    before = identify_checkpoints(tmp_path)
    assert before.keys() == {"checkpoint-2", "checkpoint-4"} and identify_checkpoints(tmp_path) == before
