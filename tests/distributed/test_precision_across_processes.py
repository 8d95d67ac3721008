"""Loss scaling in two processes: the numbers are the same as without, and all processes skip the same steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import precision_process
from tests.distributed.precision_process import LOGGED, MODES, OVERFLOW_STEP, SCALE, STRATEGIES
from tests.distributed.process_launch import run_once_in_processes

Results = list[dict[str, Any]]
all_runs = pytest.mark.parametrize("run", [f"{strategy} {mode}" for strategy in STRATEGIES for mode in MODES])


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Return the results of two processes."""
    return run_once_in_processes(tmp_path_factory, "loss-scaling", precision_process.__name__)[1]


@all_runs
def test_scaling_changes_neither_losses_nor_clipped_norms_nor_weights(results: Results, run: str) -> None:
    for result in results:
        scaled, plain = result[f"{run} scaled"], result["plain"]
        assert scaled["plugin"] == "ForwardMixedPrecision" and scaled["scale"] == SCALE
        for name in LOGGED:
            assert scaled["values"][name] == pytest.approx(plain["values"][name], abs=1e-6)
            assert len(scaled["values"][name]) == 5
    weights = results[0][f"{run} scaled"]["weights"]
    assert weights.keys() == results[0]["plain"]["weights"].keys()
    for name, expected in results[0]["plain"]["weights"].items():
        torch.testing.assert_close(weights[name], expected, rtol=0, atol=1e-6)
    # Each step is clipped, so that a scaled gradient would change it.
    assert min(results[0]["plain"]["values"]["grad_norm"]) > 0.5


@all_runs
def test_all_processes_skip_a_step_and_its_schedule_after_an_overflow_in_a_single_gradient(
    results: Results, run: str
) -> None:
    first, second = (result[f"{run} overflow"] for result in results)
    for result in (first, second):
        rates = result["values"]["learning_rate"]
        assert result["scale"] == SCALE / 2
        assert (
            rates[OVERFLOW_STEP] == rates[OVERFLOW_STEP + 1] and rates[0] > rates[1] and rates[2] > rates[3] > rates[4]
        )
        assert result["values"]["grad_norm"][OVERFLOW_STEP] == float("inf")
    assert first["values"] == second["values"]
    if run.startswith("DDP"):
        assert all(torch.equal(value, second["weights"][name]) for name, value in first["weights"].items())
    assert all(bool(value.isfinite().all()) for value in first["weights"].values())
    # Later losses differ from a training without skipped steps.
    assert (
        first["values"]["loss"][OVERFLOW_STEP + 1] != results[0][f"{run} scaled"]["values"]["loss"][OVERFLOW_STEP + 1]
    )


def test_scaling_sharded_and_replicated_gradients_is_refused(results: Results) -> None:
    for result in results:
        assert "fp16=True does not go with ignored_modules='norm' of fsdp_config" in result["refused"]
        assert result["refused"].endswith("Set bf16=True.")
