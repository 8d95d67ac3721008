"""Results, waits and memory of a training on a GPU, compared with transformers'."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from tests.data.test_packing import PACKED, ROWS, loss_and_weights
from tests.gpu.conftest import needs_gpus
from tests.gpu.trainings import PRECISIONS, STEPS
from tests.scenarios.data import Rows
from tests.scenarios.models import tiny_llama

pytestmark = needs_gpus(1)

# Beyond what transformers takes: what Lightning keeps for itself.
FURTHER_MEMORY_SHARE = 0.02


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_curve_is_transformers(both, precision: str) -> None:  # type: ignore[no-untyped-def]
    ours, theirs = both(precision)
    assert len(ours) == STEPS
    for own, other in zip(ours, theirs, strict=True):
        assert own == pytest.approx(other, abs=1e-6)


def test_a_step_that_overflows_moves_the_learning_rate_of_a_fused_optimizer_alone(both) -> None:  # type: ignore[no-untyped-def]
    ours, theirs = both("overflowing")
    rates = {optimizer: [log["learning_rate"] for log in logs] for optimizer, logs in ours.items()}
    assert rates == {optimizer: [log["learning_rate"] for log in logs] for optimizer, logs in theirs.items()}
    # The scaler calls a fused optimizer at each step: its kernel skips the update, and the schedule steps.
    assert rates["adamw_torch"][0] == rates["adamw_torch"][1]
    assert rates["adamw_torch_fused"][0] > rates["adamw_torch_fused"][1]


def test_the_gpu_holds_no_more_than_with_transformers(both) -> None:  # type: ignore[no-untyped-def]
    ours, theirs = both("peak memory")
    assert 0 < ours <= theirs * (1 + FURTHER_MEMORY_SHARE)


def test_batches_are_complete_when_a_step_reads_them(both) -> None:  # type: ignore[no-untyped-def]
    ours, theirs = both("batches")
    for non_blocking in (False, True):
        assert ours[non_blocking]["devices"] == ["cuda"]
        assert ours[non_blocking]["batches"] == theirs[non_blocking]["batches"]


def test_nothing_waits_for_the_gpu_in_a_step_without_a_log_nor_where_the_next_batches_are_drawn(both) -> None:  # type: ignore[no-untyped-def]
    ours, _ = both("waits in whole steps")
    assert len(ours["steps"]) == 2
    assert ours["waits"] == []


def test_further_evaluations_reserve_no_further_memory(both) -> None:  # type: ignore[no-untyped-def]
    (few, many), _ = both("memory reserved by evaluations")
    assert 0 < many == few


@pytest.mark.parametrize("attention", ["flex_attention", "flash_attention_2"])
def test_loss_and_gradients_of_packed_documents_equal_those_of_single_documents(tmp_path: Path, attention: str) -> None:
    is_flash = attention == "flash_attention_2"
    if is_flash:
        pytest.importorskip("flash_attn")
    # Both take heads of 16 numbers or more.
    make = functools.partial(tiny_llama, hidden_size=64, num_attention_heads=4, num_key_value_heads=4)
    apart, packed = (
        loss_and_weights(tmp_path, Rows(ROWS), make, attention, bf16=is_flash, **changes) for changes in ({}, PACKED)
    )
    rounding = 1e-2 if is_flash else 1e-5
    torch.testing.assert_close(packed, apart, rtol=rounding, atol=rounding)
