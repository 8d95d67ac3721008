from __future__ import annotations

import random
from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from littrainer.data.loaders import LookaheadLoader
from littrainer.data.position import (
    DataProgress,
    ResumePoint,
    skips_by_index,
    without_first_batches,
    without_first_rows,
)
from littrainer.data.samplers import EpochSeededSampler
from littrainer.data.sharding import Share, SharedBatches
from tests.data.test_loaders import Numbers
from tests.scenarios.data import Stream


def test_a_generator_that_reading_draws_from_now_and_then_goes_on_where_it_stood() -> None:
    def rarely_noisy(samples: list[int]) -> Any:
        return (*samples, random.random()) if samples[0] in (12, 24) else samples

    def loader() -> LookaheadLoader:
        return LookaheadLoader(Numbers(30), 2, collate_fn=rarely_noisy)

    progress = DataProgress()
    batches = progress.batches(loader())
    for _ in range(9):
        next(batches)
    kept = progress.state(9, epoch_is_over=False)
    expected = list(batches)

    resumed = DataProgress()
    resumed.point = ResumePoint(9, kept, lambda: None)
    assert list(resumed.batches(resumed.resumed_loader(loader()))) == expected


@pytest.mark.parametrize("kind", [DataLoader, LookaheadLoader])
def test_batches_of_a_mapped_dataset_are_left_out_without_reading_a_sample(kind: Any) -> None:
    dataset = Numbers(10)
    loader = kind(dataset, 3, collate_fn=list, sampler=EpochSeededSampler(dataset, data_seed=1))
    whole = list(loader)
    dataset.read.clear()
    shorter = without_first_batches(loader, 2)
    loader.sampler.set_epoch(0)
    if kind is LookaheadLoader:
        shorter.set_epoch(0)
    assert type(shorter) is kind and len(shorter) == 2
    assert list(shorter) == whole[2:]
    assert dataset.read == [number for batch in whole[2:] for number in batch]


def test_only_the_next_iteration_is_shortened() -> None:
    shorter = without_first_batches(LookaheadLoader(Numbers(6), 2, collate_fn=list), 2)
    assert [list(shorter) for _ in range(2)] == [[[4, 5]], [[0, 1], [2, 3], [4, 5]]]
    assert len(shorter) == 3
    none_left = without_first_batches(LookaheadLoader(Numbers(4), 2), 5)
    assert len(none_left) == 0 and list(none_left) == []


class OtherBatches(DataLoader[Any]):
    """Its batches are not those of its sampler."""

    def __iter__(self) -> Any:
        return iter("abcd")


@pytest.mark.parametrize(
    "loader",
    [OtherBatches(Numbers(4)), LookaheadLoader(Stream([]), 2), DataLoader(Numbers(4), batch_size=None), ["a", "b"]],
    ids=["own iteration", "stream", "no batches", "list"],
)
def test_what_has_no_batch_sampler_that_counts_cannot_be_skipped_by_index(loader: Any) -> None:
    assert not skips_by_index(loader)


class Tells(IterableDataset[Any]):
    def __init__(self, state: Any = 3) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state

    def __iter__(self) -> Any:
        return iter(range(6))


def test_a_state_that_a_checkpoint_cannot_hold_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    progress = DataProgress()
    next(progress.batches(LookaheadLoader(Tells(state={"callback": print}), 2)), None)
    assert [progress.state(number, epoch_is_over=False)["stream"] for number in (1, 1)] == [None, None]
    assert caplog.text.count("Tells.state_dict() holds objects that no checkpoint stores") == 1


def batches_of(rows: int, size: int, share: Share | None, left_out: int, drop_last: bool = False) -> list[list[int]]:
    """The index batches that a process reads behind some rows, of a loader whose batches several may share."""
    batches: Any = BatchSampler(range(rows), size, drop_last)
    loader = DataLoader(Numbers(rows), batch_sampler=batches if share is None else SharedBatches(batches, share))
    later = without_first_rows(loader, [left_out])
    assert later is not None and len(later) == len(list(later.batch_sampler))
    # Only the next iteration is shorter.
    assert next(iter(later.batch_sampler))[0] == (0 if share is None else share.number * size)
    return list(without_first_rows(loader, [left_out]).batch_sampler)  # type: ignore[union-attr]


def test_batches_are_formed_of_the_rows_that_are_left() -> None:
    assert batches_of(10, 4, None, 3) == [[3, 4, 5, 6], [7, 8, 9]]
    assert batches_of(10, 4, None, 3, drop_last=True) == [[3, 4, 5, 6]]
    assert [batches_of(10, 2, Share(number, 2), 3) for number in (0, 1)] == [[[3, 4], [7, 8]], [[5, 6], [9, 3]]]
    assert batches_of(10, 4, None, 10) == []


def rows_after(loader: Any, batches: int) -> Any:
    return DataProgress(loader).state(batches, epoch_is_over=False)["rows"]


def test_the_rows_of_some_batches_are_counted_over_all_processes_and_for_each_worker_that_reads_a_stream() -> None:
    loader = LookaheadLoader(Numbers(40), 3)
    loader.processes = 4
    assert rows_after(loader, 2) == [24]
    # Three workers take turns: five batches are two, two and one.
    assert rows_after(DataLoader(Stream([]), 4, num_workers=3), 5) == [8, 8, 4]
    assert rows_after(["no loader"], 2) is None


def test_a_stream_that_is_read_in_other_parts_cannot_leave_rows_out() -> None:
    stream = DataLoader(Stream([{"x": number} for number in range(6)]), 2, collate_fn=list)
    later = without_first_rows(stream, [3])
    assert later is not None and [[row["x"] for row in batch] for batch in later] == [[3, 4], [5]]
    assert without_first_rows(stream, [3, 2]) is None
