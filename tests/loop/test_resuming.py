from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from littrainer import Trainer, TrainerCallback, get_last_checkpoint
from littrainer.checkpoint import manager
from littrainer.checkpoint.checksums import MANIFEST_NAME
from littrainer.checkpoint.layout import RESUME_RECORD_NAME
from littrainer.checkpoint.manager import identify_checkpoints
from littrainer.checkpoint.safe_loading import load_tensors
from littrainer.distributed import environment
from littrainer.loop.resuming import read_resume_record
from tests.scenarios.data import Stream, vector_rows
from tests.scenarios.trainers import quiet_trainer

SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}


def train_up_to(folder: Path, step: int, **changes: Any) -> str:
    """Train up to a step and return its checkpoint."""

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == step

    parameters = {"callbacks": [Stop()], **changes.pop("trainer_kwargs", {})}
    quiet_trainer(folder, **{**SAVING, "rows": 18, "num_train_epochs": 2, **changes}, trainer_kwargs=parameters).train()
    return str(folder / f"checkpoint-{step}")


def resumed(folder: Path, checkpoint: str | bool, **changes: Any) -> Trainer:
    trainer = quiet_trainer(folder, **{**SAVING, "rows": 18, "num_train_epochs": 2, **changes})
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


def delete_record(checkpoint: str) -> str:
    """Delete the files that a checkpoint of transformers does not have."""
    for file in Path(checkpoint).glob("littrainer_*"):
        file.unlink()
    return checkpoint


def test_the_record_is_loaded_without_running_code_and_has_the_position(tmp_path: Path) -> None:
    record = load_tensors(Path(train_up_to(tmp_path, 7)) / RESUME_RECORD_NAME)
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
    ("changes", "parts"),
    [
        (
            {"per_device_train_batch_size": 2},
            [
                "per_device_train_batch_size: 2 (from args) != 4 (from trainer_state.json)",
                "9 micro-batches per epoch (before: 5)",
            ],
        ),
        (
            {"gradient_accumulation_steps": 2},
            [
                f"gradient_accumulation_steps: 2 (from args) != 1 {IN_RECORD}",
                "after the 12 rows of epoch 0 that were trained, and takes 7 optimizer steps in all",
            ],
        ),
        ({"rows": 30}, ["8 micro-batches per epoch (before: 5)", "30 training samples (before: 18)"]),
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
def test_a_single_warning_has_all_differences_from_the_training_that_wrote_the_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], parts: list[str], as_transformers: bool
) -> None:
    checkpoint = train_up_to(tmp_path, 3)
    if as_transformers:
        delete_record(checkpoint)
        # Differences that follow from the trainer state.
        parts = [part for part in parts if "trainer_state.json" in part]
        if not parts:
            return
    caplog.clear()
    resumed(tmp_path, checkpoint, **changes)
    assert caplog.text.count("written by another training") == 1
    for part in parts:
        assert part in caplog.text


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
    checkpoint = train_up_to(tmp_path, 4, **changes)
    if as_transformers:
        delete_record(checkpoint)
    caplog.clear()
    resumed(tmp_path, checkpoint, **changes)
    assert "another training" not in caplog.text


def test_a_longer_training_on_a_stream_has_the_same_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parameters = {"train_dataset": Stream(vector_rows(18))}
    checkpoint = train_up_to(tmp_path, 7, trainer_kwargs=parameters, max_steps=8)
    caplog.clear()
    with caplog.at_level("INFO", "littrainer"):
        trainer = resumed(tmp_path, checkpoint, trainer_kwargs=parameters, max_steps=9)
    assert f"max_steps: 9 (from args) != 8 {IN_RECORD}" in caplog.text and "micro-batches per epoch" not in caplog.text
    # The second epoch over the stream's five batches continues.
    assert trainer.state.epoch == pytest.approx(1 + 4 / 9)


@pytest.mark.parametrize("changes", [{"max_steps": 2}, {"num_train_epochs": 0.4}], ids=str)
def test_the_resume_of_a_finished_training_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any]
) -> None:
    checkpoint = train_up_to(tmp_path, 3)
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


def constant(quality: float) -> dict[str, Any]:
    return {"compute_metrics": lambda _: {"quality": quality}}


@pytest.mark.parametrize("copied", [False, True], ids=["moved", "copied"])
def test_the_best_checkpoint_is_found_after_the_run_was_moved(tmp_path: Path, copied: bool) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    train_up_to(old, 3, trainer_kwargs=falling(), **BEST)
    shutil.copytree(old, new)
    if not copied:
        shutil.rmtree(old)
    trainer = resumed(new, True, trainer_kwargs=constant(-10.0), save_total_limit=1, **BEST)
    assert trainer.state.best_model_checkpoint == str(new / "checkpoint-1")
    assert [path.name for path in new.glob("checkpoint-*")] == ["checkpoint-1"]
    weights = resumed_weights(str(new / "checkpoint-1"))
    assert all(torch.equal(value, weights[name]) for name, value in trainer.model.state_dict().items())


def test_a_best_checkpoint_in_another_folder_is_no_reason_to_delete_all_here(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    checkpoint = train_up_to(old, 3, trainer_kwargs=falling(), **BEST)
    trainer = resumed(new, checkpoint, trainer_kwargs=constant(-10.0), save_total_limit=1, **BEST)
    assert trainer.state.best_model_checkpoint == str(old / "checkpoint-1")
    assert (new / f"checkpoint-{trainer.state.global_step}").is_dir()


def test_a_deleted_best_checkpoint_is_ignored_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = train_up_to(tmp_path, 3, trainer_kwargs=falling(), **BEST)
    shutil.rmtree(tmp_path / "checkpoint-1")
    trainer = resumed(tmp_path, checkpoint, trainer_kwargs=falling(), **BEST)
    assert "checkpoint-1, is gone" in caplog.text
    assert trainer.state.best_model_checkpoint is None and trainer.state.best_metric == 9


def test_a_due_evaluation_at_the_end_of_an_epoch_is_run_after_a_resume(tmp_path: Path) -> None:
    settings = {"eval_strategy": "epoch", "logging_strategy": "no"}
    checkpoint = train_up_to(tmp_path, 5, **settings)
    steps = [
        entry["step"] for entry in resumed(tmp_path, checkpoint, **settings).state.log_history if "eval_loss" in entry
    ]
    assert steps == [5, 10]


def test_a_stop_at_the_due_evaluation_ends_the_training(tmp_path: Path) -> None:
    class StopAtEvaluation(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = True

    settings = {"eval_strategy": "epoch"}
    checkpoint = train_up_to(tmp_path, 5, **settings)
    trainer = resumed(tmp_path, checkpoint, trainer_kwargs={"callbacks": [StopAtEvaluation()]}, **settings)
    assert trainer.state.global_step == 5


def test_auto_resumes_from_the_newest_intact_checkpoint(tmp_path: Path) -> None:
    def trained(resume: Any, **changes: Any) -> int:
        trainer = quiet_trainer(tmp_path / "run", max_steps=3, save_strategy="steps", save_steps=1, **changes)
        trainer.train(resume_from_checkpoint=resume)
        return trainer.session.first_step

    assert (trained("auto"), trained("auto")) == (0, 3)
    (tmp_path / "run" / "checkpoint-3" / "optimizer.pt").unlink()
    assert trained(None, resume_from_checkpoint="auto") == 2
    assert trained(False, resume_from_checkpoint="auto") == 0
    assert trained(None, resume_from_checkpoint=True) == 0


def test_a_restarted_script_resumes_from_its_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*folders: str) -> list[int]:
        monkeypatch.setattr(manager, "_trainings", itertools.count())
        first_steps = []
        for folder in folders:
            trainer = quiet_trainer(tmp_path / folder, max_steps=2, save_strategy="steps", save_steps=1)
            trainer.train()
            first_steps.append(trainer.session.first_step)
        return first_steps

    # Checkpoints of an earlier run are ignored.
    assert started("run") == [0]
    monkeypatch.setenv(environment.REPORTS, f"{os.getppid()}:{tmp_path}")
    monkeypatch.setenv(environment.TRAININGS, str(tmp_path / "trainings.json"))
    assert started("run") == [0]
    # Names of folders may contain the time.
    assert started("run at noon", "second") == [2, 0]
    assert started("run at one", "second") == [2, 2]
    # A program that the script starts is not restarted.
    monkeypatch.setenv(environment.REPORTS, f"1:{tmp_path}")
    assert started("run") == [0]


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_restarted_script_ignores_an_older_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_remote: bool
) -> None:
    folder = f"file://{tmp_path}/there" if is_remote else str(tmp_path / "run")

    def started(is_interrupted: bool = False) -> int:
        monkeypatch.setattr(manager, "_trainings", itertools.count())
        trainer = quiet_trainer(folder, max_steps=2, save_strategy="steps", save_steps=1)
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
    # A user adds a file.
    newest = get_last_checkpoint(folder)
    assert newest is not None
    (Path(newest) / "README.md").write_text("from yesterday")
    assert (started(), started()) == (0, 2)


@pytest.mark.parametrize("changes", [{"max_steps": 12}, {"num_train_epochs": 3}], ids=str)
def test_a_prolonged_training_is_no_other_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any]
) -> None:
    checkpoint, (name, value) = train_up_to(tmp_path, 3), next(iter(changes.items()))
    caplog.clear()
    with caplog.at_level("INFO", "littrainer"):
        resumed(tmp_path, checkpoint, **changes)
    (record,) = [record for record in caplog.records if f"{name}: {value} (from args) !=" in record.getMessage()]
    assert record.levelname == "INFO" and "another training" not in caplog.text


def test_checkpoints_are_distinguished_without_a_manifest_that_can_be_read(tmp_path: Path) -> None:
    for step in (2, 4):
        (tmp_path / f"checkpoint-{step}").mkdir()
    # An input/output error when read.
    (tmp_path / "checkpoint-4" / MANIFEST_NAME).symlink_to("/proc/self/mem")
    before = identify_checkpoints(tmp_path)
    assert before.keys() == {"checkpoint-2", "checkpoint-4"} and identify_checkpoints(tmp_path) == before
