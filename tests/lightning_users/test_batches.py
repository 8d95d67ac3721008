from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from tests.lightning_users.reading import (
    CountingModule,
    Numbers,
    PlainModule,
    SaveOnce,
    StreamOfNumbers,
    collate,
    collate_with_noise,
    fit,
    lightning,
    numbers_module,
)

# Six micro-batches of 4, the last of 2.
ROWS = 22
EPOCH = 6


class LateLoadingStrategy(SingleDeviceStrategy):
    """A strategy that loads a checkpoint after the optimizer, as sharding strategies do."""

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True


def run_interrupted_and_resumed(
    folder: Path,
    hook: str,
    number: int,
    *,
    kind: Any = CountingModule,
    rows: Any = None,
    loads_late: bool = False,
    arguments: dict[str, Any] | None = None,
    **keywords: Any,
) -> tuple[list[Any], list[Any]]:
    """Return the records of a training, and of a training that resumes from its checkpoint.

    Parameters:
        hook, number: the checkpoint is saved in the n-th call of the hook.
    """
    checkpoint = folder / "one.ckpt"

    def data() -> Any:
        return numbers_module(Numbers(ROWS) if rows is None else rows, collate_with_noise, **(arguments or {}))

    complete = fit(kind(), data(), callbacks=[SaveOnce(checkpoint, hook, number)], **keywords)
    if loads_late:
        keywords.update(strategy=LateLoadingStrategy(torch.device("cpu")), accelerator="auto")
    # The generators and the order are the checkpoint's, in spite of another seed.
    resumed = fit(kind(), data(), seed=77, checkpoint=checkpoint, **keywords)
    return complete.records, resumed.records


ALL_COLUMNS = {"remove_unused_columns": False}
LENGTHS = [{"x": float(index), "input_ids": [0] * (index % 5 + 1)} for index in range(ROWS)]
WITH_LENGTHS = {"rows": LENGTHS, "arguments": {"train_sampling_strategy": "group_by_length", **ALL_COLUMNS}}
UNSEEDED = {"arguments": {"accelerator_config": {"use_seedable_sampler": False}}}
STREAM, LATE = {"rows": StreamOfNumbers(ROWS)}, {"loads_late": True}
BY_STEPS = {**STREAM, "max_epochs": -1, "max_steps": 8}
WORKERS = {"arguments": {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}, "max_epochs": 2}


# A checkpoint within a window resumes at the window's beginning.
@pytest.mark.parametrize(
    ("number", "resumes_after", "accumulation", "options"),
    [
        *((number, number, 1, {"kind": kind}) for kind in (CountingModule, PlainModule) for number in (4, EPOCH)),
        *((number, done, 4, {}) for number, done in ((8, 6), (10, 10))),
        *((number, number - 1, 2, {}) for number in (3, 5)),
        (6, 5, 2, {"limit_train_batches": 5}),
        *((EPOCH + 2, EPOCH + 2, 1, options) for options in (WITH_LENGTHS, UNSEEDED)),
        (2, 2, 1, WORKERS),
        *((number, number, 1, {**LATE, **options}) for options in ({}, STREAM) for number in (2, EPOCH)),
        *((number, number, 1, options) for options in (STREAM, BY_STEPS) for number in (3, EPOCH, EPOCH + 1)),
        *((3, 2, 2, options) for options in (STREAM, BY_STEPS)),
    ],
)
def test_a_resumed_training_gets_the_batches_and_random_draws_of_an_uninterrupted_training(
    tmp_path: Path,
    recwarn: pytest.WarningsRecorder,
    number: int,
    resumes_after: int,
    accumulation: int,
    options: dict[str, Any],
) -> None:
    complete, resumed = run_interrupted_and_resumed(
        tmp_path, "on_train_batch_end", number, accumulate_grad_batches=accumulation, **options
    )
    assert resumed and resumed == complete[resumes_after:]
    assert not [warning for warning in recwarn if "not resumable" in str(warning.message)]


def test_a_checkpoint_before_an_epochs_first_step_resumes_with_its_batches_and_draws(
    tmp_path: Path,
) -> None:
    complete, resumed = run_interrupted_and_resumed(tmp_path, "on_train_batch_start", EPOCH + 1, **UNSEEDED)
    assert resumed and resumed == complete[EPOCH:]


class Counted(CountingModule):
    """A module that records Lightning's counts of each micro-batch, and whether it steps."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        steps = not self.trainer.fit_loop._should_accumulate()
        micro_batch = self.trainer.train_dataloader.handed_out.get(batch_idx)
        closes = micro_batch is not None and micro_batch.is_last_of_step
        self.counts.append((self.trainer.current_epoch, batch_idx, steps, closes, self.trainer.global_step))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("accumulation", "is_limited_by_steps"), [(1, True), (4, False)])
@pytest.mark.parametrize("rows", [Numbers(ROWS), StreamOfNumbers(ROWS)])
@pytest.mark.parametrize(
    ("hook", "number", "is_evaluated"),
    [
        ("on_train_batch_end", EPOCH, False),
        ("on_validation_end", 1, True),
        ("on_train_epoch_end", 1, False),
        ("on_train_epoch_end", 1, True),
        ("on_train_epoch_start", 2, False),
    ],
)
def test_a_training_resumed_between_epochs_begins_the_next_epoch_of_lightning(
    tmp_path: Path, hook: str, number: int, is_evaluated: bool, rows: Any, accumulation: int, is_limited_by_steps: bool
) -> None:
    checkpoint, steps = tmp_path / "one.ckpt", 3 * EPOCH if accumulation == 1 else 6
    keywords: dict[str, Any] = {"max_epochs": -1, "max_steps": steps} if is_limited_by_steps else {"max_epochs": 3}

    def train(**further: Any) -> tuple[list[Any], list[Any]]:
        module = Counted()
        evaluated = Numbers(3) if is_evaluated else None
        data = numbers_module(rows, collate_with_noise, evaluated)
        records = fit(module, data, accumulate_grad_batches=accumulation, **keywords, **further).records
        return records, module.counts

    records, counts = train(callbacks=[SaveOnce(checkpoint, hook, number)])
    assert len(counts) == 3 * EPOCH
    resumed, resumed_counts = train(checkpoint=checkpoint, seed=77)
    assert resumed == records[EPOCH:]
    assert resumed_counts == counts[EPOCH:]


def test_a_checkpoint_of_another_loader_resumes_after_the_same_number_of_batches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint, loader = tmp_path / "saved.ckpt", torch.utils.data.DataLoader(Numbers(ROWS), 4, collate_fn=collate)
    lightning(max_epochs=1, callbacks=[SaveOnce(checkpoint, "on_train_batch_end", 2)]).fit(PlainModule(), loader)
    with caplog.at_level(logging.WARNING, "littrainer"):
        data = numbers_module(Numbers(ROWS), train_sampling_strategy="sequential")
        resumed = fit(PlainModule(), data, checkpoint=checkpoint, max_epochs=1)
    assert [numbers[0] for numbers in resumed.numbers] == [8.0, 12.0, 16.0, 20.0]
    assert "after 2 micro-batches of epoch 0" in caplog.text


@pytest.mark.parametrize("evaluated", [None, Numbers(2)])
@pytest.mark.parametrize(
    ("then", "number", "rows", "arguments", "keywords", "read"),
    [
        (4, 2, ROWS, {"per_device_train_batch_size": 2}, {}, 7 + 11 + 11),
        # After 18 of 22 samples: 2 micro-batches after 4 of 4, then two epochs of 6.
        (2, 9, ROWS, {}, {}, 2 + 6 + 6),
        # 16 samples are a window.
        (2, 9, ROWS, {}, {"accumulate_grad_batches": 4}, 2 + 6 + 6),
        (2, 11, ROWS, {}, {}, 6 + 6),
        # 5 micro-batches are all of 12 samples.
        (4, 5, 12, {}, {}, 3 + 3),
        (4, 17, 12, {}, {}, 0),
        (4, 5, ROWS, {}, {"limit_train_batches": 3}, 3 + 3),
        # 20 samples are all complete batches.
        (2, 10, ROWS, {"dataloader_drop_last": True}, {}, 5 + 5),
    ],
)
def test_with_other_sizes_training_continues_after_the_same_number_of_samples(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    evaluated: Any,
    then: int,
    number: int,
    rows: int,
    arguments: Any,
    keywords: Any,
    read: int,
) -> None:
    checkpoint = tmp_path / "one.ckpt"
    saves = SaveOnce(checkpoint, "on_train_batch_end", number)
    fit(PlainModule(), numbers_module(Numbers(ROWS), per_device_train_batch_size=then), callbacks=[saves])
    second_file = tmp_path / "second.ckpt"
    data = numbers_module(Numbers(rows), collate, evaluated, **arguments)
    saves = SaveOnce(second_file, "on_train_epoch_end", 1)
    resumed = fit(PlainModule(), data, checkpoint=checkpoint, callbacks=[saves], **keywords)
    assert len(resumed.records) == read
    is_between_epochs = number % -(-ROWS // then) == 0
    assert ("written with other data: there are now" in caplog.text) is not is_between_epochs
    position = torch.load(second_file, weights_only=True)["TrainerDataModule"]["processes"][0]
    assert (position["epoch"], position["micro_batches"]) == (number // -(-ROWS // then) + 1, 0)


def test_windows_close_where_lightning_steps_with_a_changing_accumulation() -> None:
    schedule = pl.callbacks.GradientAccumulationScheduler({0: 2, 1: 3})
    module = CountingModule()
    fit(module, numbers_module(Numbers(ROWS)), max_epochs=2, limit_train_batches=5, callbacks=[schedule])
    windows = [
        (batch.position, batch.window_size, batch.is_last_of_step, batch.num_items_in_window)
        for batch in module.windows
    ]
    two, three = [(0, 2, False, 8), (1, 2, True, 8)], [(0, 3, False, 12), (1, 3, False, 12), (2, 3, True, 12)]
    assert windows == [*two, *two, (0, 1, True, 4), *three, *two]


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_stream_that_ends_before_max_steps_is_validated_and_restarted(accumulation: int) -> None:
    class Steps(pl.Callback):
        def __init__(self) -> None:
            self.values: list[int] = []

        def on_validation_end(self, trainer: pl.Trainer, _: Any) -> None:
            if not trainer.sanity_checking:
                self.values.append(trainer.global_step)

    steps = Steps()
    data = numbers_module(StreamOfNumbers(ROWS), collate, Numbers(2))
    keywords = {"accumulate_grad_batches": accumulation, "max_epochs": -1, "max_steps": 2 * EPOCH // accumulation}
    records = fit(CountingModule(), data, callbacks=[steps], **keywords).numbers
    in_epoch = -(-EPOCH // accumulation)
    assert steps.values == list(range(in_epoch, keywords["max_steps"] + 1, in_epoch))
    assert records[EPOCH] == records[0]
