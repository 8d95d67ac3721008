"""Comparisons of values, logs and weights detect differences."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from littrainer.callbacks.log_history import collect_logged_values
from littrainer.commands.differences import compute_weight_gaps, load_saved_weights
from tests.fidelity.first_difference import first_difference
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
    ("expected", "actual", "message"),
    [
        (0.1, math.nextafter(0.1, 1.0), "difference"),
        (1, 1.0, "int"),
        (math.nan, 1.0, "expected nan, got 1.0"),
        (np.array([None, [1.0]], dtype=object), np.array([None, [2.0]], dtype=object), "[1][0]: expected 1.0, got 2.0"),
        ({"loss": 1.0}, {"loss": 1.0, "extra": 2.0}, "surplus keys ['extra']"),
        ({"a": [1, {"b": 2.0}]}, {"a": [1, {"b": 3.0}]}, "['a'][1]['b']"),
        ([1, 2], [1, 2, 3], "surplus keys [2]"),
        ((1, 2), [1, 2], "tuple"),
        (torch.zeros(2), torch.tensor([0.0, 1e-45]), "1 of 2 entries differ"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), "float64"),
        (torch.zeros(2), torch.tensor([0.0, float("nan")]), "1 of 2 entries differ"),
        (torch.ones(1, dtype=torch.bfloat16), torch.ones(1), "expected torch.bfloat16(1,), got torch.float32(1,)"),
    ],
)
def test_a_difference_is_named_with_its_path(expected: Any, actual: Any, message: str) -> None:
    difference = first_difference(expected, actual)
    assert difference is not None and message in difference


def test_a_tolerance_allows_small_differences_of_floats_only() -> None:
    assert first_difference([1.0, torch.zeros(2)], [1.001, torch.full((2,), 0.001)], tolerance=0.01) is None
    assert first_difference([1.0], [1.1], tolerance=0.01) is not None
    assert first_difference(torch.zeros(1), torch.ones(1), tolerance=0.01) is not None


def test_measurements_are_compared_by_name_only() -> None:
    logs = {"train_runtime": 1.2, "before_init_mem_cpu": 7, "speed/save_seconds": 0.5, "loss": 0.5}
    assert (
        first_difference([logs], [{**logs, "train_runtime": 3.4, "before_init_mem_cpu": 8, "speed/save_seconds": 9.0}])
        is None
    )
    assert first_difference(logs, {"loss": 0.5}) is not None
    assert list(collect_logged_values([{**logs, "step": 3}])) == [(3, "loss")]


def test_gaps_of_complex_empty_and_nan_weights_are_computed() -> None:
    left = {"phase": torch.tensor([1j, 2.0]), "nothing": torch.empty(0), "mask": torch.tensor([math.nan, math.inf])}
    right = {
        "phase": torch.tensor([3j, 2.0]),
        "nothing": torch.empty(0, dtype=torch.bfloat16),
        "mask": left["mask"].double(),
    }
    assert compute_weight_gaps(left, right) == {"phase": 2.0, "nothing": 0.0, "mask": 0.0}
    assert compute_weight_gaps(left, {"phase": torch.zeros(3)}) == dict.fromkeys(left, math.inf)


def test_weights_of_several_adapters_are_loaded_and_non_tensors_are_skipped(tmp_path: Path) -> None:
    for folder in ("first", "second", "checkpoint-4"):
        (tmp_path / folder).mkdir()
        save_file({"layer": torch.ones(2)}, tmp_path / folder / "adapter_model.safetensors")
    assert list(load_saved_weights(tmp_path)) == ["first.layer", "second.layer"]
    save_file({"layer": torch.ones(2)}, tmp_path / "checkpoint-4" / "model.safetensors")
    torch.save({"extra": {"scale": 1}}, tmp_path / "checkpoint-4" / "littrainer_extra_state.pt")
    (tmp_path / "checkpoint-4" / "adapter_model.safetensors").unlink()
    assert list(load_saved_weights(tmp_path / "checkpoint-4")) == ["layer"]
