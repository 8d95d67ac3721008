"""Dispatched batches, compared with accelerate's class."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import find_batch_size
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from transformers import BatchEncoding

from littrainer.data import dispatching
from littrainer.data.dispatching import NO_BATCH, UNREAD_BATCH, Dispatch
from littrainer.data.sharding import ShardSpec
from littrainer.distributed.failures import PeerFailedError
from tests.scenarios.data import Stream


def make_numbers(count: int) -> Stream:
    return Stream([{"n": torch.tensor(number)} for number in range(count)])


@pytest.fixture(scope="module", autouse=True)
def reset_accelerate() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def get_accelerate_parts(count: int, size: int, shard: ShardSpec, drop_last: bool) -> list[list[list[int]]]:
    """Return the parts of all processes for each batch of accelerate's loader."""
    calls = []

    def cut(batch: Any, rows: slice, process_index: int, num_processes: int) -> Any:
        calls.append(rows)
        if len(calls) == 1 and not drop_last:
            # First rows, with which accelerate pads the last batch.
            return {"n": batch["n"][rows]}
        length = rows.stop - rows.start
        return [batch["n"][number * length : (number + 1) * length].tolist() for number in range(num_processes)]

    loader: Any = DataLoaderDispatcher(
        make_numbers(count),
        shard.split_batches,
        slice_fn=cut,
        _drop_last=drop_last,
        batch_size=size,
        drop_last=drop_last,
    )
    loader.state = SimpleNamespace(process_index=0, num_processes=shard.count, device=torch.device("cpu"))
    return list(loader)


class Reader:
    """First process, with the parts that it sends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, shard: ShardSpec, drop_last: bool = False, **options: Any):
        self.sent: list[Any] = []
        monkeypatch.setattr(dispatching, "all_gather_object", lambda number: list(range(shard.count)))
        monkeypatch.setattr(dispatching, "scatter_object", self.send)
        self.dispatch = Dispatch(shard, True, drop_last, **options)

    def send(self, parts: list[Any]) -> Any:
        self.sent.append(parts)
        return parts[0]

    def parts(self, batches: Any) -> list[list[Any]]:
        global_batches = self.dispatch.global_batches(iter(batches))
        current = self.dispatch.begin(next(global_batches, NO_BATCH))
        self.sent.clear()
        while current is not NO_BATCH:
            _, current = self.dispatch.scatter(current, next(global_batches, NO_BATCH))
        return [[part.batch for part in parts] for parts in self.sent]


def list_numbers(parts: list[list[Any]]) -> list[list[list[int]]]:
    return [[part["n"].tolist() for part in global_batch] for global_batch in parts]


@given(st.integers(1, 30), st.integers(2, 4), st.integers(1, 5), st.booleans(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_each_process_receives_the_part_that_accelerate_sends(
    count: int, processes: int, size: int, split: bool, drop_last: bool
) -> None:
    shard = ShardSpec(0, processes, split_batches=split)
    size = size * processes if split else size
    batches = list(DataLoader(make_numbers(count), batch_size=size, drop_last=drop_last))
    with pytest.MonkeyPatch.context() as patch:
        reader = Reader(patch, shard, drop_last)
        parts = list_numbers(reader.parts(batches))
    try:
        expected = get_accelerate_parts(count, size, shard, drop_last)
    except ValueError:
        # accelerate fails without any batch.
        expected = []
    assert parts == expected
    assert reader.dispatch.count_global_batches(len(batches)) == len(parts)
    if not drop_last:
        rows = count % (size if split else size * processes) or (size if split else size * processes)
        assert reader.dispatch.last_global_batch_size == rows


def test_batches_that_cannot_be_joined_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader(monkeypatch, ShardSpec(0, 2))
    with pytest.raises(ValueError, match=r"cannot be divided between them: .*dispatch_batches=False"):
        reader.parts([torch.zeros(2, 3), torch.zeros(1, 5)])
    assert all("ValueError" in part.error for part in reader.sent[-1])


def test_nested_batches_are_scattered(monkeypatch: pytest.MonkeyPatch) -> None:
    def batch(start: int, rows: int) -> Any:
        ids = torch.arange(start, start + rows)
        return BatchEncoding({"input_ids": ids, "pairs": (ids, [ids])})

    parts = Reader(monkeypatch, ShardSpec(0, 2)).parts([batch(0, 2), batch(2, 2), batch(4, 2), batch(6, 1)])
    assert type(parts[1][1]) is BatchEncoding and parts[0][1]["input_ids"].tolist() == [2, 3]
    last = [part["pairs"] for part in parts[1]]
    assert [(pair[0].tolist(), pair[1][0].tolist()) for pair in last] == [([4, 5], [4, 5]), ([6, 0], [6, 0])]


PAIRS = {"features": [{"v": torch.zeros(4, 2)}, {"v": torch.zeros(4, 3)}]}


def test_mappings_in_a_list_are_parts_of_a_batch_if_their_sizes_are_equal_else_samples() -> None:
    assert dispatching.find_batch_size(PAIRS) == find_batch_size(PAIRS) == 4
    assert dispatching.find_batch_size([{"boxes": torch.zeros(rows, 4)} for rows in (1, 3)]) == 2
    assert dispatching.find_batch_size([{"text": "a"}, {"text": "b"}]) == 2


def test_a_part_does_not_share_storage_with_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader(monkeypatch, ShardSpec(0, 2, split_batches=True))
    part = reader.parts([torch.zeros(100, 8)])[0][1]
    assert part.untyped_storage().nbytes() == 50 * 8 * 4


def test_a_reading_error_is_raised_in_all_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing() -> Iterator[torch.Tensor]:
        yield torch.zeros(2)
        yield torch.zeros(2)
        raise OSError("no such shard")

    reader = Reader(monkeypatch, ShardSpec(0, 2))
    with pytest.raises(OSError, match="no such shard"):
        reader.parts(failing())
    other = Dispatch(ShardSpec(1, 2), reads=False, drop_last=False)
    assert next(other.global_batches(failing())) is UNREAD_BATCH
    monkeypatch.setattr(dispatching, "scatter_object", lambda parts: reader.sent[-1][1])
    with pytest.raises(PeerFailedError, match=r"Process 0, which reads the data for all.*OSError: no such shard"):
        other.scatter(UNREAD_BATCH, UNREAD_BATCH)


def test_a_resumed_epoch_pads_its_last_batch_with_the_first_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches = [torch.tensor([number]) for number in range(5)]
    complete = Reader(monkeypatch, ShardSpec(0, 2))
    complete.parts(batches)
    resumed = Reader(monkeypatch, ShardSpec(0, 2))
    resumed.dispatch.resume(complete.dispatch.first_rows)
    assert [part.tolist() for part in resumed.parts(batches[4:])[0]] == [[4], [0]]
    skipping = Reader(monkeypatch, ShardSpec(0, 2))
    remaining = iter(batches)
    skipping.dispatch.skip(remaining, 2)
    assert [part.tolist() for part in skipping.parts(remaining)[0]] == [[4], [0]]
