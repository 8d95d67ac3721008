from __future__ import annotations

from collections import OrderedDict
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers.modeling_outputs import TokenClassifierOutput
from transformers.trainer_pt_utils import nested_concat, nested_truncate

from littrainer.runtime.nested_values import concat_nested, convert_to_numpy, detach_nested, map_nested, truncate_nested
from tests.scenarios.nested import described, filled


class Pair(NamedTuple):
    left: Any
    right: Any


PIECES: dict[str, list[Any]] = {
    "rows": [filled(3), filled(2)],
    "single numbers": [torch.tensor(1.0), torch.tensor(2.0)],
    "wider later": [filled(2, 3), filled(1, 5), filled(2, 4)],
    "arrays": [np.ones((2, 3)), np.zeros((1, 4)), np.ones((2, 2))],
    "arrays of single numbers": [np.array(1.0), np.array(2.0)],
    "tuples": [(filled(2), [filled(2, 2)]), (filled(1), [filled(1, 3)])],
    "mappings": [{"a": filled(2), "b": (filled(1, 2),)}, {"a": filled(1), "b": (filled(1, 3),)}],
}


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES.keys())
def test_pieces_are_joined_and_padded_as_transformers_joins_them(pieces: list[Any]) -> None:
    assert described(concat_nested(pieces)) == described(reduce(nested_concat, pieces))


def test_pieces_that_cannot_be_joined_are_refused_with_their_kinds_and_a_way_out() -> None:
    with pytest.raises(TypeError, match="Outputs of type str"):
        concat_nested(["a", "b"])
    with pytest.raises(TypeError, match=r"Tensor, tuple.*eval_do_concat_batches=False"):
        concat_nested([(filled(1),), filled(1)])


def test_a_function_reaches_each_leaf_and_the_structure_keeps_its_types() -> None:
    output = TokenClassifierOutput(logits=filled(2, 2).requires_grad_())
    assert type(detach_nested(output)) is TokenClassifierOutput and not detach_nested(output).logits.requires_grad
    nested = [OrderedDict(a=1, b=(2, [3])), Pair(4, {"c": 5})]
    mapped = map_nested(lambda leaf: leaf * 10, nested)
    assert mapped == [OrderedDict(a=10, b=(20, [30])), Pair(40, {"c": 50})]
    assert type(mapped[0]) is OrderedDict and type(mapped[1]) is Pair


def test_rows_beyond_a_length_are_cut_off_as_transformers_cuts_them() -> None:
    nested = (filled(4), {"a": filled(4, 2)}, [filled(1, 3)])
    assert described(truncate_nested(nested, 2)) == described(nested_truncate(nested, 2))
    assert truncate_nested({"loss": torch.tensor(1.0), "names": "ab"}, 1) == {"loss": torch.tensor(1.0), "names": "ab"}


def test_arrays_keep_their_precision_but_for_one_that_numpy_does_not_know() -> None:
    arrays = convert_to_numpy([torch.ones(1, dtype=kind) for kind in (torch.float16, torch.bfloat16, torch.int64)])
    assert [array.dtype for array in arrays] == [np.float16, np.float32, np.int64]


@pytest.mark.parametrize("pieces", [[filled(1, 2, 3), filled(1, 2, 4)], [filled(1, 2), filled(1)]])
def test_batches_of_shapes_that_fit_into_no_array_are_refused_with_both(pieces: list[torch.Tensor]) -> None:
    with pytest.raises(ValueError) as caught:
        concat_nested(pieces)
    assert all(str(tuple(piece.shape)) in str(caught.value) for piece in pieces)
