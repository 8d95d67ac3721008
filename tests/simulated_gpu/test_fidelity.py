"""Every scenario on a simulated GPU leaves what it leaves there with transformers' own Trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fidelity.scenarios import COMPARED
from tests.fidelity.side import MODES
from tests.fidelity.test_fidelity import compare_records

CANNOT_RUN: dict[str, str] = {}
"""Scenarios that the simulated GPU cannot run -> the reason."""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [name for name in COMPARED if name not in CANNOT_RUN])
def test_a_run_on_a_gpu_equals_that_of_transformers_trainer(runs_on_gpu: Path, name: str, mode: str) -> None:
    compare_records(runs_on_gpu, name, mode)
