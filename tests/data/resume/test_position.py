from __future__ import annotations

import random
from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from littrainer.data.loaders import PrefetchLoader
from littrainer.data.resume.position import DataPosition
from littrainer.data.resume.progress import DataProgress
from littrainer.data.resume.skipping import build_skipping_attributes, can_skip_by_index, copy_with_attributes
from littrainer.data.samplers import EpochSeededSampler
from littrainer.data.sharding import ShardSpec, SharedBatches, SharedStream
from tests.data.test_loaders import Numbers
from tests.scenarios.data import SizedStream, Stream


def test_a_generator_that_only_some_batches_use_is_resumed() -> None:
    def rarely_noisy(samples: list[int]) -> Any:
        return (*samples, random.random()) if samples[0] in (12, 24) else samples

    def loader() -> PrefetchLoader:
        return PrefetchLoader(Numbers(30), 2, collate_fn=rarely_noisy)

    progress = DataProgress()
    batches = progress.batches(loader())
    for _ in range(9):
        next(batches)
    state = progress.state(9, epoch_is_over=False)
    expected = list(batches)

    resumed = DataProgress()
    resumed.resume_at(DataPosition(0, 9, data=state))
    assert list(resumed.batches(loader())) == expected


def resume_progress(loader: Any, batches: int) -> DataProgress:
    """Return the progress of a training that resumes after some batches."""
    progress = DataProgress(loader)
    progress.resume_at(DataPosition(0, batches))
    return progress


@pytest.mark.parametrize("kind", [DataLoader, PrefetchLoader])
def test_batches_of_a_map_style_dataset_are_skipped_without_reading_a_sample(kind: Any) -> None:
    dataset = Numbers(10)
    loader = kind(dataset, 3, collate_fn=list, sampler=EpochSeededSampler(dataset, data_seed=1))
    batches = list(loader)
    dataset.read.clear()
    loader.epoch = 0
    loader.sampler.set_epoch(0)
    progress = resume_progress(loader, 2)
    assert list(progress.batches(loader)) == batches[2:]
    assert dataset.read == [number for batch in batches[2:] for number in batch]
    assert [progress.find_batch_rows(0, number) for number in range(4)] == [None, None, *batches[2:]]


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2, "persistent_workers": True}])
def test_only_the_resumed_epoch_is_shorter(workers: dict[str, Any]) -> None:
    loader = PrefetchLoader(Numbers(6), 2, collate_fn=list, **workers)
    progress = resume_progress(loader, 2)
    epochs = []
    for _ in range(2):
        epochs.append(list(progress.batches(loader)))
        progress.finish_resuming()
    assert epochs == [[[4, 5]], [[0, 1], [2, 3], [4, 5]]]
    assert list(loader) == epochs[1] and len(loader) == 3
    assert list(resume_progress(loader, 5).batches(loader)) == []


class OtherBatches(DataLoader[Any]):
    """Loader with batches other than its sampler's."""

    def __iter__(self) -> Any:
        return iter("abcd")


@pytest.mark.parametrize(
    "loader",
    [OtherBatches(Numbers(4)), PrefetchLoader(Stream([]), 2), DataLoader(Numbers(4), batch_size=None), ["a", "b"]],
    ids=["own iteration", "stream", "no batches", "list"],
)
def test_a_loader_without_a_batch_sampler_of_its_batches_cannot_skip_by_index(loader: Any) -> None:
    assert not can_skip_by_index(loader)


class StatefulStream(IterableDataset[Any]):
    def __init__(self, state: Any = 3) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state

    def __iter__(self) -> Any:
        return iter(range(6))


def test_a_state_that_checkpoints_cannot_store_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    progress = DataProgress()
    next(progress.batches(PrefetchLoader(StatefulStream(state={"callback": print}), 2)), None)
    assert [progress.state(number, epoch_is_over=False)["stream"] for number in (1, 1)] == [None, None]
    assert caplog.text.count("StatefulStream.state_dict() holds objects that no checkpoint stores") == 1


def batches_after(
    rows: int, size: int, shard: ShardSpec | None, skipped_rows: int, drop_last: bool = False
) -> list[list[int]]:
    """Return the index batches of a process after some rows."""
    batches: Any = BatchSampler(range(rows), size, drop_last)
    loader = DataLoader(Numbers(rows), batch_sampler=batches if shard is None else SharedBatches(batches, shard))
    parts = build_skipping_attributes(loader, [skipped_rows])
    assert parts is not None
    read = list(parts["batch_sampler"])
    # Only the next iteration is shorter.
    assert next(iter(parts["batch_sampler"]))[0] == (0 if shard is None else shard.index * size)
    assert len(copy_with_attributes(loader, build_skipping_attributes(loader, [skipped_rows]) or {})) == len(read)
    return read


def test_batches_are_formed_of_the_remaining_rows() -> None:
    assert batches_after(10, 4, None, 3) == [[3, 4, 5, 6], [7, 8, 9]]
    assert batches_after(10, 4, None, 3, drop_last=True) == [[3, 4, 5, 6]]
    assert [batches_after(10, 2, ShardSpec(number, 2), 3) for number in (0, 1)] == [[[3, 4], [7, 8]], [[5, 6], [9, 3]]]
    assert batches_after(10, 4, None, 10) == []


def make_shared_stream_loader(**workers: Any) -> PrefetchLoader:
    """Return a loader of a process's shard of a stream that each of two processes reads."""
    stream = SizedStream([{"x": number} for number in range(10)])
    loader = PrefetchLoader(SharedStream(stream, 2, ShardSpec(0, 2)), 2, collate_fn=list, **workers)
    loader.dispatches_streams = False
    loader.processes = 2
    return loader


@pytest.mark.parametrize(
    "loader",
    [PrefetchLoader(Numbers(10), 4), make_shared_stream_loader(), make_shared_stream_loader(num_workers=1)],
    ids=["by index", "stream", "stream in a worker"],
)
def test_the_last_batch_after_skipped_rows_has_the_remaining_rows(loader: PrefetchLoader) -> None:
    change = {"rows": [3], "batches": 0, "window": 0, "share": 0.3}
    progress = DataProgress(loader)
    progress.resume_at(DataPosition(0, 0, data={"layout_change": change}))
    assert len(list(progress.batches(loader))) == 2 and loader.remainder == 3
    assert len(list(loader)) == 3 and loader.remainder == 2


def count_rows_after(loader: Any, batches: int) -> Any:
    return DataProgress(loader).state(batches, epoch_is_over=False)["rows"]


def test_trained_rows_are_counted_over_all_processes_and_by_stream_worker() -> None:
    loader = PrefetchLoader(Numbers(40), 3)
    loader.processes = 4
    assert count_rows_after(loader, 2) == [24]
    # Three workers take turns: five batches are two, two and one.
    assert count_rows_after(DataLoader(Stream([]), 4, num_workers=3), 5) == [8, 8, 4]
    assert count_rows_after(["no loader"], 2) is None


def test_a_stream_with_another_number_of_shards_cannot_skip_rows() -> None:
    stream = DataLoader(Stream([{"x": number} for number in range(6)]), 2, collate_fn=list)
    later = copy_with_attributes(stream, build_skipping_attributes(stream, [3]) or {})
    assert [[row["x"] for row in batch] for batch in later] == [[3, 4], [5]]
    assert build_skipping_attributes(stream, [3, 2]) is None
