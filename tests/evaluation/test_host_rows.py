from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from littrainer.errors.nested_values import concatenated
from littrainer.evaluation import host_rows
from littrainer.evaluation.host_rows import HostRows

needs_proc = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def numbered(rows: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(rows * int(np.prod(shape)), dtype=dtype).reshape(rows, *shape)


def written(pieces: list[torch.Tensor], expected_rows: int | None = None) -> np.ndarray:
    collected = HostRows(expected_rows)
    for piece in pieces:
        collected.write(piece)
    return collected.joined()


PIECES = {
    "one row each": [numbered(1), numbered(1)],
    "rows of numbers": [numbered(3), numbered(2)],
    "wider later": [numbered(2, 3), numbered(1, 5), numbered(2, 4), numbered(1, 6)],
    "narrower later": [numbered(2, 5, 2), numbered(3, 2, 2)],
    "longer and longer": [numbered(2, width) for width in range(1, 9)],
    "half precision": [numbered(2, 2, dtype=torch.bfloat16), numbered(1, 3, dtype=torch.bfloat16)],
    "whole numbers, then others": [numbered(2, 2, dtype=torch.int64), numbered(1, 2)],
    "no rows": [numbered(0, 3), numbered(2, 3), numbered(0, 3)],
    "only no rows": [numbered(0, 3)],
    "truth": [torch.tensor([True]), torch.tensor([False, True])],
}


@pytest.mark.parametrize("expected_rows", [None, 1, 5, 100])
@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES.keys())
def test_rows_are_those_of_all_batches_whatever_number_was_expected(
    pieces: list[torch.Tensor], expected_rows: int | None
) -> None:
    joined: Any = concatenated(pieces)
    joined = joined.float() if joined.dtype == torch.bfloat16 else joined
    found = written(pieces, expected_rows)
    assert (found.dtype, found.shape) == (joined.numpy().dtype, joined.numpy().shape)
    assert np.array_equal(found, joined.numpy())
    assert found.flags.c_contiguous and found.flags.writeable


def test_a_single_number_stays_one_and_several_make_a_row() -> None:
    assert written([torch.tensor(2.5)]).shape == ()
    assert written([torch.tensor(2.5), torch.tensor(1.0)]).tolist() == [2.5, 1.0]


def test_rows_can_be_read_and_added_to_again() -> None:
    collected = HostRows()
    for width in (2, 3):
        collected.write(numbered(1, width))
        collected.joined()
    collected.write(numbered(2, 1))
    assert collected.joined().tolist() == [[0, 1, -100], [0, 1, 2], [0, -100, -100], [1, -100, -100]]


@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 3), (2,)])
def test_rows_that_differ_in_more_than_their_second_dimension_are_refused_with_both_shapes(shape: Any) -> None:
    collected = HostRows()
    collected.write(torch.zeros(1, 3, 4))
    with pytest.raises(ValueError) as caught:
        collected.write(torch.zeros(shape))
    assert str(shape) in str(caught.value) and "(1, 3, 4)" in str(caught.value)
    assert "preprocess_logits_for_metrics" in str(caught.value)


def test_more_rows_expected_than_the_host_has_room_for_are_no_error() -> None:
    assert written([numbered(2, 3)], expected_rows=2**60).shape == (2, 3)


def test_too_little_room_is_an_error_that_says_how_to_need_less(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int) -> Any:
        raise OSError(12, "Cannot allocate memory")

    collected = HostRows()
    collected.write(numbered(2, 3))
    monkeypatch.setattr(host_rows, "_untouched_memory", refuse)
    with pytest.raises(MemoryError, match=r"preprocess_logits_for_metrics.*torchmetrics"):
        collected.write(numbered(2, 4))


def test_as_many_rows_as_expected_are_allocated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    original = host_rows._untouched_memory
    monkeypatch.setattr(host_rows, "_untouched_memory", lambda size: (sizes.append(size), original(size))[1])
    array = written([numbered(2, 6), numbered(2, 6), numbered(2, 3)], expected_rows=6)
    assert sizes == [array.nbytes]


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * host_rows.mmap.PAGESIZE


@needs_proc
@pytest.mark.parametrize(("expected_rows", "last_width"), [(64, 16), (64, 17), (None, 16)])
def test_at_no_moment_is_much_more_resident_than_the_array_itself(
    monkeypatch: pytest.MonkeyPatch, expected_rows: int | None, last_width: int
) -> None:
    seen: list[int] = []
    original = host_rows._give_back
    monkeypatch.setattr(host_rows, "_give_back", lambda *given: (original(*given), seen.append(resident_bytes()))[0])
    rows, wide = torch.ones(1, 16, 2**15), torch.ones(1, last_width, 2**15)
    before = resident_bytes()
    collected = HostRows(expected_rows)
    for _ in range(63):
        collected.write(rows)
    collected.write(wide)
    array = collected.joined()
    seen.append(resident_bytes())
    assert array.shape == (64, last_width, 2**15)
    assert (max(seen) - before) / array.nbytes < 1.1


@pytest.mark.skipif(not hasattr(host_rows.mmap, "MADV_DONTNEED"), reason="the system takes no advice about memory")
def test_pages_are_given_back_once_each_and_none_that_is_still_to_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    page = host_rows.mmap.PAGESIZE
    given_back: list[tuple[int, int]] = []

    class Advised(host_rows.mmap.mmap):
        def madvise(self, advice: int, start: int = 0, length: int | None = None) -> None:
            assert advice == host_rows.mmap.MADV_DONTNEED and length is not None
            given_back.append((start // page, (start + length) // page))
            super().madvise(advice, start, length)

    def mapped(size: int) -> Any:
        return Advised(-1, size) if size >= host_rows.MAPPED_FROM_BYTES else np.empty(max(size, 1), dtype=np.uint8)

    monkeypatch.setattr(host_rows, "_untouched_memory", mapped)
    monkeypatch.setattr(host_rows, "SLICE_BYTES", 3 * page)
    # Rows of five quarters of a page: what is copied ends within one.
    pieces = [numbered(256, 5 * page // 16), numbered(8, 5 * page // 16 + 1)]
    joined = written(pieces)
    assert np.array_equal(joined[:256, :-1], pieces[0].numpy()) and np.array_equal(joined[256:], pieces[1].numpy())
    of_first_block, number = [], 0
    for start, end in given_back:
        if start != number:
            break
        of_first_block.append(end - start)
        number = end
    # 256 rows, two in a slice of 2.5 pages.
    assert (len(of_first_block), number) == (128, 320) and set(of_first_block) == {2, 3}
    host_rows._give_back(np.empty(2 * page, dtype=np.uint8), 0, 2 * page)
    before = len(given_back)
    host_rows._give_back(Advised(-1, 2 * page), 0, page - 1)
    assert len(given_back) == before
