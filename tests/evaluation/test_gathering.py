from __future__ import annotations

import weakref
from collections import OrderedDict
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers.modeling_outputs import TokenClassifierOutput
from transformers.trainer_pt_utils import EvalLoopContainer, nested_concat, nested_truncate

from littrainer.evaluation import gathering
from littrainer.evaluation.gathering import BatchCollection, as_numpy, concatenated, detached, map_nested, truncated


class Pair(NamedTuple):
    left: Any
    right: Any


def described(value: Any) -> Any:
    """Nested arrays or tensors as types, dtypes and values."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return type(value).__name__, str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return type(value).__name__, {name: described(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [described(item) for item in value]
    return value


def filled(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(int(np.prod(shape)), dtype=dtype).reshape(shape)


PIECES: dict[str, list[Any]] = {
    "rows": [filled(3), filled(2)],
    "single numbers": [torch.tensor(1.0), torch.tensor(2.0)],
    "equal widths": [filled(2, 3), filled(1, 3)],
    "wider later": [filled(2, 3), filled(1, 5), filled(2, 4)],
    "narrower later": [filled(2, 5, 2), filled(3, 2, 2)],
    "whole numbers": [filled(1, 2, dtype=torch.int64), filled(1, 3, dtype=torch.int64)],
    "half precision": [filled(1, 2).to(torch.bfloat16), filled(1, 3).to(torch.bfloat16)],
    "arrays": [np.ones((2, 3)), np.zeros((1, 4)), np.ones((2, 2))],
    "arrays of single numbers": [np.array(1.0), np.array(2.0)],
    "whole arrays": [np.ones((1, 2), dtype=np.int32), np.zeros((1, 3), dtype=np.int32)],
    "tuples": [(filled(2), [filled(2, 2)]), (filled(1), [filled(1, 3)])],
    "mappings": [{"a": filled(2), "b": (filled(1, 2),)}, {"a": filled(1), "b": (filled(1, 3),)}],
    "ordered mappings": [OrderedDict(a=filled(2)), OrderedDict(a=filled(1))],
    "one piece": [{"a": filled(2)}],
}


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES.keys())
def test_pieces_are_joined_and_padded_as_transformers_joins_them(pieces: list[Any]) -> None:
    assert described(concatenated(pieces)) == described(reduce(nested_concat, pieces))


def test_joining_leaves_the_pieces_as_they_are() -> None:
    pieces = [filled(1, 2), filled(1, 3)]
    concatenated(pieces)
    assert [piece.shape[1] for piece in pieces] == [2, 3]


def test_pieces_of_different_kinds_are_refused_with_the_kinds_and_a_way_out() -> None:
    with pytest.raises(TypeError, match=r"Tensor, tuple.*eval_do_concat_batches=False"):
        concatenated([(filled(1),), filled(1)])


def test_tuples_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        concatenated([(filled(1), filled(1)), (filled(1),)])


def test_outputs_that_are_no_tensors_are_refused_by_type() -> None:
    with pytest.raises(TypeError, match="str"):
        concatenated(["a", "b"])


def test_a_function_reaches_each_leaf_and_the_structure_keeps_its_types() -> None:
    nested = [OrderedDict(a=1, b=(2, [3])), Pair(4, {"c": 5})]
    mapped = map_nested(lambda leaf: leaf * 10, nested)
    assert mapped == [OrderedDict(a=10, b=(20, [30])), Pair(40, {"c": 50})]
    assert type(mapped[0]) is OrderedDict and type(mapped[1]) is Pair


def test_a_model_output_of_transformers_keeps_its_type() -> None:
    output = TokenClassifierOutput(logits=filled(2, 2).requires_grad_())
    assert type(detached(output)) is TokenClassifierOutput
    assert not detached(output).logits.requires_grad


def test_detaching_leaves_what_is_no_tensor_as_it_is() -> None:
    assert detached({"a": None, "b": "text", "c": [1]}) == {"a": None, "b": "text", "c": [1]}


def test_rows_beyond_a_length_are_cut_off_as_transformers_cuts_them() -> None:
    nested = (filled(4), {"a": filled(4, 2)}, [filled(1, 3)])
    assert described(truncated(nested, 2)) == described(nested_truncate(nested, 2))


def test_numbers_without_rows_are_not_cut_off() -> None:
    assert truncated({"loss": torch.tensor(1.0), "names": "ab"}, 1) == {"loss": torch.tensor(1.0), "names": "ab"}


def test_arrays_keep_their_precision_but_for_one_that_numpy_does_not_know() -> None:
    arrays = as_numpy([torch.ones(1, dtype=kind) for kind in (torch.float16, torch.bfloat16, torch.int64)])
    assert [array.dtype for array in arrays] == [np.float16, np.float32, np.int64]


@pytest.mark.parametrize("join", [True, False])
@pytest.mark.parametrize("moved_after", [(), (0,), (0, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("stretch_bytes", [1, 30, 1000])
def test_a_collection_gives_the_arrays_of_transformers_container(
    monkeypatch: pytest.MonkeyPatch, join: bool, moved_after: tuple[int, ...], stretch_bytes: int
) -> None:
    monkeypatch.setattr(gathering, "STRETCH_BYTES", stretch_bytes)
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


def test_large_tensors_of_the_host_are_written_into_the_joined_array_when_they_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gathering, "STRETCH_BYTES", 20)
    collection = BatchCollection(expected_rows=4)
    first = filled(2, 3)
    collection.add(first)
    first.fill_(7)
    collection.add(filled(2, 3))
    assert collection.arrays().tolist() == [*filled(2, 3).tolist()] * 2


def test_tensors_of_a_device_wait_until_they_are_moved_and_are_let_go_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gathering, "STRETCH_BYTES", 1)
    monkeypatch.setattr(gathering, "_held_bytes_and_place", lambda batch: (batch.nbytes, False))
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
    for is_on_host in (True, False):
        monkeypatch.setattr(gathering, "STRETCH_BYTES", 10_000)
        if not is_on_host:
            monkeypatch.setattr(gathering, "_held_bytes_and_place", lambda batch: (120, False))
        collection = BatchCollection()
        collection.add((part,) if nested else part)
        held = [batch[0] if nested else batch for batch in collection._waiting]
        assert [tensor.untyped_storage().nbytes() for tensor in held] == ([] if is_on_host else [part.nbytes])
        found = collection.arrays()
        assert (found[0] if nested else found).tolist() == part.tolist()


@pytest.mark.parametrize("stretch_bytes", [1, 1000])
@pytest.mark.parametrize(
    ("batch", "kinds"), [(((filled(1),), {"a": filled(1)}), "Tensor, tuple"), ([filled(1), {"a": filled(1)}], "list")]
)
def test_batches_of_another_structure_are_refused(
    monkeypatch: pytest.MonkeyPatch, stretch_bytes: int, batch: Any, kinds: str
) -> None:
    monkeypatch.setattr(gathering, "STRETCH_BYTES", stretch_bytes)
    collection = BatchCollection()
    collection.add((filled(1), {"a": filled(1)}))
    with pytest.raises(TypeError, match=rf"{kinds}.*eval_do_concat_batches=False"):
        collection.add(batch)
        collection.arrays()


@pytest.mark.parametrize("pieces", [[filled(1, 2, 3), filled(1, 2, 4)], [filled(1, 2), filled(1)]])
def test_batches_of_shapes_that_fit_into_no_array_are_refused_with_both(pieces: list[torch.Tensor]) -> None:
    with pytest.raises(ValueError) as caught:
        concatenated(pieces)
    assert all(str(tuple(piece.shape)) in str(caught.value) for piece in pieces)


def test_arrays_and_tensors_of_a_batch_are_collected_side_by_side() -> None:
    collection = BatchCollection()
    for width in (1, 2):
        collection.add({"tensor": filled(1, width), "array": np.ones((1, width), dtype=np.int32)})
    arrays = collection.arrays()
    assert arrays["tensor"].tolist() == [[0, -100], [0, 1]]
    assert arrays["array"].tolist() == [[1, -100], [1, 1]] and arrays["array"].dtype == np.int32
