"""Run scenarios with a side and write their records: `python -m tests.fidelity.runner SIDE MODE FOLDER [NAME ...]`.

SIDE is "transformers" or "littrainer", MODE "automatic" or "manual". Each scenario runs in a fresh working directory
with the same global random states; a scenario that raises has its traceback as its record.

With RANK and WORLD_SIZE in the environment this is one of several processes. They share the working directory, have a
new process group for each scenario, and write their records to `FOLDER/rank0`, `FOLDER/rank1` ...
"""

from __future__ import annotations

import importlib
import os
import pickle
import random
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch

from tests.fidelity.record import Record
from tests.fidelity.registry import Scenario
from tests.fidelity.scenarios import SCENARIOS
from tests.fidelity.side import ORACLE, OURS, Side
from tests.scenarios.once_per_process import leave_out_of_collections, leave_writing_to_the_system
from tests.scenarios.other_processes import process_group

START_SEED = 20
# A process whose peer failed gives up after this time; a peer on a busy machine may be slow.
MAX_WAIT = timedelta(seconds=300)
RANK, PROCESSES = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def seed_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def forget_previous_run(name: str) -> None:
    """Reset what transformers keeps between Trainers of a process."""
    if name == ORACLE:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def run_scenario(scenario: Scenario, name: str, mode: str, folder: Path) -> Record:
    """Run a scenario in `folder`, an empty directory that becomes the working directory."""
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


def main(name: str, mode: str, folder: Path, expected: list[str]) -> None:
    torch.set_num_threads(1)
    records = folder / f"rank{RANK}" if PROCESSES > 1 else folder
    records.mkdir(parents=True, exist_ok=True)
    leave_writing_to_the_system()
    _ = importlib.import_module(name).Trainer
    if name == OURS:
        # Loaded with the first Trainer otherwise, when it would be gone through in each collection.
        importlib.import_module("littrainer.lightning_adapter.run_lightning").import_lightning()
    left_out = 0
    # Reverse order exposes a scenario that depends on an earlier scenario.
    order = list(SCENARIOS) if "FIDELITY_REVERSED" not in os.environ else list(reversed(SCENARIOS))
    for scenario_name in order:
        if expected and scenario_name not in expected:
            continue
        start = time.perf_counter()
        # Models, searches and trackers are imported by the first scenarios that need them.
        if len(sys.modules) > left_out + 50:
            leave_out_of_collections()
            left_out = len(sys.modules)
        run_folder = folder / "runs" / scenario_name
        run_folder.mkdir(parents=True, exist_ok=PROCESSES > 1)
        # A failure does not end the other scenarios.
        with process_group(folder / f"{scenario_name}.meeting", RANK, PROCESSES, MAX_WAIT):
            record = run_scenario(SCENARIOS[scenario_name], name, mode, run_folder)
        (records / f"{scenario_name}.pickle").write_bytes(pickle.dumps(record))
        outcome = "raised" if record.error else "done"
        print(f"FIDELITY {scenario_name}: {outcome} in {time.perf_counter() - start:.2f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]).resolve(), sys.argv[4:])
