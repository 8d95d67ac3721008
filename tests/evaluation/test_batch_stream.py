from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from littrainer.evaluation.batch_stream import BatchStream, single_batches


def handed_out(stream: BatchStream) -> list[list[Any]]:
    return [list(single_batches(item)) for item in stream]


@pytest.mark.parametrize("batches_per_step", [1, 4])
def test_lightning_is_told_a_length_for_any_loader(batches_per_step: int) -> None:
    assert len(BatchStream([1, 2, 3], batches_per_step)) > 10**9
    assert len(BatchStream(iter("ab"), batches_per_step)) > 10**9


@pytest.mark.parametrize(("count", "lengths"), [(0, []), (1, [1]), (3, [3]), (4, [3, 1]), (6, [3, 3]), (7, [3, 3, 1])])
def test_chunks_hold_every_batch_once_and_in_order(count: int, lengths: list[int]) -> None:
    chunks = handed_out(BatchStream(range(count), 3))
    assert [len(chunk) for chunk in chunks] == lengths
    assert [batch for chunk in chunks for batch in chunk] == list(range(count))


def test_no_batch_is_drawn_before_its_turn() -> None:
    events: list[Any] = []

    def loader() -> Iterator[int]:
        for number in range(5):
            events.append(("drawn", number))
            yield number

    for chunk in BatchStream(loader(), 2):
        events.append("chunk")
        events.extend(("used", batch) for batch in single_batches(chunk))
    assert [event[0] for event in events if event != "chunk"] == ["drawn", "used"] * 5
    assert events[:3] == [("drawn", 0), "chunk", ("used", 0)]


@pytest.mark.parametrize("batches_per_step", [1, 2])
def test_the_loader_begins_with_the_first_batch_however_often_an_iterator_is_asked_for(batches_per_step: int) -> None:
    begun: list[str] = []

    class Loader:
        def __iter__(self) -> Iterator[int]:
            begun.append("begun")
            return iter([1])

    stream = BatchStream(Loader(), batches_per_step)
    iter(stream)
    assert begun == []
    assert handed_out(stream) == [[1]] and begun == ["begun"]


def test_a_chunk_that_is_left_early_loses_no_batch() -> None:
    seen = [next(single_batches(chunk)) for chunk in BatchStream(range(4), 3)]
    assert seen == [0, 1, 2, 3]


def test_an_iterator_that_begins_again_when_asked_once_more_is_not_asked() -> None:
    class Circular:
        def __init__(self) -> None:
            self.number = 0

        def __iter__(self) -> Circular:
            return self

        def __next__(self) -> int:
            self.number += 1
            if self.number == 3:
                self.number = 0
                raise StopIteration
            return self.number

    assert handed_out(BatchStream(Circular(), 4)) == [[1, 2]]
