"""A scenario on a simulated GPU leaves what it leaves there with transformers' own Trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fidelity.scenarios import COMPARED, IN_BOTH_MODES, topic_of
from tests.fidelity.side import MODES
from tests.fidelity.test_fidelity import compare_records

# Trials of a search train on a GPU as other trainings do.
WITHOUT_GPU = ("search", "search_overrides")
# On a CPU each scenario is compared in both modes.
RUNS = [
    (name, mode)
    for name in COMPARED
    for mode in MODES
    if topic_of(name) not in WITHOUT_GPU and (mode == MODES[0] or topic_of(name) in IN_BOTH_MODES)
]


@pytest.mark.parametrize(("name", "mode"), RUNS)
def test_a_run_on_a_gpu_equals_that_of_transformers_trainer(runs_on_gpu: Path, name: str, mode: str) -> None:
    compare_records(runs_on_gpu, name, mode)
