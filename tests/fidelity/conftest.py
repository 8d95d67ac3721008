"""Runs every selected scenario once per side and session, before the first comparison."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fidelity.scenarios import QUICK
from tests.fidelity.side import MODES, ORACLE, OURS
from tests.left_out import leave_out
from tests.scenarios.once_per_session import run_once

ROOT = Path(__file__).resolve().parents[2]

NO_CALL = SimpleNamespace(params={})

MAX_RUN_SECONDS = 900

RUNS: dict[str, tuple[str, str]] = {ORACLE: (ORACLE, "automatic"), **{mode: (OURS, mode) for mode in MODES}}
"""Folder name -> side and mode of each process."""


def environment_of_runs() -> dict[str, str]:
    """Return an environment with one thread, no network, no accelerator, this package and no seed of a test."""
    package = importlib.util.find_spec(OURS)
    assert package is not None and package.origin is not None
    paths = [str(ROOT), str(Path(package.origin).parents[1]), os.environ.get("PYTHONPATH", "")]
    # `seed_everything` leaves its seed there, which Lightning's strategies for several processes set again.
    retained = {name: value for name, value in os.environ.items() if name not in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")}
    return {
        **retained,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def run_all(folder: Path, expected: dict[str, list[str]], environment: dict[str, str] | None = None) -> None:
    """Run the scenarios that each side has, all sides at once.

    Parameters:
        environment: variables of the processes on top of `environment_of_runs`.
    """
    processes = []
    for run, names in expected.items():
        (folder / run).mkdir(parents=True)
        if not names:
            continue
        side, mode = RUNS[run]
        with (folder / run / "log").open("w") as log:
            command = [sys.executable, "-m", "tests.fidelity.runner", side, mode, str(folder / run), *names]
            variables = {**environment_of_runs(), **(environment or {})}
            processes.append(subprocess.Popen(command, cwd=ROOT, env=variables, stdout=log, stderr=subprocess.STDOUT))
    for process in processes:
        try:
            process.wait(MAX_RUN_SECONDS)
        except subprocess.TimeoutExpired:
            # The scenarios that were done have their records; the others fail by name.
            process.kill()
            process.wait()


def needs_a_run(item: Any, fixture: str = "runs") -> bool:
    """Return whether a collected test compares the records of a scenario."""
    name = getattr(item, "callspec", NO_CALL).params.get("name")
    # Parametrization over an empty table yields a test whose parameter is no name.
    return fixture in getattr(item, "fixturenames", ()) and isinstance(name, str)


def select_runs(items: list[Any], fixture: str = "runs") -> dict[str, list[str]]:
    """Return the scenarios of each entry of `RUNS` that the collected tests with a fixture compare."""
    params = [item.callspec.params for item in items if needs_a_run(item, fixture)]
    expected = {run: sorted({each["name"] for each in params if each.get("mode", MODES[0]) == run}) for run in MODES}
    return {**expected, ORACLE: sorted({each["name"] for each in params})}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave all but the first scenario of each topic out of `make test`."""

    def is_left_out(item: Any) -> bool:
        params = item.callspec.params if needs_a_run(item) else None
        return params is not None and (params["name"], params.get("mode", MODES[0])) not in QUICK

    if config.getoption("--quick"):
        leave_out(config, items, is_left_out)


@pytest.fixture(scope="session")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with a folder of records for each entry of `RUNS`."""
    expected = select_runs(request.session.items)
    return run_once(tmp_path_factory, "fidelity", lambda folder: run_all(folder, expected))
