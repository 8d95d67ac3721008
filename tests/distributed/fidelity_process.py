"""One of the processes in which scenarios run: `python -m tests.distributed.fidelity_process FOLDER RUN,RUN`.

A run is one of `tests.fidelity.conftest.RUNS`; those of one side share the process, one after the other, so that its
imports are paid for once. Which scenarios each of them has is in `FOLDER/plan.json`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.fidelity import runner
from tests.fidelity.conftest import RUNS
from tests.scenarios.other_processes import end_process

PLAN = "plan.json"


def main(folder: Path, runs: list[str]) -> None:
    start, plan = Path.cwd(), json.loads((folder / PLAN).read_text())
    for run in runs:
        side, mode = RUNS[run]
        runner.main(side, mode, folder / run, plan[run])
        os.chdir(start)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2].split(","))
    end_process()
