"""A training that is resumed with another batch size, accumulation or number of workers, in one process.

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
from tests.loop.exact_resume import StreamWithState, differences_after_resuming, noisy_trainer, outcome
from tests.scenarios.data import Rows, Stream, vector_rows

ROWS = 16


def numbered(count: int = ROWS) -> list[Any]:
    """Vectors that the trainer below knows by their indices, of two lengths."""
    return [{**row, "index": index, "input_ids": [0] * (1 + index % 2)} for index, row in enumerate(vector_rows(count))]


def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
    # Rows for an evaluation have no index.
    columns = {name: torch.tensor([row[name] for row in rows]) for name in ("labels", "index") if name in rows[0]}
    return {"x": torch.stack([row["x"] for row in rows]), **columns}


def part(
    folder: Path, steps: int = 0, dataset: Any = None, kind: type[NotingTrainer] = NotingTrainer, **changes: Any
) -> NotingTrainer:
    """Train up to a cut, or to the end, from the newest checkpoint."""
    given = {"callbacks": [CutAfter(steps)], "data_collator": collate}
    settings: dict[str, Any] = {"remove_unused_columns": False, "save_strategy": "no", **changes}
    data = Rows(numbered()) if dataset is None else dataset
    trainer = noisy_trainer(folder, data, kind=kind, given=given, **settings)
    trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))
    assert isinstance(trainer, NotingTrainer)
    return trainer


def indices(*trainers: NotingTrainer, epoch: int = 0) -> list[int]:
    return [index for trainer in trainers for number, index in trainer.rows if number == epoch]


def test_steps_schedule_and_epochs_go_on_by_the_rows_that_were_trained(tmp_path: Path) -> None:
    part(tmp_path, 3)
    trainer = part(tmp_path, per_device_train_batch_size=2)
    # Twelve of 32 rows in three steps, and ten more steps for the other twenty.
    assert trainer.state.max_steps == trainer.state.global_step == 13
    logs = [entry for entry in trainer.state.log_history if "learning_rate" in entry]
    assert [entry["epoch"] for entry in logs] == pytest.approx(
        [0.25, 0.5, 0.75, 0.875, 1, *(1 + step / 8 for step in range(1, 9))]
    )
    # Behind the cut the rate is that of sixteen steps of the new size, of which the first six stand for twelve rows.
    rates = [0.01 * (1 - step / 8) for step in range(3)] + [0.01 * (1 - step / 16) for step in range(6, 16)]
    assert [entry["learning_rate"] for entry in logs] == pytest.approx(rates)
    assert trainer.lr_scheduler.last_epoch == 16


def test_a_number_of_steps_that_was_asked_for_stays(tmp_path: Path) -> None:
    part(tmp_path, 6, max_steps=10)
    trainer = part(tmp_path, max_steps=10, per_device_train_batch_size=2)
    assert trainer.state.max_steps == trainer.state.global_step == 10
    # Half of the second epoch was trained; four steps are its other half.
    assert trainer.state.epoch == 2 and trainer.lr_scheduler.last_epoch == 10


def test_a_step_may_have_so_few_rows_that_the_epochs_are_more_than_steps_of_the_new_size_would_make(
    tmp_path: Path,
) -> None:
    part(tmp_path, 3, max_steps=8, per_device_train_batch_size=ROWS)
    trainer = part(tmp_path, max_steps=8, per_device_train_batch_size=4)
    assert trainer.state.global_step == 8 and trainer.state.epoch == pytest.approx(4.25)


@pytest.mark.parametrize("changes", [{"per_device_train_batch_size": 6}, {"gradient_accumulation_steps": 2}], ids=str)
def test_what_was_resumed_with_another_layout_is_resumed_exactly_with_the_same(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    dataset = Rows(vector_rows(ROWS))
    given = {"callbacks": [CutAfter(2)]}
    noisy_trainer(tmp_path, dataset, given=given, save_strategy="no").train()
    whole = noisy_trainer(tmp_path, dataset, **changes)
    whole.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for step in (3, 5):
        resumed = noisy_trainer(tmp_path, dataset, **changes)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        expected, found = outcome(whole), outcome(resumed)
        assert found["step"] == expected["step"] and found["rates"] == expected["rates"]
        assert all(torch.equal(value, found["weights"][name]) for name, value in expected["weights"].items())
        assert found["logs"][-1] == expected["logs"][-1]


def test_a_checkpoint_that_is_resumed_with_the_same_layout_is_resumed_as_before(tmp_path: Path) -> None:
    assert differences_after_resuming(tmp_path, lambda: noisy_trainer(tmp_path, Rows(vector_rows(ROWS))), 3) == {}


def test_an_order_that_was_sorted_in_batches_of_the_old_size_is_kept_for_the_rest_of_the_epoch(tmp_path: Path) -> None:
    settings = {"train_sampling_strategy": "group_by_length"}
    whole = part(tmp_path / "whole", **settings)
    folder = tmp_path / "cut"
    first = part(folder, 2, **settings)
    rest = part(folder, per_device_train_batch_size=2, **settings)
    assert indices(first, rest) == indices(whole)
    assert sorted(indices(rest, epoch=1)) == list(range(ROWS))


def test_an_epoch_that_was_over_is_not_gone_on_with(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"eval_strategy": "epoch"}
    part(tmp_path, 4, **settings)
    rest = part(tmp_path, per_device_train_batch_size=8, **settings)
    assert not indices(rest) and sorted(indices(rest, epoch=1)) == list(range(ROWS))
    assert "Training goes on at the first row of epoch 1, and takes 6 optimizer steps in all." in caplog.text
    assert [entry["step"] for entry in rest.state.log_history if "eval_loss" in entry] == [4, 6]


def test_as_many_rows_in_a_step_make_the_same_training_in_other_micro_batches(tmp_path: Path) -> None:
    whole = part(tmp_path / "whole", global_batch_size=4)
    folder = tmp_path / "cut"
    part(folder, 3, global_batch_size=4)
    rest = part(folder, global_batch_size=4, per_device_train_batch_size=2)
    assert rest.args.gradient_accumulation_steps == 2
    rates = [[entry.get("learning_rate") for entry in one.state.log_history[:8]] for one in (whole, rest)]
    assert rates[0] == pytest.approx(rates[1]) and whole.state.max_steps == rest.state.max_steps == 8


class OwnBatches(Sampler[list[int]]):
    """Batches that no sampler of rows stands behind."""

    def __init__(self, size: int) -> None:
        self.batch_size = size

    def __len__(self) -> int:
        return ROWS // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        yield from (list(range(start, start + self.batch_size)) for start in range(0, ROWS, self.batch_size))


class OwnBatchesTrainer(NotingTrainer):
    def get_train_dataloader(self) -> Any:
        batches = OwnBatches(self.args.per_device_train_batch_size)
        return DataLoader(self.train_dataset, batch_sampler=batches, collate_fn=collate)


def test_batches_that_are_not_known_to_be_formed_of_rows_are_counted_in_steps_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    part(tmp_path, 2, kind=OwnBatchesTrainer)
    rest = part(tmp_path, kind=OwnBatchesTrainer, per_device_train_batch_size=8)
    assert "Which rows were trained is not known of these batches." in caplog.text
    # Two steps of the new size are an epoch.
    assert rest.state.max_steps == 4 and not indices(rest)


def test_another_accumulation_goes_on_by_micro_batches_where_no_rows_are_known(tmp_path: Path) -> None:
    first = part(tmp_path, 3, kind=OwnBatchesTrainer)
    rest = part(tmp_path, kind=OwnBatchesTrainer, gradient_accumulation_steps=2)
    assert indices(first, rest) == list(range(ROWS)) and rest.state.max_steps == 6


class StatefulLoader:
    """A loader of the script's own, by the protocol of torchdata's StatefulDataLoader; its states name the next row."""

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
        self.stateful = StatefulLoader(numbered(), self.args.per_device_train_batch_size)
        return self.stateful

    def num_examples(self, dataloader: Any) -> int:
        return ROWS


@pytest.mark.parametrize("size", [4, 3, 6])
def test_a_loader_that_keeps_its_state_is_not_read_again(tmp_path: Path, size: int) -> None:
    settings = {"kind": StatefulLoaderTrainer, "num_train_epochs": 1}
    first = part(tmp_path, 2, **settings)
    rest = part(tmp_path, per_device_train_batch_size=size, **settings)
    assert indices(first, rest) == list(range(ROWS))
    assert rest.stateful.read == 8 and rest.state.epoch == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [StreamWithState, Stream])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_goes_on_behind_the_rows_that_were_trained(tmp_path: Path, kind: Any, workers: int) -> None:
    first = part(tmp_path, 3, kind(numbered(40)), max_steps=6)
    stream = kind(numbered(40))
    rest = part(tmp_path, 0, stream, max_steps=6, per_device_train_batch_size=5, dataloader_num_workers=workers)
    assert indices(first, rest) == list(range(27))
    if kind is StreamWithState and not workers:
        # Three batches and the one that is collated ahead.
        assert stream.rows_read == 20


class UnequalFiles(Stream):
    """The second worker has the last five rows."""

    def __iter__(self) -> Iterator[Any]:
        yield from (self.rows[:-5], self.rows[-5:])[get_worker_info().id]


def test_of_workers_with_unequal_parts_of_a_stream_each_goes_on_behind_its_own_rows(tmp_path: Path) -> None:
    # The second worker ends with its second batch, which is short, and the first one goes on alone.
    parts = [
        part(
            tmp_path,
            steps,
            UnequalFiles(numbered(21)),
            max_steps=8,
            dataloader_num_workers=2,
            per_device_train_batch_size=size,
        )
        for steps, size in ((5, 3), (2, 2), (0, 3))
    ]
    assert sorted(indices(*parts)) == list(range(21))


def test_another_number_of_workers_that_read_a_stream_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for workers in (1, 2):
        part(tmp_path, 2, Stream(numbered()), max_steps=4, dataloader_num_workers=workers)
    assert "The workers read the stream in 2 parts (1), so rows may be trained twice or left out" in caplog.text


def test_callbacks_see_the_length_that_the_training_will_have(tmp_path: Path) -> None:
    class Looks(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seen = state.max_steps, state.num_train_epochs

    part(tmp_path, 3)
    looks = Looks()
    settings = {"remove_unused_columns": False, "save_strategy": "no", "per_device_train_batch_size": 8}
    trainer: Trainer = noisy_trainer(
        tmp_path, Rows(numbered()), NotingTrainer, {"callbacks": [looks], "data_collator": collate}, **settings
    )
    output = trainer.train(resume_from_checkpoint=True)
    assert looks.seen == (6, 2) and output.global_step == 6


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_streamed_dataset_goes_on_behind_its_rows_also_if_it_shuffles_in_a_buffer(
    tmp_path: Path, shuffled: bool
) -> None:
    from datasets import Dataset

    def stream() -> Any:
        columns = {"x": [row["x"].tolist() for row in numbered()], "labels": [0] * ROWS, "index": list(range(ROWS))}
        rows = Dataset.from_dict(columns).to_iterable_dataset()
        return (rows.shuffle(seed=1, buffer_size=5) if shuffled else rows).with_format("torch")

    whole = part(tmp_path / "whole", 0, stream(), max_steps=7)
    layouts = [{"steps": 2}, {"steps": 1, "per_device_train_batch_size": 3}, {"per_device_train_batch_size": 5}]
    parts = [part(tmp_path / "cut", dataset=stream(), max_steps=7, **layout) for layout in layouts]
    assert indices(*parts) == indices(whole)


def test_a_report_names_the_rows_of_a_batch_of_an_epoch_that_was_resumed_with_another_layout(tmp_path: Path) -> None:
    part(tmp_path, 2, num_train_epochs=1)
    rest = part(tmp_path, num_train_epochs=1, per_device_train_batch_size=2)
    windows = rest.training_run.windows
    assert [windows.find_rows(0, number) for number in (4, 7)] == [indices(rest)[:2], indices(rest)[-2:]]
