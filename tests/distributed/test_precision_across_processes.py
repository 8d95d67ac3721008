"""Loss scaling in two processes: the same numbers as without, and a step that one leaves out all leave out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import precision_process
from tests.distributed.precision_process import BROKEN_STEP, LOGGED, MODES, SCALE, STRATEGIES
from tests.distributed.together import run_once_in_processes

Found = list[dict[str, Any]]
each_way = pytest.mark.parametrize("way", [f"{strategy} {mode}" for strategy in STRATEGIES for mode in MODES])


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each of two processes finds; they are started once for all tests."""
    return run_once_in_processes(tmp_path_factory, "scaling-together", precision_process.__name__)[1]


@each_way
def test_scaling_changes_neither_losses_nor_clipped_norms_nor_weights(found: Found, way: str) -> None:
    for one in found:
        scaled, plain = one[f"{way} scaled"], one["plain"]
        assert scaled["plugin"] == "ForwardMixedPrecision" and scaled["scale"] == SCALE
        for name in LOGGED:
            assert scaled["values"][name] == pytest.approx(plain["values"][name], abs=1e-6)
            assert len(scaled["values"][name]) == 5
    weights = found[0][f"{way} scaled"]["weights"]
    assert weights.keys() == found[0]["plain"]["weights"].keys()
    for name, expected in found[0]["plain"]["weights"].items():
        torch.testing.assert_close(weights[name], expected, rtol=0, atol=1e-6)
    # Each step was clipped, so that a gradient that was still scaled would show.
    assert min(found[0]["plain"]["values"]["grad_norm"]) > 0.5


@each_way
def test_a_gradient_that_overflows_in_one_place_lets_all_leave_the_step_and_its_schedule_out(
    found: Found, way: str
) -> None:
    first, second = (one[f"{way} broken"] for one in found)
    for one in (first, second):
        rates = one["values"]["learning_rate"]
        assert one["scale"] == SCALE / 2
        assert rates[BROKEN_STEP] == rates[BROKEN_STEP + 1] and rates[0] > rates[1] and rates[2] > rates[3] > rates[4]
        assert one["values"]["grad_norm"][BROKEN_STEP] == float("inf")
    assert first["values"] == second["values"]
    if way.startswith("DDP"):
        assert all(torch.equal(value, second["weights"][name]) for name, value in first["weights"].items())
    assert all(bool(value.isfinite().all()) for value in first["weights"].values())
    # What both learn afterwards differs from the training in which no step is left out.
    assert first["values"]["loss"][BROKEN_STEP + 1] != found[0][f"{way} scaled"]["values"]["loss"][BROKEN_STEP + 1]


def test_gradients_that_are_split_and_whole_ones_are_not_scaled_at_once(found: Found) -> None:
    for one in found:
        assert "fp16=True does not go with ignored_modules='norm' of fsdp_config" in one["refused"]
        assert one["refused"].endswith("Set bf16=True.")
