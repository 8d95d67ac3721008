"""Non-finite numbers in a training; tests/faults/numbers.py has random ones."""

from __future__ import annotations

import logging
import math
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch
import pytest
import torch
from torch.utils.data import IterableDataset

from littrainer import EarlyStoppingCallback, Trainer, TrainerCallback, UnhealthyTrainingError, get_last_checkpoint
from littrainer.checkpoint.checksums import write_manifest
from tests.scenarios.data import Rows, language_rows, vector_rows
from tests.scenarios.models import VectorClassifier, tiny_gpt2
from tests.scenarios.trainers import StepwiseTrainer, quiet_trainer

BAD_ROW = 13
IN_ORDER = {"train_sampling_strategy": "sequential"}
LOGGING = {"logging_strategy": "steps", "logging_steps": 3}
SAVING = {"save_strategy": "steps", "save_steps": 2}


def make_rows(count: int = 48) -> list[Any]:
    rows = [{**row, "number": number} for number, row in enumerate(vector_rows(count))]
    rows[BAD_ROW]["x"] = torch.full_like(rows[BAD_ROW]["x"], math.inf)
    return rows


class RecordingModel(VectorClassifier):
    """A model with dropout that records the rows of each training micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = torch.nn.Dropout(0.2)
        self.batches: list[list[int]] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, number: torch.Tensor | None = None) -> Any:
        if self.training and number is not None:
            self.batches.append(number.tolist())
        return super().forward(self.dropout(x), labels)


def recording_trainer(
    folder: Path, rows: Any = None, trainer_kwargs: dict[str, Any] | None = None, **changes: Any
) -> Trainer:
    torch.manual_seed(0)
    data = Rows(make_rows()) if rows is None else rows
    kind = changes.pop("kind", Trainer)
    return quiet_trainer(
        folder, RecordingModel(), kind=kind, trainer_kwargs={"train_dataset": data, **(trainer_kwargs or {})}, **changes
    )


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: part.clone() for name, part in trainer.model.state_dict().items()}


def are_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(part, second[name]) for name, part in first.items())


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [record for record in caplog.records if record.levelno == logging.WARNING and "littr" in record.name]
    return [record.getMessage() for record in records]


# ---- Warnings --------------------------------------------------------------------------------------------------------


def test_a_single_warning_has_step_numbers_rows_first_nonfinite_value_and_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = recording_trainer(tmp_path, max_steps=9, **IN_ORDER, **LOGGING, **SAVING)
    trainer.train()
    (message,) = warnings_in(caplog)
    assert message.startswith(
        "Optimizer step 4: the loss is nan and the gradient norm nan. First non-finite value: the data, row"
    )
    assert f"row {BAD_ROW} in x. The rows of this batch are 12, 13, 14, 15 of the train_dataset." in message
    assert f"The last healthy checkpoint is {tmp_path / 'checkpoint-2'}. To resume (set on_nonfinite=" in message


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {**IN_ORDER, "gradient_accumulation_steps": 2},
        {"accelerator_config": {"use_seedable_sampler": False}},
        {"train_sampling_strategy": "group_by_length", "remove_unused_columns": False},
        {"dataloader_num_workers": 1, "accelerator_config": {"use_seedable_sampler": False}},
    ],
    ids=["seeded by epoch", "in order", "from the global generator", "by length", "read by a worker"],
)
def test_the_rows_of_a_trained_batch_can_be_computed(tmp_path: Path, changes: dict[str, Any]) -> None:
    rows_by_batch: dict[tuple[int, int], Any] = {}

    class RowRecorder(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            windows = trainer.session.run.windows
            for number in range(windows.micro_batches_read):
                rows_by_batch[windows.epoch, number] = windows.find_rows(windows.epoch, number)

    rows = [
        {**row, "number": number, "input_ids": [0] * (number % 5 + 1)} for number, row in enumerate(vector_rows(22))
    ]

    def collate(samples: list[Any]) -> Any:
        names = ("x", "labels", "number")
        return torch.utils.data.default_collate([{name: sample[name] for name in names} for sample in samples])

    parameters = {"data_collator": collate, "callbacks": [RowRecorder()]}
    trainer = recording_trainer(tmp_path, Rows(rows), parameters, num_train_epochs=2, **changes)
    trainer.train()
    batches = trainer.model.batches
    assert len(batches) == len(rows_by_batch) == 12
    assert [rows_by_batch[epoch, batch] for epoch in range(2) for batch in range(6)] == batches


class Stream(IterableDataset):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def test_a_warning_about_a_stream_has_the_number_of_the_micro_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recording_trainer(tmp_path, Stream(make_rows()), max_steps=6, gradient_accumulation_steps=2).train()
    (message,) = warnings_in(caplog)
    assert "Optimizer step 2: the loss is nan" in message
    assert (
        "First non-finite value: the loss or the data or the weights. The fault is in micro-batch 4 of epoch 1."
        in message
    )


@pytest.mark.parametrize("policy", ["warn", "skip"])
def test_a_warning_has_the_share_of_optimizer_steps_without_labels(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, policy: str
) -> None:
    rows = [{"input_ids": row["input_ids"], "labels": [-100] * len(row["labels"])} for row in language_rows(2)]
    rows = [{"input_ids": [6, 7, 8], "labels": [6, 7, 8]} for _ in range(6)] + [
        {"input_ids": row["input_ids"][:3], "labels": row["labels"][:3]} for row in rows
    ]
    changes = {"per_device_train_batch_size": 2, **IN_ORDER, "on_nonfinite": policy}
    quiet_trainer(
        tmp_path, tiny_gpt2(), trainer_kwargs={"train_dataset": Rows(rows)}, max_steps=7, **changes, **LOGGING
    ).train()
    shares = [text for text in warnings_in(caplog) if "no label that counts" in text]
    assert len(shares) == 1 and shares[0].startswith("1 of 6 optimizer steps so far (16.7%)")
    faults = [text for text in warnings_in(caplog) if text not in shares]
    assert len(faults) == 1 and "First non-finite value: the loss, divided by 0 labels (all are -100)" in faults[0]


class Tagger(torch.nn.Module):
    """A model without num_items_in_batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(64, 3)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        losses = torch.nn.functional.cross_entropy(
            self.embedding(input_ids).flatten(0, 1), labels.flatten(), reduction="sum"
        )
        return {"loss": losses / labels.ne(-100).sum().clamp(min=1)}


def test_missing_labels_are_counted_for_a_model_without_num_items_in_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"input_ids": torch.tensor([6, 7]), "labels": torch.tensor([1, 2])} for _ in range(12)]
    for row in rows[4:8]:
        row["labels"] = torch.tensor([-100, -100])
    changes = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "num_train_epochs": 1}
    quiet_trainer(tmp_path, Tagger(), trainer_kwargs={"train_dataset": Rows(rows)}, **IN_ORDER, **changes).train()
    (message,) = [text for text in warnings_in(caplog) if "no label that counts" in text]
    assert message.startswith("1 of 3 optimizer steps so far (33.3%)")


def test_stop_saves_no_nonfinite_weights_and_its_error_has_the_facts(tmp_path: Path) -> None:
    trainer = recording_trainer(
        tmp_path,
        max_steps=9,
        **IN_ORDER,
        on_nonfinite="stop",
        save_strategy="steps",
        save_steps=3,
    )
    with pytest.raises(UnhealthyTrainingError, match="To resume") as raised:
        trainer.train()
    error = pickle.loads(pickle.dumps(raised.value))
    assert str(error) == str(raised.value)
    assert (error.step, error.rows, error.checkpoint) == (4, [12, 13, 14, 15], tmp_path / "checkpoint-3")
    assert error.loss is not None and math.isnan(error.loss)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]
    # A resume with rollback skips the batch.
    resumed = recording_trainer(tmp_path, max_steps=9, **IN_ORDER, on_nonfinite="rollback", **SAVING)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 9 and all(part.isfinite().all() for part in weights(resumed).values())


# ---- Skipped steps ---------------------------------------------------------------------------------------------------


class ScheduleRecorder(TrainerCallback):
    """A callback that records the learning rate, the optimizer's step count and a weight after each step."""

    def __init__(self) -> None:
        self.entries: list[tuple[float, float, float]] = []

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, lr_scheduler: Any, **_: Any
    ) -> None:
        moments = optimizer.state.get(model.head.bias, {})
        self.entries.append((lr_scheduler.get_last_lr()[0], float(moments.get("step", 0)), model.head.bias[0].item()))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (Trainer, {}),
        (Trainer, {"max_grad_norm": 0.0}),
        (Trainer, {"lightning": {"profiler": "simple"}}),
        (StepwiseTrainer, {}),
    ],
    ids=["fast loop", "no clipping", "Lightning's own loop", "own training_step"],
)
def test_a_skipped_step_changes_neither_weights_nor_moments_and_the_schedule_continues(
    tmp_path: Path, kind: type[Trainer], changes: dict[str, Any]
) -> None:
    recorder = ScheduleRecorder()
    settings = {"on_nonfinite": "skip", **IN_ORDER, "max_steps": 6, **changes}
    parameters = {"callbacks": [recorder]}
    trainer = recording_trainer(tmp_path, trainer_kwargs=parameters, kind=kind, optim="adamw_torch", **settings)
    trainer.train()
    rates, counts, biases = zip(*recorder.entries, strict=True)
    assert trainer.state.global_step == 6
    assert counts == (1, 2, 3, 3, 4, 5) and biases[2] == biases[3] != biases[4]
    assert rates == pytest.approx([0.01 * (1 - step / 6) for step in range(1, 7)])


def test_skipping_the_first_step_causes_no_warning_about_the_order_of_schedule_and_optimizer(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    rows = make_rows()
    recording_trainer(tmp_path, Rows(rows[BAD_ROW:]), **IN_ORDER, on_nonfinite="skip", max_steps=3).train()
    assert not [warning for warning in recwarn if "lr_scheduler.step()" in str(warning.message)]


class BufferModel(RecordingModel):
    """A model with buffers that forward passes change in place or replace."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = torch.nn.BatchNorm1d(6)
        self.register_buffer("largest", torch.zeros(()), persistent=False)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        self.largest = torch.maximum(self.largest, x.detach().max())
        return super().logits(self.batch_norm(x))


class BufferRecorder(TrainerCallback):
    """A callback that records all buffers before and after each optimizer step."""

    def __init__(self) -> None:
        self.before: list[Any] = []
        self.after: list[Any] = []

    def on_step_begin(self, *_: Any, model: Any, **__: Any) -> None:
        self.before.append({name: part.clone() for name, part in model.named_buffers()})

    def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
        self.after.append({name: part.clone() for name, part in model.named_buffers()})


@pytest.mark.parametrize("policy", ["skip", "rollback"])
@pytest.mark.parametrize("kind", [Trainer, StepwiseTrainer], ids=["", "own training_step"])
def test_a_skipped_step_restores_buffers(tmp_path: Path, kind: type[Trainer], policy: str) -> None:
    torch.manual_seed(0)
    recorder, rows = BufferRecorder(), make_rows()
    settings = {"max_steps": 5, **IN_ORDER, "gradient_accumulation_steps": 2, **SAVING}
    parameters = {"train_dataset": Rows(rows), "eval_dataset": Rows(rows[:4]), "callbacks": [recorder]}
    trainer = quiet_trainer(
        tmp_path, BufferModel(), kind=kind, trainer_kwargs=parameters, on_nonfinite=policy, **settings
    )
    trainer.train()
    assert all(part.isfinite().all() for buffers in recorder.after for part in buffers.values())
    # The bad row is in the second micro-batch of the second step.
    assert (policy == "rollback") or are_equal(recorder.before[1], recorder.after[1])
    assert not are_equal(recorder.before[2], recorder.after[2])
    assert math.isfinite(trainer.evaluate()["eval_loss"])
    assert get_last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-5")


def test_nonfinite_weights_end_a_training_that_skips_steps(tmp_path: Path) -> None:
    trainer = recording_trainer(tmp_path, Rows(make_rows()[20:]), on_nonfinite="skip", max_steps=5)
    trainer.model.head.weight.data[0, 0] = math.nan
    with pytest.raises(UnhealthyTrainingError, match=r"First non-finite value: the weights \(head.weight\)"):
        trainer.train()
    assert trainer.state.global_step == 0


# ---- Rollback --------------------------------------------------------------------------------------------------------


def drop_window(batches: list[list[int]], row: int, accumulation: int) -> list[list[int]]:
    windows = [batches[start : start + accumulation] for start in range(0, len(batches), accumulation)]
    return [batch for window in windows if not any(row in batch for batch in window) for batch in window]


def test_a_rollback_in_random_order_continues_with_the_windows_after_the_skipped_window(tmp_path: Path) -> None:
    finite = make_rows()
    finite[BAD_ROW] = {**vector_rows(48)[BAD_ROW], "number": BAD_ROW}
    changes = {"gradient_accumulation_steps": 2, "num_train_epochs": 1, **SAVING, **LOGGING}
    reference = recording_trainer(tmp_path / "reference", Rows(finite), **changes)
    reference.train()
    trainer = recording_trainer(tmp_path / "rollback", on_nonfinite="rollback", **changes)
    trainer.train()
    expected = drop_window(reference.model.batches, BAD_ROW, 2)
    # Batches after the checkpoint were trained twice.
    assert trainer.model.batches[-len(expected[-4:]) :] == expected[-4:]
    steps = len(expected) // 2
    assert trainer.state.global_step == trainer.state.max_steps == steps == 5
    assert all((tmp_path / "rollback" / f"checkpoint-{step}").is_dir() for step in (0, steps))
    assert all(part.isfinite().all() for part in weights(trainer).values())
    steps_logged = [entry["step"] for entry in trainer.state.log_history if "loss" in entry]
    assert steps_logged == [3]


def test_a_skipped_window_is_skipped_after_a_kill_and_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # The bad row is in step 8; the kill follows the checkpoint of a replayed step.
    rows = make_rows(60)
    rows[28], rows[BAD_ROW] = {**rows[BAD_ROW], "number": 28}, {**rows[28], "number": BAD_ROW}
    changes = {
        "max_steps": 12,
        **IN_ORDER,
        "on_nonfinite": "rollback",
        "save_strategy": "steps",
        "save_steps": 6,
        "lr_scheduler_type": "constant",
    }
    reference = recording_trainer(tmp_path / "reference", Rows(rows), **changes)
    reference.train()

    class SaveAfterRollback(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.times = getattr(self, "times", 0) + (state.global_step == 7)
            control.should_save = control.should_save or (state.global_step == 7 and self.times == 2)
            if state.global_step == 8:
                raise ZeroDivisionError

    killed = recording_trainer(tmp_path / "killed", Rows(rows), {"callbacks": [SaveAfterRollback()]}, **changes)
    with pytest.raises(ZeroDivisionError):
        killed.train()
    caplog.clear()
    resumed = recording_trainer(tmp_path / "killed", Rows(rows), **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "killed" / "checkpoint-7"))
    assert "goes back" not in caplog.text
    assert are_equal(weights(resumed), weights(reference)) and not any(28 in batch for batch in resumed.model.batches)


def test_a_stream_continues_after_the_skipped_batch(tmp_path: Path) -> None:
    rows = make_rows()
    changes = {"max_steps": 8, "lr_scheduler_type": "constant", **SAVING}
    trainer = recording_trainer(tmp_path / "rollback", Stream(rows), on_nonfinite="rollback", **changes)
    trainer.train()
    expected = recording_trainer(tmp_path / "finite", Stream(rows[:12] + rows[16:]), **changes)
    expected.train()
    assert trainer.state.global_step == 8 and are_equal(weights(trainer), weights(expected))


def test_max_steps_are_reached_in_more_epochs_and_a_rollback_waits_for_a_background_save(tmp_path: Path) -> None:
    rows = make_rows(16)
    changes = {"lr_scheduler_type": "constant", **IN_ORDER, **SAVING}
    trainer = recording_trainer(
        tmp_path / "rollback", Rows(rows), max_steps=8, on_nonfinite="rollback", async_save=True, **changes
    )
    trainer.train()
    # Both epochs lose a step, so that a third epoch begins.
    expected = recording_trainer(tmp_path / "finite", Rows(rows[:12]), max_steps=8, **changes)
    expected.train()
    assert trainer.session.health.skipped_windows == [(0, 3), (1, 3)] and trainer.state.global_step == 8
    assert are_equal(weights(trainer), weights(expected))


def test_a_rollback_ignores_checkpoints_of_an_earlier_training_in_the_folder(tmp_path: Path) -> None:
    recording_trainer(tmp_path, Rows(vector_rows(40)), max_steps=2, **SAVING).train()
    trainer = recording_trainer(
        tmp_path,
        max_steps=6,
        save_strategy="steps",
        save_steps=50,
        on_nonfinite="rollback",
        **IN_ORDER,
        lr_scheduler_type="constant",
    )
    trainer.train()
    rows = make_rows()
    expected = recording_trainer(
        tmp_path / "finite",
        Rows(rows[:12] + rows[16:]),
        max_steps=6,
        **IN_ORDER,
        lr_scheduler_type="constant",
    )
    expected.train()
    assert are_equal(weights(trainer), weights(expected))


def test_a_rollback_is_no_exception_to_lightning_callbacks_and_another_layout_has_a_single_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class ExceptionRecorder(lightning.pytorch.Callback):
        exceptions: ClassVar[list[BaseException]] = []

        def on_exception(
            self,
            trainer: lightning.pytorch.Trainer,
            module: lightning.pytorch.LightningModule,
            exception: BaseException,
        ) -> None:
            self.exceptions.append(exception)

    changes = {**IN_ORDER, "on_nonfinite": "rollback"}
    recording_trainer(tmp_path, max_steps=2, **changes, **SAVING).train()
    changes |= {"max_steps": 8, "save_strategy": "steps", "save_steps": 50, "per_device_train_batch_size": 2}
    trainer = recording_trainer(tmp_path, trainer_kwargs={"callbacks": [ExceptionRecorder()]}, **changes)
    trainer.train(resume_from_checkpoint=True)
    assert len(trainer.session.health.skipped_windows) == 1 and not ExceptionRecorder.exceptions
    assert caplog.text.count("which was written by another training") == 1


def test_repeated_rollbacks_end_with_an_error(tmp_path: Path) -> None:
    rows = vector_rows(80)
    for row in rows[8:]:
        row["x"] = row["x"] * math.nan
    trainer = recording_trainer(tmp_path, Rows(rows), max_steps=20, on_nonfinite="rollback", **IN_ORDER, **SAVING)
    with pytest.raises(UnhealthyTrainingError, match=r"step 3: .* 10 batches have been left out at this step"):
        trainer.train()
    assert trainer.state.global_step == 2


def test_a_training_that_skips_each_batch_ends_with_an_error(tmp_path: Path) -> None:
    rows = [{**row, "x": row["x"] * math.nan} for row in vector_rows(12)]
    trainer = recording_trainer(tmp_path, Rows(rows), num_train_epochs=2, on_nonfinite="rollback", **SAVING)
    with pytest.raises(UnhealthyTrainingError, match="has left out all other batches, so nothing is trained"):
        trainer.train()


def test_a_rollback_ignores_a_damaged_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class DamageCheckpoint(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                Path(args.output_dir, "checkpoint-2", "optimizer.pt").write_bytes(b"")

    changes = {**IN_ORDER, "max_steps": 4, **SAVING}
    trainer = recording_trainer(
        tmp_path, trainer_kwargs={"callbacks": [DamageCheckpoint()]}, on_nonfinite="rollback", **changes
    )
    trainer.train()
    assert f"Skipping the damaged checkpoint {tmp_path / 'checkpoint-2'}: optimizer.pt has 0 bytes" in caplog.text
    assert f"goes back to {tmp_path / 'checkpoint-0'}" in caplog.text and trainer.state.global_step == 4


@pytest.mark.parametrize("harm", ["not finite", "deleted"])
def test_a_rollback_ignores_a_resumed_checkpoint_that_is_nonfinite_or_deleted(tmp_path: Path, harm: str) -> None:
    recording_trainer(tmp_path / "earlier", Rows(vector_rows(40)), max_steps=2, **SAVING).train()
    checkpoint = tmp_path / "earlier" / "checkpoint-2"
    if harm == "not finite":
        write_manifest(checkpoint, weights_are_finite=False)

    class DeleteCheckpoint(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            if harm == "deleted":
                shutil.rmtree(checkpoint)

    changes = {**IN_ORDER, "max_steps": 6, "on_nonfinite": "rollback", **SAVING}
    changes["save_steps"] = 50
    trainer = recording_trainer(tmp_path / "next", trainer_kwargs={"callbacks": [DeleteCheckpoint()]}, **changes)
    with pytest.raises(UnhealthyTrainingError, match=r"step 4: .* has nowhere to go back to"):
        trainer.train(resume_from_checkpoint=str(checkpoint))


def test_many_batches_can_be_skipped_between_two_checkpoints(tmp_path: Path) -> None:
    rows = vector_rows(108)
    for row in rows[4::8]:
        row["x"] = row["x"] * math.nan
    trainer = recording_trainer(
        tmp_path,
        Rows(rows),
        num_train_epochs=1,
        on_nonfinite="rollback",
        **IN_ORDER,
        save_strategy="epoch",
    )
    trainer.train()
    assert (len(trainer.session.health.skipped_windows), trainer.state.global_step) == (13, 14)


def test_metrics_after_a_rollback_cover_the_full_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("littrainer.loop.run.time.time", lambda: now[0])

    class ASecondAStep(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            now[0] += 1

    rows = make_rows()
    changes = {"max_steps": 8, "lr_scheduler_type": "constant", **IN_ORDER, **LOGGING}
    metrics = []
    for data, policy in ((rows, "rollback"), (rows[:12] + rows[16:], "warn")):
        settings = {"on_nonfinite": policy, "save_strategy": "steps", "save_steps": 2, **changes}
        trainer = recording_trainer(tmp_path / policy, Rows(data), {"callbacks": [ASecondAStep()]}, **settings)
        metrics.append(trainer.train().metrics)
    # Steps 3 and 4 begin twice.
    assert [metrics[0]["train_runtime"], metrics[1]["train_runtime"]] == [10, 8]
    assert metrics[0]["train_loss"] == pytest.approx(metrics[1]["train_loss"], rel=1e-6)
    assert metrics[0]["train_steps_per_second"] == 0.8


def test_a_rollback_restores_the_patience_of_early_stopping(tmp_path: Path) -> None:
    stopping, scores = EarlyStoppingCallback(early_stopping_patience=3), iter([0.5] * 8)
    patience = {}

    class PatienceRecorder(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            patience.setdefault(state.global_step, []).append(stopping.early_stopping_patience_counter)

    parameters = {"callbacks": [stopping, PatienceRecorder()], "compute_metrics": lambda _: {"score": next(scores)}}
    recording_trainer(
        tmp_path,
        trainer_kwargs={**parameters, "eval_dataset": Rows(vector_rows(4))},
        max_steps=4,
        on_nonfinite="rollback",
        **IN_ORDER,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=2,
        metric_for_best_model="score",
        restore_callback_states_from_checkpoint=False,
    ).train()
    # The bad batch is in step 4, and step 3 is repeated.
    assert patience == {1: [0], 2: [0], 3: [1, 1], 4: [2]}


# ---- Spikes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["warn", "skip", "rollback"])
def test_a_warning_about_a_spike_has_the_median_norm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, policy: str
) -> None:
    # The first 20 norms are only collected, so that step 20 is no spike.
    rows = vector_rows(120)
    for row, label in zip(rows[76:84], (0, 1, 2, 0) * 2, strict=True):
        row.update(x=row["x"] * 0 + 1e6, labels=label)

    class Linear(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(6, 3)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            return {"loss": torch.nn.functional.cross_entropy(self.layer(x), labels)}

    changes = {
        **IN_ORDER,
        "max_steps": 28,
        "spike_factor": 100,
        "on_nonfinite": policy,
        **SAVING,
    }
    trainer = quiet_trainer(tmp_path, Linear(), trainer_kwargs={"train_dataset": Rows(rows)}, **changes, **LOGGING)
    trainer.train()
    (message,) = warnings_in(caplog)
    assert "Optimizer step 21: the gradient norm is" in message
    assert "above spike_factor=100 times the median of those before" in message and "80, 81, 82, 83" in message


# ---- Bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"on_nonfinite": "rollbak"}, r"on_nonfinite='rollbak' is not valid \(did you mean 'rollback'"),
        ({"spike_factor": 0.5}, "spike_factor=0.5 is out of range; give a number from 1 up"),
        ({"on_nonfinite": "rollback"}, 'save_strategy="no" saves none. Change that, or choose on_nonfinite="warn"'),
        ({"on_nonfinite": "rollback", "save_only_model": True, **SAVING}, "save_only_model=True does not save them"),
        ({"on_nonfinite": "rollback", "ignore_data_skip": True, **SAVING}, "ignore_data_skip=True begins again"),
        ({"on_nonfinite": "skip", "optim": "lomo"}, "optim='lomo' updates weights in the backward pass"),
        ({"on_nonfinite": "skip", "optim": "galore_adamw_layerwise"}, "updates weights in the backward pass"),
    ],
)
def test_impossible_arguments_are_refused_before_training(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        quiet_trainer(tmp_path, **changes)


def test_a_custom_optimizer_that_steps_in_the_backward_pass_is_refused(tmp_path: Path) -> None:
    class Fused(torch.optim.SGD):
        def fused_backward(self, loss: torch.Tensor, rate: float) -> None: ...

    model = RecordingModel()
    parameters = {"train_dataset": Rows(vector_rows(8)), "optimizers": (Fused(model.parameters(), 0.1), None)}
    trainer = quiet_trainer(tmp_path, model, trainer_kwargs=parameters, on_nonfinite="skip")
    with pytest.raises(ValueError, match="leaves out steps, and Fused updates weights in the backward pass"):
        trainer.train()


def test_the_rows_of_an_epoch_long_before_the_log_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"per_device_train_batch_size": 8, "max_steps": 12, "logging_strategy": "steps", "logging_steps": 12}
    recording_trainer(tmp_path, Rows(make_rows(16)), **IN_ORDER, **settings).train()
    assert f"row {BAD_ROW} in x. The rows of this batch are 8, 9, 10, 11, 12, 13, 14, 15" in warnings_in(caplog)[0]


def test_impossible_arguments_set_later_are_refused_when_training_begins(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, on_nonfinite="rollback", **SAVING)
    trainer.args.save_strategy = "no"
    with pytest.raises(ValueError, match="save_strategy"):
        trainer.train()
