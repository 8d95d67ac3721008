from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from transformers.trainer_pt_utils import EvalLoopContainer

from littrainer.evaluation import gathering
from littrainer.evaluation.gathering import BatchCollection, HostArrayBuilder, SampleLists
from littrainer.runtime.nested_values import SampleList, concat_nested
from tests.scenarios.nested import described, filled


@pytest.mark.parametrize(("join", "waiting_bytes"), [(True, 1), (True, 1000), (False, 1000)])
@pytest.mark.parametrize("moved_after", [(), (1, 2)], ids=str)
def test_a_collection_returns_the_arrays_of_transformers_container(
    monkeypatch: pytest.MonkeyPatch, join: bool, moved_after: tuple[int, ...], waiting_bytes: int
) -> None:
    monkeypatch.setattr(gathering, "MIN_WRITE_BYTES", waiting_bytes)
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


def test_large_host_tensors_are_written_immediately(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gathering, "MIN_WRITE_BYTES", 20)
    collection = BatchCollection(expected_rows=4)
    first = filled(2, 3)
    collection.add(first)
    first.fill_(7)
    collection.add(filled(2, 3))
    assert collection.arrays().tolist() == [*filled(2, 3).tolist()] * 2


def test_a_view_of_a_large_tensor_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    part = filled(100, 30)[:1]
    monkeypatch.setattr(gathering, "_measure_storage", lambda batch: (2, False))
    collection = BatchCollection()
    collection.add((part,))
    ((held,),) = collection._waiting
    assert held.untyped_storage().nbytes() == part.nbytes
    assert collection.arrays()[0].tolist() == part.tolist()


@pytest.mark.parametrize(
    ("batch", "kinds"), [(((filled(1),), {"a": filled(1)}), "Tensor, tuple"), ([filled(1), {"a": filled(1)}], "list")]
)
def test_batches_of_another_structure_are_refused(batch: Any, kinds: str) -> None:
    collection = BatchCollection()
    collection.add((filled(1), {"a": filled(1)}))
    with pytest.raises(TypeError, match=rf"{kinds}.*eval_do_concat_batches=False"):
        collection.add(batch)
        collection.arrays()


def make_rows(rows: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(rows * int(np.prod(shape)), dtype=dtype).reshape(rows, *shape)


def write_all(pieces: list[torch.Tensor], expected_rows: int | None = None) -> np.ndarray:
    collected = HostArrayBuilder(expected_rows)
    for piece in pieces:
        collected.write(piece)
    return collected.array()


PIECES = {
    "one row each": [make_rows(1), make_rows(1)],
    "single numbers": [torch.tensor(2.5), torch.tensor(1.0)],
    "rows of numbers": [make_rows(3), make_rows(2)],
    "wider later": [make_rows(2, 3), make_rows(1, 5), make_rows(2, 4), make_rows(1, 6)],
    "narrower later": [make_rows(2, 5, 2), make_rows(3, 2, 2)],
    "longer and longer": [make_rows(2, width) for width in range(1, 9)],
    "half precision": [make_rows(2, 2, dtype=torch.bfloat16), make_rows(1, 3, dtype=torch.bfloat16)],
    "whole numbers, then others": [make_rows(2, 2, dtype=torch.int64), make_rows(1, 2)],
    "no rows": [make_rows(0, 3), make_rows(2, 3), make_rows(0, 3)],
    "only no rows": [make_rows(0, 3)],
    "truth": [torch.tensor([True]), torch.tensor([False, True])],
}


@pytest.mark.parametrize("expected_rows", [None, 1, 100])
@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES.keys())
def test_rows_of_all_batches_are_joined_for_any_expected_number(
    pieces: list[torch.Tensor], expected_rows: int | None
) -> None:
    joined: Any = concat_nested(pieces)
    joined = joined.float() if joined.dtype == torch.bfloat16 else joined
    rows = write_all(pieces, expected_rows)
    assert (rows.dtype, rows.shape) == (joined.numpy().dtype, joined.numpy().shape)
    assert np.array_equal(rows, joined.numpy())
    assert rows.flags.c_contiguous and rows.flags.writeable


@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 3), (2,)])
def test_rows_that_differ_in_more_than_the_second_dimension_are_refused(shape: Any) -> None:
    collected = HostArrayBuilder()
    collected.write(torch.zeros(1, 3, 4))
    with pytest.raises(ValueError) as caught:
        collected.write(torch.zeros(shape))
    assert str(shape) in str(caught.value) and "(1, 3, 4)" in str(caught.value)
    assert "preprocess_logits_for_metrics" in str(caught.value)


def test_a_memory_error_has_advice() -> None:
    with pytest.raises(MemoryError, match=r"preprocess_logits_for_metrics.*torchmetrics"):
        write_all([make_rows(2, 3)], expected_rows=2**60)


def test_expected_rows_are_allocated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    allocate = gathering._allocate

    def record_size(*arguments: Any) -> torch.Tensor:
        memory = allocate(*arguments)
        sizes.append(memory.nbytes)
        return memory

    monkeypatch.setattr(gathering, "_allocate", record_size)
    array = write_all([make_rows(2, 6), make_rows(2, 6), make_rows(2, 3)], expected_rows=6)
    assert sizes == [array.nbytes]


def make_boxes(*numbers: int) -> list[torch.Tensor]:
    return [torch.zeros(number, 4) for number in numbers]


@pytest.mark.parametrize(
    ("batches", "other_process"),
    [
        ([make_boxes(1), make_boxes(3)], False),
        ([make_boxes(2, 2), make_boxes(3, 5)], True),
        ([make_boxes(2, 3), make_boxes(2, 2)], False),
    ],
)
def test_the_first_batches_of_all_processes_decide_that_lists_have_an_entry_for_each_sample(
    monkeypatch: pytest.MonkeyPatch, batches: list[Any], other_process: bool
) -> None:
    monkeypatch.setattr(gathering, "all_gather_object", lambda found: [found, (other_process, False)])
    lists = SampleLists(lists_are_samples=None)
    assert all(isinstance(lists.mark(batch, len(batch)), SampleList) for batch in batches)


def test_lists_of_one_entry_with_one_row_are_joined_as_a_layer_at_the_end_unless_their_rows_differ() -> None:
    layers = SampleList([np.full((1, 3), number) for number in range(4)])
    (joined,) = gathering._join_layer(layers)
    assert joined.shape == (4, 3)
    boxes = SampleList([np.zeros((rows, 4)) for rows in (1, 3)])
    assert gathering._join_layer(boxes) is boxes


def test_samples_after_a_batch_that_looked_like_layers_are_refused_if_joined() -> None:
    for join in (True, False):
        lists = SampleLists(lists_are_samples=None, join=join)
        for entries in (make_boxes(2, 2), make_boxes(2, 2, 2), make_boxes(1, 1)):
            assert not isinstance(lists.mark(entries, len(entries[0])), SampleList)
        with pytest.raises(ValueError, match="per_device_eval_batch_size=1") if join else contextlib.nullcontext():
            lists.mark(make_boxes(3, 5), 2)
