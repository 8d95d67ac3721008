"""Resumes with another batch size, accumulation or number of workers, in a single process.

tests/faults/layouts.py tries random sequences of layouts, in several processes too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Sampler, get_worker_info

from littrainer import Trainer, TrainerCallback
from tests.faults.layouts import CutAfter, NotingTrainer
from tests.loop.exact_resume import StreamWithState, noisy_trainer, outcome
from tests.scenarios.data import Rows, Stream, vector_rows

ROWS = 16


def indexed_rows(count: int = ROWS) -> list[Any]:
    """Return vectors with an index and one of two lengths."""
    return [{**row, "index": index, "input_ids": [0] * (1 + index % 2)} for index, row in enumerate(vector_rows(count))]


def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
    # Rows for an evaluation have no index.
    columns = {name: torch.tensor([row[name] for row in rows]) for name in ("labels", "index") if name in rows[0]}
    return {"x": torch.stack([row["x"] for row in rows]), **columns}


def part(
    folder: Path, steps: int = 0, dataset: Any = None, kind: type[NotingTrainer] = NotingTrainer, **changes: Any
) -> NotingTrainer:
    """Train up to a cut, or to the end, from the newest checkpoint."""
    parameters = {"callbacks": [CutAfter(steps)], "data_collator": collate}
    settings: dict[str, Any] = {"remove_unused_columns": False, "save_strategy": "no", **changes}
    data = Rows(indexed_rows()) if dataset is None else dataset
    trainer = noisy_trainer(folder, data, kind=kind, trainer_kwargs=parameters, **settings)
    trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))
    assert isinstance(trainer, NotingTrainer)
    return trainer


def indices(*trainers: NotingTrainer, epoch: int = 0) -> list[int]:
    return [index for trainer in trainers for number, index in trainer.rows if number == epoch]


def test_steps_schedule_and_epochs_follow_the_trained_rows(tmp_path: Path) -> None:
    part(tmp_path, 3)
    trainer = part(tmp_path, per_device_train_batch_size=2)
    # Three steps for 12 of 32 rows, and ten steps for 20 rows.
    assert trainer.state.max_steps == trainer.state.global_step == 13
    logs = [entry for entry in trainer.state.log_history if "learning_rate" in entry]
    assert [entry["epoch"] for entry in logs] == pytest.approx(
        [0.25, 0.5, 0.75, 0.875, 1, *(1 + step / 8 for step in range(1, 9))]
    )
    # After the cut the schedule has 16 steps of the new size, of which six replace the 12 trained rows.
    rates = [0.01 * (1 - step / 8) for step in range(3)] + [0.01 * (1 - step / 16) for step in range(6, 16)]
    assert [entry["learning_rate"] for entry in logs] == pytest.approx(rates)
    assert trainer.lr_scheduler.last_epoch == 16


def test_max_steps_is_preserved(tmp_path: Path) -> None:
    part(tmp_path, 6, max_steps=10)
    trainer = part(tmp_path, max_steps=10, per_device_train_batch_size=2)
    assert trainer.state.max_steps == trainer.state.global_step == 10
    # The last four steps are half an epoch.
    assert trainer.state.epoch == 2 and trainer.lr_scheduler.last_epoch == 10


@pytest.mark.parametrize("changes", [{"per_device_train_batch_size": 6}, {"gradient_accumulation_steps": 2}], ids=str)
def test_a_second_resume_with_the_new_layout_is_exact(tmp_path: Path, changes: dict[str, Any]) -> None:
    dataset = Rows(vector_rows(ROWS))
    noisy_trainer(tmp_path, dataset, trainer_kwargs={"callbacks": [CutAfter(2)]}, save_strategy="no").train()
    reference = noisy_trainer(tmp_path, dataset, **changes)
    reference.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for step in (3, 5):
        resumed = noisy_trainer(tmp_path, dataset, **changes)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        expected, result = outcome(reference), outcome(resumed)
        assert result["step"] == expected["step"] and result["rates"] == expected["rates"]
        assert all(torch.equal(value, result["weights"][name]) for name, value in expected["weights"].items())
        assert result["logs"][-1] == expected["logs"][-1]


def test_an_order_sorted_for_the_old_batch_size_is_used_until_the_end_of_the_epoch(tmp_path: Path) -> None:
    settings = {"train_sampling_strategy": "group_by_length"}
    reference = part(tmp_path / "reference", **settings)
    folder = tmp_path / "cut"
    first = part(folder, 2, **settings)
    rest = part(folder, per_device_train_batch_size=2, **settings)
    assert indices(first, rest) == indices(reference)
    assert sorted(indices(rest, epoch=1)) == list(range(ROWS))


def test_a_complete_epoch_is_not_continued(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"eval_strategy": "epoch"}
    part(tmp_path, 4, **settings)
    rest = part(tmp_path, per_device_train_batch_size=8, **settings)
    assert not indices(rest) and sorted(indices(rest, epoch=1)) == list(range(ROWS))
    assert "Training continues at the first row of epoch 1, and takes 6 optimizer steps in all." in caplog.text
    assert [entry["step"] for entry in rest.state.log_history if "eval_loss" in entry] == [4, 6]


def test_other_micro_batches_with_the_same_global_batch_size_do_not_change_the_training(tmp_path: Path) -> None:
    reference = part(tmp_path / "reference", global_batch_size=4)
    folder = tmp_path / "cut"
    part(folder, 3, global_batch_size=4)
    rest = part(folder, global_batch_size=4, per_device_train_batch_size=2)
    assert rest.args.gradient_accumulation_steps == 2
    rates = [[entry.get("learning_rate") for entry in run.state.log_history[:8]] for run in (reference, rest)]
    assert rates[0] == pytest.approx(rates[1]) and reference.state.max_steps == rest.state.max_steps == 8


class CustomBatchSampler(Sampler[list[int]]):
    """A batch sampler without a sampler of rows."""

    def __init__(self, size: int) -> None:
        self.batch_size = size

    def __len__(self) -> int:
        return ROWS // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        yield from (list(range(start, start + self.batch_size)) for start in range(0, ROWS, self.batch_size))


class CustomBatchesTrainer(NotingTrainer):
    def get_train_dataloader(self) -> Any:
        batches = CustomBatchSampler(self.args.per_device_train_batch_size)
        return DataLoader(self.train_dataset, batch_sampler=batches, collate_fn=collate)


def test_batches_without_known_rows_are_counted_in_steps_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    part(tmp_path, 2, kind=CustomBatchesTrainer)
    rest = part(tmp_path, kind=CustomBatchesTrainer, per_device_train_batch_size=8)
    assert "The trained rows are unknown" in caplog.text
    # Two steps of the new size are an epoch.
    assert rest.state.max_steps == 4 and not indices(rest)


def test_another_accumulation_counts_micro_batches_without_known_rows(tmp_path: Path) -> None:
    first = part(tmp_path, 3, kind=CustomBatchesTrainer)
    rest = part(tmp_path, kind=CustomBatchesTrainer, gradient_accumulation_steps=2)
    assert indices(first, rest) == list(range(ROWS)) and rest.state.max_steps == 6


class StatefulLoader:
    """A custom loader with the protocol of torchdata's StatefulDataLoader."""

    num_workers = 0

    def __init__(self, rows: list[Any], batch_size: int) -> None:
        self.rows, self.batch_size, self.next_row, self.read = rows, batch_size, 0, 0

    def __len__(self) -> int:
        return -(-len(self.rows) // self.batch_size)

    def state_dict(self) -> dict[str, int]:
        return {"next_row": self.next_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next_row = state["next_row"]

    def __iter__(self) -> Iterator[Any]:
        while self.next_row < len(self.rows):
            rows = self.rows[self.next_row : self.next_row + self.batch_size]
            self.next_row += len(rows)
            self.read += len(rows)
            yield collate(rows)
        self.next_row = 0


class StatefulLoaderTrainer(NotingTrainer):
    def get_train_dataloader(self) -> Any:
        self.stateful = StatefulLoader(indexed_rows(), self.args.per_device_train_batch_size)
        return self.stateful

    def num_examples(self, dataloader: Any) -> int:
        return ROWS


@pytest.mark.parametrize("size", [4, 3, 6])
def test_a_loader_with_state_is_not_read_again(tmp_path: Path, size: int) -> None:
    settings = {"kind": StatefulLoaderTrainer, "num_train_epochs": 1}
    first = part(tmp_path, 2, **settings)
    rest = part(tmp_path, per_device_train_batch_size=size, **settings)
    assert indices(first, rest) == list(range(ROWS))
    assert rest.stateful.read == 8 and rest.state.epoch == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [StreamWithState, Stream])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_continues_after_the_trained_rows(tmp_path: Path, kind: Any, workers: int) -> None:
    first = part(tmp_path, 3, kind(indexed_rows(40)), max_steps=6)
    stream = kind(indexed_rows(40))
    rest = part(tmp_path, 0, stream, max_steps=6, per_device_train_batch_size=5, dataloader_num_workers=workers)
    assert indices(first, rest) == list(range(27))
    if kind is StreamWithState and not workers:
        # Three batches and a prefetched batch.
        assert stream.rows_read == 20


class UnequalFiles(Stream):
    """A stream whose second worker has the last five rows."""

    def __iter__(self) -> Iterator[Any]:
        yield from (self.rows[:-5], self.rows[-5:])[get_worker_info().id]


def test_workers_with_unequal_parts_of_a_stream_continue_after_their_rows(tmp_path: Path) -> None:
    # The second worker ends with its second batch, which is short.
    parts = [
        part(
            tmp_path,
            steps,
            UnequalFiles(indexed_rows(21)),
            max_steps=8,
            dataloader_num_workers=2,
            per_device_train_batch_size=size,
        )
        for steps, size in ((5, 3), (2, 2), (0, 3))
    ]
    assert sorted(indices(*parts)) == list(range(21))


def test_another_number_of_workers_for_a_stream_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for workers in (1, 2):
        part(tmp_path, 2, Stream(indexed_rows()), max_steps=4, dataloader_num_workers=workers)
    assert "The workers now read the stream in 2 parts (before: 1), so rows may be" in caplog.text


def test_callbacks_see_the_new_length_of_the_training(tmp_path: Path) -> None:
    class LengthRecorder(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.length = state.max_steps, state.num_train_epochs

    part(tmp_path, 3)
    recorder = LengthRecorder()
    settings = {"remove_unused_columns": False, "save_strategy": "no", "per_device_train_batch_size": 8}
    trainer: Trainer = noisy_trainer(
        tmp_path, Rows(indexed_rows()), NotingTrainer, {"callbacks": [recorder], "data_collator": collate}, **settings
    )
    output = trainer.train(resume_from_checkpoint=True)
    assert recorder.length == (6, 2) and output.global_step == 6


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_streamed_dataset_with_a_shuffle_buffer_continues_after_its_rows(tmp_path: Path, shuffled: bool) -> None:
    from datasets import Dataset

    def stream() -> Any:
        columns = {"x": [row["x"].tolist() for row in indexed_rows()], "labels": [0] * ROWS, "index": list(range(ROWS))}
        rows = Dataset.from_dict(columns).to_iterable_dataset()
        return (rows.shuffle(seed=1, buffer_size=5) if shuffled else rows).with_format("torch")

    reference = part(tmp_path / "reference", 0, stream(), max_steps=7)
    layouts = [{"steps": 2}, {"steps": 1, "per_device_train_batch_size": 3}, {"per_device_train_batch_size": 5}]
    parts = [part(tmp_path / "cut", dataset=stream(), max_steps=7, **layout) for layout in layouts]
    assert indices(*parts) == indices(reference)


def test_the_rows_of_a_batch_can_be_computed_after_a_resume_with_another_layout(tmp_path: Path) -> None:
    part(tmp_path, 2, num_train_epochs=1)
    rest = part(tmp_path, num_train_epochs=1, per_device_train_batch_size=2)
    windows = rest.training_run.windows
    assert [windows.find_rows(0, number) for number in (4, 7)] == [indices(rest)[:2], indices(rest)[-2:]]
