"""The trainings of tests/gpu on simulated GPUs; kernels and profiled waits need real GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.conftest import both  # noqa: F401 (a fixture)
from tests.gpu.test_one_gpu import (  # noqa: F401 (collected here too)
    test_a_step_that_overflows_moves_the_learning_rate_of_a_fused_optimizer_alone,
    test_batches_are_complete_when_a_step_reads_them,
    test_further_evaluations_reserve_no_further_memory,
    test_the_curve_is_transformers,
    test_the_gpu_holds_no_more_than_with_transformers,
)
from tests.gpu.test_two_gpus import (  # noqa: F401 (collected here too)
    alone,
    test_losses_equal_those_of_a_single_gpu_and_the_full_model_is_saved,
)

SITE = Path(__file__).parent / "site"


@pytest.fixture(scope="module", autouse=True)
def simulated_gpus_of_processes() -> Iterator[None]:
    """Let each process that a test starts see simulated GPUs, as many as its CUDA_VISIBLE_DEVICES names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SIMULATED_GPUS", "2")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(SITE), os.environ.get("PYTHONPATH", "")]))
        yield
