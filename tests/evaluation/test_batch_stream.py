from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from littrainer.evaluation.batch_stream import BatchStream, single_batches


@pytest.mark.parametrize(("one_by_one", "steps"), [(True, [[0], [1], [2]]), (False, [[0, 1, 2]])])
def test_batches_are_handed_out_one_by_one_or_all_in_a_step_for_any_loader(
    one_by_one: bool, steps: list[list[int]]
) -> None:
    for loader in (range(3), iter(range(3))):
        stream = BatchStream(loader, one_by_one)
        assert len(stream) > 10**9
        assert [list(single_batches(handed_out)) for handed_out in stream] == steps
    assert [list(single_batches(one)) for one in BatchStream(range(9), one_by_one, limit=3)] == steps


@pytest.mark.parametrize("one_by_one", [True, False])
def test_no_batch_is_drawn_before_its_turn_and_the_loader_begins_with_the_first_one(one_by_one: bool) -> None:
    events: list[Any] = []

    class Loader:
        def __iter__(self) -> Iterator[int]:
            events.append("begun")
            for number in range(3):
                events.append("drawn")
                yield number

    stream = BatchStream(Loader(), one_by_one)
    iter(stream)
    assert events == []
    for step in stream:
        events.extend("used" for _ in single_batches(step))
    assert events == ["begun", *["drawn", "used"] * 3]
