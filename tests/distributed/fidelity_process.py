"""Scenarios in a process of several: `python -m tests.distributed.fidelity_process FOLDER RUN,RUN`.

Runs are keys of `tests.fidelity.conftest.RUNS`. The runs of a side share the process, so that it imports once.
`FOLDER/plan.json` lists the scenarios of each run.
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
