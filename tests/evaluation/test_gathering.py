from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from transformers.trainer_pt_utils import EvalLoopContainer

from littrainer.evaluation import gathering
from littrainer.evaluation.gathering import BatchCollection
from tests.scenarios.nested import described, filled


@pytest.mark.parametrize("join", [True, False])
@pytest.mark.parametrize("moved_after", [(), (0,), (0, 1), (1, 2)], ids=str)
def test_a_collection_gives_the_arrays_of_transformers_container(join: bool, moved_after: tuple[int, ...]) -> None:
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


@pytest.mark.parametrize("join", [True, False])
def test_a_collection_of_nothing_gives_nothing(join: bool) -> None:
    collection = BatchCollection(join)
    collection.move_to_host()
    assert collection.arrays() is None


@pytest.mark.parametrize("join", [True, False])
def test_a_collection_on_the_host_holds_no_tensor(join: bool) -> None:
    collection = BatchCollection(join)
    batch = filled(2)
    tensor = weakref.ref(batch)
    collection.add(batch)
    collection.move_to_host()
    assert collection.arrays() is not None
    del batch
    # An array of a batch that is kept by itself shares the tensor's memory, and the tensor is gone all the same.
    assert tensor() is None


def test_tensors_of_the_host_are_written_into_the_joined_array_when_they_come() -> None:
    collection = BatchCollection(expected_rows=4)
    first = filled(2, 3)
    collection.add(first)
    first.fill_(7)
    collection.add(filled(2, 3))
    assert collection.arrays().tolist() == [*filled(2, 3).tolist()] * 2


def test_tensors_of_a_device_wait_until_they_are_moved_and_are_let_go_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gathering, "_is_on_host", lambda batch: False)
    batches = [filled(2, 3) for _ in range(4)]
    waiting = [weakref.ref(batch) for batch in batches]
    alive_at_each_write: list[int] = []
    write = gathering.HostRows.write

    def counting(rows: Any, piece: torch.Tensor) -> None:
        alive_at_each_write.append(sum(batch() is not None for batch in waiting))
        write(rows, piece)

    monkeypatch.setattr(gathering.HostRows, "write", counting)
    collection = BatchCollection(expected_rows=8)
    while batches:
        collection.add(batches.pop(0))
    assert alive_at_each_write == []
    collection.move_to_host()
    assert alive_at_each_write == [4, 3, 2, 1]
    assert collection.arrays().tolist() == filled(2, 3).tolist() * 4


@pytest.mark.parametrize("nested", [False, True])
def test_a_part_of_a_large_tensor_does_not_keep_the_rest_of_it(monkeypatch: pytest.MonkeyPatch, nested: bool) -> None:
    part = filled(100, 30)[:1]
    monkeypatch.setattr(gathering, "_is_on_host", lambda batch: False)
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


def test_arrays_and_tensors_of_a_batch_are_collected_side_by_side() -> None:
    collection = BatchCollection()
    for width in (1, 2):
        collection.add({"tensor": filled(1, width), "array": np.ones((1, width), dtype=np.int32)})
    arrays = collection.arrays()
    assert arrays["tensor"].tolist() == [[0, -100], [0, 1]]
    assert arrays["array"].tolist() == [[1, -100], [1, 1]] and arrays["array"].dtype == np.int32
