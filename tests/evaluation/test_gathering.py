from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.trainer_pt_utils import EvalLoopContainer

from littrainer.evaluation import gathering
from littrainer.evaluation.gathering import BatchCollection, HostRows, SampleLists
from littrainer.runtime.nested_values import SampleList, concat_nested
from tests.scenarios.nested import described, filled


@pytest.mark.parametrize(("join", "waiting_bytes"), [(True, 1), (True, 1000), (False, 1000)])
@pytest.mark.parametrize("moved_after", [(), (0, 1), (1, 2)], ids=str)
def test_a_collection_gives_the_arrays_of_transformers_container(
    monkeypatch: pytest.MonkeyPatch, join: bool, moved_after: tuple[int, ...], waiting_bytes: int
) -> None:
    monkeypatch.setattr(gathering, "WAITING_BYTES", waiting_bytes)
    ours, theirs = BatchCollection(join), EvalLoopContainer(join)
    for number, width in enumerate((3, 5, 2)):
        batch = (filled(2, width), {"a": filled(2).to(torch.bfloat16)})
        ours.add(batch)
        theirs.add(batch)
        if number in moved_after:
            ours.move_to_host()
            theirs.to_cpu_and_numpy()
    assert described(ours.arrays()) == described(theirs.get_arrays())
    assert described(ours.arrays()) == described(ours.arrays())


def test_large_tensors_of_the_host_are_written_into_the_joined_array_when_they_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gathering, "WAITING_BYTES", 20)
    collection = BatchCollection(expected_rows=4)
    first = filled(2, 3)
    collection.add(first)
    first.fill_(7)
    collection.add(filled(2, 3))
    assert collection.arrays().tolist() == [*filled(2, 3).tolist()] * 2


@pytest.mark.parametrize("nested", [False, True])
def test_a_part_of_a_large_tensor_does_not_keep_the_rest_of_it(monkeypatch: pytest.MonkeyPatch, nested: bool) -> None:
    part = filled(100, 30)[:1]
    monkeypatch.setattr(gathering, "WAITING_BYTES", 1)
    monkeypatch.setattr(gathering, "_bytes_and_place", lambda batch: (2, False))
    collection = BatchCollection()
    collection.add((part,) if nested else part)
    (held,) = [batch[0] if nested else batch for batch in collection._waiting]
    assert held.untyped_storage().nbytes() == part.nbytes
    found = collection.arrays()
    assert (found[0] if nested else found).tolist() == part.tolist()


@pytest.mark.parametrize(
    ("batch", "kinds"), [(((filled(1),), {"a": filled(1)}), "Tensor, tuple"), ([filled(1), {"a": filled(1)}], "list")]
)
def test_batches_of_another_structure_are_refused(batch: Any, kinds: str) -> None:
    collection = BatchCollection()
    collection.add((filled(1), {"a": filled(1)}))
    with pytest.raises(TypeError, match=rf"{kinds}.*eval_do_concat_batches=False"):
        collection.add(batch)
        collection.arrays()


def numbered(rows: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(rows * int(np.prod(shape)), dtype=dtype).reshape(rows, *shape)


def written(pieces: list[torch.Tensor], expected_rows: int | None = None) -> np.ndarray:
    collected = HostRows(expected_rows)
    for piece in pieces:
        collected.write(piece)
    return collected.joined()


PIECES = {
    "one row each": [numbered(1), numbered(1)],
    "single numbers": [torch.tensor(2.5), torch.tensor(1.0)],
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


@pytest.mark.parametrize("expected_rows", [None, 1, 100])
@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES.keys())
def test_rows_are_those_of_all_batches_whatever_number_was_expected(
    pieces: list[torch.Tensor], expected_rows: int | None
) -> None:
    joined: Any = concat_nested(pieces)
    joined = joined.float() if joined.dtype == torch.bfloat16 else joined
    found = written(pieces, expected_rows)
    assert (found.dtype, found.shape) == (joined.numpy().dtype, joined.numpy().shape)
    assert np.array_equal(found, joined.numpy())
    assert found.flags.c_contiguous and found.flags.writeable


@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 3), (2,)])
def test_rows_that_differ_in_more_than_their_second_dimension_are_refused_with_both_shapes(shape: Any) -> None:
    collected = HostRows()
    collected.write(torch.zeros(1, 3, 4))
    with pytest.raises(ValueError) as caught:
        collected.write(torch.zeros(shape))
    assert str(shape) in str(caught.value) and "(1, 3, 4)" in str(caught.value)
    assert "preprocess_logits_for_metrics" in str(caught.value)


def test_too_little_memory_is_an_error_that_says_how_to_need_less() -> None:
    with pytest.raises(MemoryError, match=r"preprocess_logits_for_metrics.*torchmetrics"):
        written([numbered(2, 3)], expected_rows=2**60)


def test_as_many_rows_as_expected_are_allocated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    allocate = gathering._memory

    def noting(*given: Any) -> torch.Tensor:
        memory = allocate(*given)
        sizes.append(memory.nbytes)
        return memory

    monkeypatch.setattr(gathering, "_memory", noting)
    array = written([numbered(2, 6), numbered(2, 6), numbered(2, 3)], expected_rows=6)
    assert sizes == [array.nbytes]


def test_a_first_sample_with_a_single_box_does_not_decide_that_lists_hold_layers() -> None:
    lists = SampleLists(is_certain=False)
    lists.marked([{"boxes": torch.zeros(1, 4)}], 1)
    assert isinstance(lists.marked([{"boxes": torch.zeros(3, 4)}], 1), SampleList)
    assert isinstance(lists.marked([{"boxes": torch.zeros(1, 4)}], 1), SampleList)
