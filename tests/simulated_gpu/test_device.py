"""The simulated device raises, waits and allocates as a CUDA device does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.simulated_gpu.conftest import simulated_environment
from tests.simulated_gpu.device_facts import gather_facts, leave_a_backward_pass_running
from tests.simulated_gpu.run import run_on_gpu


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_on_gpu(gather_facts, tmp_path_factory.mktemp("facts"), simulated_environment(2))


def test_both_devices_are_visible(facts: dict[str, Any]) -> None:
    assert facts["devices"] == [2, "Simulated H100", "cuda:0", "cuda:1"]


@pytest.mark.parametrize(
    ("name", "part"),
    {
        "cpu and cuda": "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu",
        "two gpus": "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cuda:1",
        "numpy": "can't convert cuda:0 device type tensor to numpy",
        "generator": "Expected a 'cuda' device type for generator",
        "no such device": "invalid device ordinal",
        "memory": "CUDA out of memory",
    }.items(),
)
def test_a_mistake_raises_what_cuda_raises(facts: dict[str, Any], name: str, part: str) -> None:
    assert part in facts["errors"][name]


def test_a_tensor_of_the_cpu_without_dimensions_may_be_an_operand(facts: dict[str, Any]) -> None:
    assert facts["scalar of the cpu"] == 32.0


def test_waits_are_counted_where_the_host_reads_from_the_device(facts: dict[str, Any]) -> None:
    once = ("item", "cpu", "to the device", "boolean index")
    assert facts["waits"] == {"matmul": 0, **dict.fromkeys(once, 1), "to pinned memory": 0}


def test_a_copy_that_is_not_waited_for_has_not_arrived(facts: dict[str, Any]) -> None:
    assert facts["before synchronization"] and facts["after synchronization"] == 16.0


def test_memory_is_accounted_for(facts: dict[str, Any]) -> None:
    assert (facts["allocated"], facts["freed"]) == (4096, 0)


def test_the_device_has_a_separate_generator_that_repeats_its_draws(facts: dict[str, Any]) -> None:
    assert facts["draws repeat"] and facts["cpu draws are separate"]


def test_a_forked_process_cannot_use_the_device(facts: dict[str, Any]) -> None:
    assert facts["forked"] == 0


def test_a_process_that_ends_during_a_backward_pass_is_not_aborted(tmp_path: Path) -> None:
    run_on_gpu(leave_a_backward_pass_running, tmp_path, simulated_environment())
