"""Comparisons of values, logs and weights notice what they are there to notice."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from littrainer.commands.differences import first_difference
from tests.fidelity.record import plain


@pytest.mark.parametrize(
    "value",
    [
        1.5,
        float("nan"),
        [1, (2.0, "three", None)],
        {"loss": float("nan"), "weights": torch.tensor([1.0, float("nan")])},
        np.array([[1, 2], [3, 4]]),
        torch.ones(2, dtype=torch.bfloat16),
    ],
)
def test_a_value_equals_itself(value: Any) -> None:
    assert first_difference(value, plain(value)) is None


@pytest.mark.parametrize(
    ("expected", "actual", "words"),
    [
        (0.1, math.nextafter(0.1, 1.0), "difference"),
        (1, 1.0, "int"),
        (True, 1, "bool"),
        (None, 0.0, "NoneType"),
        ({"loss": 1.0}, {"loss": 1.0, "extra": 2.0}, "surplus keys ['extra']"),
        ({"loss": 1.0}, {}, "missing keys ['loss']"),
        ({"a": [1, {"b": 2.0}]}, {"a": [1, {"b": 3.0}]}, "['a'][1]['b']"),
        ([1, 2], [1, 2, 3], "first surplus entry: 3"),
        ((1, 2), [1, 2], "tuple"),
        (torch.zeros(2), torch.tensor([0.0, 1e-45]), "1 of 2 entries differ"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), "float64"),
        (torch.zeros(2), torch.zeros(2, 1), "(2, 1)"),
        (torch.zeros(2), torch.tensor([0.0, float("nan")]), "1 of 2 entries differ"),
        (np.array([1, 2]), np.array([1, 3]), "1 of 2 entries differ"),
        (torch.ones(1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16), "1 of 1"),
    ],
)
def test_a_difference_is_named_with_its_place(expected: Any, actual: Any, words: str) -> None:
    difference = first_difference(expected, actual)
    assert difference is not None and words in difference


def test_a_tolerance_lets_small_differences_of_floats_pass_and_no_others() -> None:
    assert first_difference([1.0, torch.zeros(2)], [1.001, torch.full((2,), 0.001)], tolerance=0.01) is None
    assert first_difference([1.0], [1.1], tolerance=0.01) is not None
    assert first_difference(torch.zeros(1), torch.ones(1), tolerance=0.01) is not None


def test_wall_times_keep_their_key_and_lose_their_value() -> None:
    logs = {"train_runtime": 1.2, "train_steps_per_second": 3.0, "loss": 0.5}
    assert plain(logs) == {"train_runtime": "<seconds>", "train_steps_per_second": "<seconds>", "loss": 0.5}
