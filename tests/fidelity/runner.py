"""Run scenarios with one side and write their records: `python -m tests.fidelity.runner SIDE MODE FOLDER [NAME ...]`.

SIDE is "transformers" or "littrainer", MODE "automatic" or "manual". Each scenario runs in a fresh working directory
with the global random generators at the same place; one that raises leaves its traceback as its record.
"""

from __future__ import annotations

import os
import pickle
import random
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import torch

from tests.fidelity.record import Record
from tests.fidelity.registry import Scenario
from tests.fidelity.scenarios import SCENARIOS
from tests.fidelity.side import ORACLE, Side

START_SEED = 20


def seed_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def forget_previous_run(name: str) -> None:
    """Reset what transformers' side keeps from one Trainer to the next in a process."""
    if name == ORACLE:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def run_scenario(scenario: Scenario, name: str, mode: str, folder: Path) -> Record:
    """Run one scenario in `folder`, an empty directory that becomes the working directory."""
    os.chdir(folder)
    forget_previous_run(name)
    try:
        side = Side(name, mode, folder)
        seed_generators(START_SEED)
        record = scenario.run(side)
        foreign = side.foreign_modules()
        if foreign:
            return Record(error=f"this side's process has imported {', '.join(foreign)}: the sides are not apart")
        return record
    except Exception:
        return Record(error=traceback.format_exc())


def main(name: str, mode: str, folder: Path, wanted: list[str]) -> None:
    torch.set_num_threads(1)
    # In reverse order a scenario that leans on an earlier one gives itself away.
    order = list(SCENARIOS) if "FIDELITY_REVERSED" not in os.environ else list(reversed(SCENARIOS))
    for scenario_name in order:
        if wanted and scenario_name not in wanted:
            continue
        start = time.perf_counter()
        run_folder = folder / "runs" / scenario_name
        run_folder.mkdir(parents=True)
        record = run_scenario(SCENARIOS[scenario_name], name, mode, run_folder)
        (folder / f"{scenario_name}.pickle").write_bytes(pickle.dumps(record))
        outcome = "raised" if record.error else "done"
        print(f"FIDELITY {scenario_name}: {outcome} in {time.perf_counter() - start:.2f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]).resolve(), sys.argv[4:])
