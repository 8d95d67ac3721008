"""What a training does about numbers that are not finite; tests/faults/numbers.py tries many of them."""

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

SICK = 13
IN_ORDER = {"train_sampling_strategy": "sequential"}
LOGGING = {"logging_strategy": "steps", "logging_steps": 3}
SAVING = {"save_strategy": "steps", "save_steps": 2}


def rows_with_a_sick_one(count: int = 48) -> list[Any]:
    rows = [{**row, "number": number} for number, row in enumerate(vector_rows(count))]
    rows[SICK]["x"] = torch.full_like(rows[SICK]["x"], math.inf)
    return rows


class Numbered(VectorClassifier):
    """Notes the rows of each micro-batch that it trains on, and has dropout, which random states decide."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = torch.nn.Dropout(0.2)
        self.seen: list[list[int]] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, number: torch.Tensor | None = None) -> Any:
        if self.training and number is not None:
            self.seen.append(number.tolist())
        return super().forward(self.dropout(x), labels)


def numbered_trainer(folder: Path, rows: Any = None, given: dict[str, Any] | None = None, **changes: Any) -> Trainer:
    torch.manual_seed(0)
    data = Rows(rows_with_a_sick_one()) if rows is None else rows
    kind = changes.pop("kind", Trainer)
    return quiet_trainer(folder, Numbered(), kind=kind, given={"train_dataset": data, **(given or {})}, **changes)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: part.clone() for name, part in trainer.model.state_dict().items()}


def are_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(part, second[name]) for name, part in first.items())


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING and "littr" in one.name]


# ---- What is told ----------------------------------------------------------------------------------------------------


def test_one_warning_names_step_numbers_rows_what_came_first_and_where_to_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = numbered_trainer(tmp_path, max_steps=9, **IN_ORDER, **LOGGING, **SAVING)
    trainer.train()
    (told,) = warnings_in(caplog)
    assert told.startswith(
        "Optimizer step 4: the loss is nan and the gradient norm nan. Not finite first: the data, row"
    )
    assert f"row {SICK} in x. The rows of this batch are 12, 13, 14, 15 of the train_dataset." in told
    assert f"The last healthy checkpoint is {tmp_path / 'checkpoint-2'}. To resume (set on_nonfinite=" in told


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
def test_the_rows_of_a_batch_are_known_when_it_has_been_trained(tmp_path: Path, changes: dict[str, Any]) -> None:
    found: dict[tuple[int, int], Any] = {}

    class Asking(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            windows = trainer.session.run.windows
            for number in range(windows.micro_batches_read):
                found[windows.epoch, number] = windows.find_rows(windows.epoch, number)

    rows = [
        {**row, "number": number, "input_ids": [0] * (number % 5 + 1)} for number, row in enumerate(vector_rows(22))
    ]

    def collate(samples: list[Any]) -> Any:
        return torch.utils.data.default_collate([{k: v for k, v in one.items() if k != "input_ids"} for one in samples])

    given = {"data_collator": collate, "callbacks": [Asking()]}
    trainer = numbered_trainer(tmp_path, Rows(rows), given, num_train_epochs=2, **changes)
    trainer.train()
    seen = trainer.model.seen
    assert len(seen) == len(found) == 12
    assert [found[epoch, batch] for epoch in range(2) for batch in range(6)] == seen


class Stream(IterableDataset):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def test_of_a_stream_the_number_of_the_micro_batch_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    numbered_trainer(tmp_path, Stream(rows_with_a_sick_one()), max_steps=6, gradient_accumulation_steps=2).train()
    (told,) = warnings_in(caplog)
    assert "Optimizer step 2: the loss is nan" in told
    assert "Not finite first: the loss or the data or the weights. It is micro-batch 4 of epoch 1." in told


@pytest.mark.parametrize("way", ["warn", "skip"])
def test_optimizer_steps_without_a_single_label_are_told_with_their_share(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    rows = [{"input_ids": row["input_ids"], "labels": [-100] * len(row["labels"])} for row in language_rows(2)]
    rows = [{"input_ids": [6, 7, 8], "labels": [6, 7, 8]} for _ in range(6)] + [
        {"input_ids": row["input_ids"][:3], "labels": row["labels"][:3]} for row in rows
    ]
    changes = {"per_device_train_batch_size": 2, **IN_ORDER, "on_nonfinite": way}
    quiet_trainer(tmp_path, tiny_gpt2(), given={"train_dataset": Rows(rows)}, max_steps=7, **changes, **LOGGING).train()
    shares = [text for text in warnings_in(caplog) if "no label that counts" in text]
    assert len(shares) == 1 and shares[0].startswith("1 of 6 optimizer steps so far (16.7%)")
    others = [text for text in warnings_in(caplog) if text not in shares]
    assert len(others) == 1 and "first: the number of labels, which is 0 (all are -100)" in others[0]


class Tagger(torch.nn.Module):
    """Takes no count of labels, and divides by those of a row or by 1."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(64, 3)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        losses = torch.nn.functional.cross_entropy(
            self.embedding(input_ids).flatten(0, 1), labels.flatten(), reduction="sum"
        )
        return {"loss": losses / labels.ne(-100).sum().clamp(min=1)}


def test_they_are_told_too_if_the_model_takes_no_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"input_ids": torch.tensor([6, 7]), "labels": torch.tensor([1, 2])} for _ in range(12)]
    for row in rows[4:8]:
        row["labels"] = torch.tensor([-100, -100])
    changes = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "num_train_epochs": 1}
    quiet_trainer(tmp_path, Tagger(), given={"train_dataset": Rows(rows)}, **IN_ORDER, **changes).train()
    (told,) = [text for text in warnings_in(caplog) if "no label that counts" in text]
    assert told.startswith("1 of 3 optimizer steps so far (33.3%)")


def test_stop_saves_nothing_sick_and_its_error_has_the_facts(tmp_path: Path) -> None:
    trainer = numbered_trainer(
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
    # The batch that was fatal is left out by a resume that may go back.
    resumed = numbered_trainer(tmp_path, max_steps=9, **IN_ORDER, on_nonfinite="rollback", **SAVING)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 9 and all(part.isfinite().all() for part in weights(resumed).values())


# ---- Leaving steps out -----------------------------------------------------------------------------------------------


class SchedulesAndMoments(TrainerCallback):
    """Notes the learning rate, the optimizer's own count of steps, and a weight, after each optimizer step."""

    def __init__(self) -> None:
        self.noted: list[tuple[float, float, float]] = []

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, lr_scheduler: Any, **_: Any
    ) -> None:
        moments = optimizer.state.get(model.head.bias, {})
        self.noted.append((lr_scheduler.get_last_lr()[0], float(moments.get("step", 0)), model.head.bias[0].item()))


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
def test_a_step_left_out_changes_neither_weights_nor_moments_and_the_schedule_goes_on(
    tmp_path: Path, kind: type[Trainer], changes: dict[str, Any]
) -> None:
    notes = SchedulesAndMoments()
    given = {"callbacks": [notes]}
    settings = {"on_nonfinite": "skip", **IN_ORDER, "max_steps": 6, **changes}
    trainer = numbered_trainer(tmp_path, given=given, kind=kind, optim="adamw_torch", **settings)
    trainer.train()
    rates, counts, biases = zip(*notes.noted, strict=True)
    assert trainer.state.global_step == 6
    assert counts == (1, 2, 3, 3, 4, 5) and biases[2] == biases[3] != biases[4]
    assert rates == pytest.approx([0.01 * (1 - step / 6) for step in range(1, 7)])


def test_leaving_the_first_step_out_is_no_wrong_order_of_schedule_and_optimizer(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    rows = rows_with_a_sick_one()
    numbered_trainer(tmp_path, Rows(rows[SICK:]), **IN_ORDER, on_nonfinite="skip", max_steps=3).train()
    assert not [one for one in recwarn if "lr_scheduler.step()" in str(one.message)]


class WithBuffers(Numbered):
    """A batch norm changes its buffers in place, and another buffer is replaced by each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = torch.nn.BatchNorm1d(6)
        self.register_buffer("largest", torch.zeros(()), persistent=False)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        self.largest = torch.maximum(self.largest, x.detach().max())
        return super().logits(self.batch_norm(x))


class Buffers(TrainerCallback):
    """Notes all buffers before and after each optimizer step."""

    def __init__(self) -> None:
        self.before: list[Any] = []
        self.after: list[Any] = []

    def on_step_begin(self, *_: Any, model: Any, **__: Any) -> None:
        self.before.append({name: part.clone() for name, part in model.named_buffers()})

    def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
        self.after.append({name: part.clone() for name, part in model.named_buffers()})


@pytest.mark.parametrize("way", ["skip", "rollback"])
@pytest.mark.parametrize("kind", [Trainer, StepwiseTrainer], ids=["", "own training_step"])
def test_buffers_are_as_before_the_step_that_is_left_out(tmp_path: Path, kind: type[Trainer], way: str) -> None:
    torch.manual_seed(0)
    notes, rows = Buffers(), rows_with_a_sick_one()
    settings = {"max_steps": 5, **IN_ORDER, "gradient_accumulation_steps": 2, **SAVING}
    given = {"train_dataset": Rows(rows), "eval_dataset": Rows(rows[:4]), "callbacks": [notes]}
    trainer = quiet_trainer(tmp_path, WithBuffers(), kind=kind, given=given, on_nonfinite=way, **settings)
    trainer.train()
    assert all(part.isfinite().all() for buffers in notes.after for part in buffers.values())
    # The second step has the sick row, in its second micro-batch.
    assert (way == "rollback") or are_equal(notes.before[1], notes.after[1])
    assert not are_equal(notes.before[2], notes.after[2])
    assert math.isfinite(trainer.evaluate()["eval_loss"])
    assert get_last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-5")


def test_sick_weights_end_a_training_that_leaves_steps_out(tmp_path: Path) -> None:
    trainer = numbered_trainer(tmp_path, Rows(rows_with_a_sick_one()[20:]), on_nonfinite="skip", max_steps=5)
    trainer.model.head.weight.data[0, 0] = math.nan
    with pytest.raises(UnhealthyTrainingError, match=r"Not finite first: the weights \(head.weight\)"):
        trainer.train()
    assert trainer.state.global_step == 0


# ---- Going back ------------------------------------------------------------------------------------------------------


def without_window_of(seen: list[list[int]], row: int, accumulation: int) -> list[list[int]]:
    windows = [seen[start : start + accumulation] for start in range(0, len(seen), accumulation)]
    return [batch for window in windows if not any(row in batch for batch in window) for batch in window]


def test_a_training_in_random_order_goes_on_with_the_windows_after_the_one_left_out(tmp_path: Path) -> None:
    healthy = rows_with_a_sick_one()
    healthy[SICK] = {**vector_rows(48)[SICK], "number": SICK}
    changes = {"gradient_accumulation_steps": 2, "num_train_epochs": 1, **SAVING, **LOGGING}
    whole = numbered_trainer(tmp_path / "whole", Rows(healthy), **changes)
    whole.train()
    trainer = numbered_trainer(tmp_path / "sick", on_nonfinite="rollback", **changes)
    trainer.train()
    expected = without_window_of(whole.model.seen, SICK, 2)
    # What came after the checkpoint was trained on twice.
    assert trainer.model.seen[-len(expected[-4:]) :] == expected[-4:]
    steps = len(expected) // 2
    assert trainer.state.global_step == trainer.state.max_steps == steps == 5
    assert (tmp_path / "sick" / f"checkpoint-{steps}").is_dir() and (tmp_path / "sick" / "checkpoint-0").is_dir()
    assert all(part.isfinite().all() for part in weights(trainer).values())
    steps_logged = [entry["step"] for entry in trainer.state.log_history if "loss" in entry]
    assert steps_logged == [3]


def test_what_was_left_out_stays_out_when_a_killed_training_is_resumed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # The sick row comes in step 8; the kill comes behind the checkpoint of a step that was replayed.
    rows = rows_with_a_sick_one(60)
    rows[28], rows[SICK] = {**rows[SICK], "number": 28}, {**rows[28], "number": SICK}
    changes = {
        "max_steps": 12,
        **IN_ORDER,
        "on_nonfinite": "rollback",
        "save_strategy": "steps",
        "save_steps": 6,
        "lr_scheduler_type": "constant",
    }
    whole = numbered_trainer(tmp_path / "whole", Rows(rows), **changes)
    whole.train()

    class SavesAfterReturn(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            # Only a window that was left out makes this one the second time.
            self.times = getattr(self, "times", 0) + (state.global_step == 7)
            control.should_save = control.should_save or (state.global_step == 7 and self.times == 2)
            if state.global_step == 8:
                raise ZeroDivisionError

    cut = numbered_trainer(tmp_path / "cut", Rows(rows), {"callbacks": [SavesAfterReturn()]}, **changes)
    with pytest.raises(ZeroDivisionError):
        cut.train()
    caplog.clear()
    resumed = numbered_trainer(tmp_path / "cut", Rows(rows), **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-7"))
    assert "goes back" not in caplog.text
    assert are_equal(weights(resumed), weights(whole)) and not any(28 in batch for batch in resumed.model.seen)


def test_a_stream_is_read_on_behind_the_batch_left_out(tmp_path: Path) -> None:
    rows = rows_with_a_sick_one()
    changes = {"max_steps": 8, "lr_scheduler_type": "constant", **SAVING}
    trainer = numbered_trainer(tmp_path / "sick", Stream(rows), on_nonfinite="rollback", **changes)
    trainer.train()
    expected = numbered_trainer(tmp_path / "healthy", Stream(rows[:12] + rows[16:]), **changes)
    expected.train()
    assert trainer.state.global_step == 8 and are_equal(weights(trainer), weights(expected))


def test_max_steps_are_taken_over_more_epochs_and_a_saving_thread_is_waited_for(tmp_path: Path) -> None:
    rows = rows_with_a_sick_one(16)
    changes = {"lr_scheduler_type": "constant", **IN_ORDER, **SAVING}
    trainer = numbered_trainer(
        tmp_path / "sick", Rows(rows), max_steps=8, on_nonfinite="rollback", async_save=True, **changes
    )
    trainer.train()
    # Both epochs have the row, so that three steps of each are left and a third epoch is begun.
    expected = numbered_trainer(tmp_path / "healthy", Rows(rows[:12]), max_steps=8, **changes)
    expected.train()
    assert trainer.session.health.left_out == [(0, 3), (1, 3)] and trainer.state.global_step == 8
    assert are_equal(weights(trainer), weights(expected))


def test_checkpoints_of_an_earlier_training_in_the_folder_are_not_gone_back_to(tmp_path: Path) -> None:
    numbered_trainer(tmp_path, Rows(vector_rows(40)), max_steps=2, **SAVING).train()
    trainer = numbered_trainer(
        tmp_path,
        max_steps=6,
        save_strategy="steps",
        save_steps=50,
        on_nonfinite="rollback",
        **IN_ORDER,
        lr_scheduler_type="constant",
    )
    trainer.train()
    rows = rows_with_a_sick_one()
    expected = numbered_trainer(
        tmp_path / "healthy",
        Rows(rows[:12] + rows[16:]),
        max_steps=6,
        **IN_ORDER,
        lr_scheduler_type="constant",
    )
    expected.train()
    assert are_equal(weights(trainer), weights(expected))


def test_going_back_is_no_exception_to_lightning_callbacks_and_another_layout_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Hears(lightning.pytorch.Callback):
        heard: ClassVar[list[BaseException]] = []

        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            self.heard.append(exception)

    changes = {**IN_ORDER, "on_nonfinite": "rollback"}
    numbered_trainer(tmp_path, max_steps=2, **changes, **SAVING).train()
    changes |= {"max_steps": 8, "save_strategy": "steps", "save_steps": 50, "per_device_train_batch_size": 2}
    trainer = numbered_trainer(tmp_path, given={"callbacks": [Hears()]}, **changes)
    trainer.train(resume_from_checkpoint=True)
    assert len(trainer.session.health.left_out) == 1 and not Hears.heard
    assert caplog.text.count("which was written by another training") == 1


def test_going_back_again_and_again_ends_with_an_error(tmp_path: Path) -> None:
    rows = vector_rows(80)
    for row in rows[8:]:
        row["x"] = row["x"] * math.nan
    trainer = numbered_trainer(tmp_path, Rows(rows), max_steps=20, on_nonfinite="rollback", **IN_ORDER, **SAVING)
    with pytest.raises(UnhealthyTrainingError, match=r"step 3: .* 10 batches have been left out at this step"):
        trainer.train()
    assert trainer.state.global_step == 2


def test_a_training_of_which_each_batch_is_left_out_ends_with_an_error(tmp_path: Path) -> None:
    rows = [{**row, "x": row["x"] * math.nan} for row in vector_rows(12)]
    trainer = numbered_trainer(tmp_path, Rows(rows), num_train_epochs=2, on_nonfinite="rollback", **SAVING)
    with pytest.raises(UnhealthyTrainingError, match="has left out all other batches, so nothing is trained"):
        trainer.train()


def test_a_damaged_checkpoint_is_not_gone_back_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Damages(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                Path(args.output_dir, "checkpoint-2", "optimizer.pt").write_bytes(b"")

    changes = {**IN_ORDER, "max_steps": 4, **SAVING}
    trainer = numbered_trainer(tmp_path, given={"callbacks": [Damages()]}, on_nonfinite="rollback", **changes)
    trainer.train()
    assert f"Passing over the damaged checkpoint {tmp_path / 'checkpoint-2'}: optimizer.pt has 0 bytes" in caplog.text
    assert f"goes back to {tmp_path / 'checkpoint-0'}" in caplog.text and trainer.state.global_step == 4


@pytest.mark.parametrize("harm", ["not finite", "deleted"])
def test_a_checkpoint_to_resume_that_is_sick_or_gone_is_not_gone_back_to(tmp_path: Path, harm: str) -> None:
    numbered_trainer(tmp_path / "earlier", Rows(vector_rows(40)), max_steps=2, **SAVING).train()
    checkpoint = tmp_path / "earlier" / "checkpoint-2"
    if harm == "not finite":
        write_manifest(checkpoint, weights_are_finite=False)

    class Deletes(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            if harm == "deleted":
                shutil.rmtree(checkpoint)

    changes = {**IN_ORDER, "max_steps": 6, "on_nonfinite": "rollback", **SAVING}
    changes["save_steps"] = 50
    trainer = numbered_trainer(tmp_path / "next", given={"callbacks": [Deletes()]}, **changes)
    with pytest.raises(UnhealthyTrainingError, match=r"step 4: .* has nowhere to go back to"):
        trainer.train(resume_from_checkpoint=str(checkpoint))


def test_many_batches_can_be_skipped_between_two_checkpoints(tmp_path: Path) -> None:
    rows = vector_rows(108)
    for row in rows[4::8]:
        row["x"] = row["x"] * math.nan
    trainer = numbered_trainer(
        tmp_path,
        Rows(rows),
        num_train_epochs=1,
        on_nonfinite="rollback",
        **IN_ORDER,
        save_strategy="epoch",
    )
    trainer.train()
    assert (len(trainer.session.health.left_out), trainer.state.global_step) == (13, 14)


def test_metrics_of_a_training_that_went_back_are_those_of_its_whole_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("littrainer.loop.run.time.time", lambda: now[0])

    class ASecondAStep(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            now[0] += 1

    rows = rows_with_a_sick_one()
    changes = {"max_steps": 8, "lr_scheduler_type": "constant", **IN_ORDER, **LOGGING}
    found = []
    for data, way in ((rows, "rollback"), (rows[:12] + rows[16:], "warn")):
        given = {"callbacks": [ASecondAStep()]}
        trainer = numbered_trainer(
            tmp_path / way, Rows(data), given, on_nonfinite=way, save_strategy="steps", save_steps=2, **changes
        )
        found.append(trainer.train().metrics)
    # Steps 3 and 4 are begun a second time.
    assert [one["train_runtime"] for one in found] == [10, 8]
    assert found[0]["train_loss"] == pytest.approx(found[1]["train_loss"], rel=1e-6)
    assert found[0]["train_steps_per_second"] == 0.8


def test_early_stopping_forgets_what_it_has_counted_in_the_part_that_is_left_out(tmp_path: Path) -> None:
    stopping, scores = EarlyStoppingCallback(early_stopping_patience=3), iter([0.5] * 8)
    counted = {}

    class Counts(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            counted.setdefault(state.global_step, []).append(stopping.early_stopping_patience_counter)

    given = {"callbacks": [stopping, Counts()], "compute_metrics": lambda _: {"score": next(scores)}}
    numbered_trainer(
        tmp_path,
        given={**given, "eval_dataset": Rows(vector_rows(4))},
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
    # The sick batch comes in step 4, and step 3 is taken twice.
    assert counted == {1: [0], 2: [0], 3: [1, 1], 4: [2]}


# ---- Spikes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["warn", "skip", "rollback"])
def test_a_spike_is_told_with_the_median_it_is_compared_with(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    # The first 20 norms are only collected, so that the spike of step 20 is not told.
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
        "on_nonfinite": way,
        **SAVING,
    }
    trainer = quiet_trainer(tmp_path, Linear(), given={"train_dataset": Rows(rows)}, **changes, **LOGGING)
    trainer.train()
    (told,) = warnings_in(caplog)
    assert "Optimizer step 21: the gradient norm is" in told
    assert "above spike_factor=100 times the median of those before" in told and "80, 81, 82, 83" in told


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
def test_what_cannot_be_carried_out_is_refused_before_training(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        quiet_trainer(tmp_path, **changes)


def test_an_optimizer_of_the_scripts_that_steps_in_the_backward_pass_is_refused_too(tmp_path: Path) -> None:
    class Fused(torch.optim.SGD):
        def fused_backward(self, loss: torch.Tensor, rate: float) -> None: ...

    model = Numbered()
    given = {"train_dataset": Rows(vector_rows(8)), "optimizers": (Fused(model.parameters(), 0.1), None)}
    trainer = quiet_trainer(tmp_path, model, given=given, on_nonfinite="skip")
    with pytest.raises(ValueError, match="leaves out steps, and Fused updates weights in the backward pass"):
        trainer.train()


def test_what_a_script_sets_later_is_refused_when_training_begins(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, on_nonfinite="rollback", **SAVING)
    trainer.args.save_strategy = "no"
    with pytest.raises(ValueError, match="save_strategy"):
        trainer.train()


def test_the_rows_of_an_epoch_long_before_the_log_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"per_device_train_batch_size": 8, "max_steps": 12, "logging_strategy": "steps", "logging_steps": 12}
    numbered_trainer(tmp_path, Rows(rows_with_a_sick_one(16)), **IN_ORDER, **settings).train()
    assert f"row {SICK} in x. The rows of this batch are 8, 9, 10, 11, 12, 13, 14, 15" in warnings_in(caplog)[0]
