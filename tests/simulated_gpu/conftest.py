"""Starts processes with simulated GPUs, and runs the fidelity scenarios on them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.fidelity.conftest import environment_of_runs, needs_a_run, run_all, select_runs
from tests.fidelity.scenarios import QUICK
from tests.fidelity.side import MODES
from tests.left_out import leave_out
from tests.scenarios.once_per_session import run_once
from tests.simulated_gpu.build import build_extension, reason_to_skip

HERE = Path(__file__).parent

# `make test` compares the first scenario of as many topics.
MAX_QUICK_SCENARIOS = 20


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave a sample of the scenarios to `make test`."""
    sample = sorted(name for name, mode in QUICK if mode == MODES[0])[:MAX_QUICK_SCENARIOS]

    def is_left_out(item: Any) -> bool:
        params = item.callspec.params if needs_a_run(item, "runs_on_gpu") else None
        return params is not None and (params["mode"] != MODES[0] or params["name"] not in sample)

    if config.getoption("--quick"):
        leave_out(config, items, is_left_out)


def simulated_environment(num_devices: int = 1) -> dict[str, str]:
    """Return the environment of a process that sees `num_devices` simulated GPUs."""
    environment = environment_of_runs()
    return {
        **environment,
        "SIMULATED_GPUS": str(num_devices),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(num_devices))),
        "PYTHONPATH": os.pathsep.join([str(HERE / "site"), environment["PYTHONPATH"]]),
    }


@pytest.fixture(scope="session", autouse=True)
def simulated_gpu() -> None:
    """Build the extension before the first test, or skip all of them and say why."""
    reason = reason_to_skip()
    if reason:
        pytest.skip(reason)
    build_extension()


@pytest.fixture(scope="session")
def runs_on_gpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the records of each side and mode on a simulated GPU."""
    expected = select_runs(request.session.items, "runs_on_gpu")
    return run_once(
        tmp_path_factory,
        "fidelity_on_simulated_gpu",
        lambda folder: run_all(folder, expected, simulated_environment()),
    )
