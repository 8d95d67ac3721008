"""One of the processes in which scenarios run: `python -m tests.distributed.fidelity_process FOLDER RUN,RUN NAME ...`.

A run is one of `tests.fidelity.conftest.RUNS`; those of one side share the process, one after the other, so that its
imports are paid for once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.fidelity import runner
from tests.fidelity.conftest import RUNS


def main(folder: Path, runs: list[str], names: list[str]) -> None:
    start = Path.cwd()
    for run in runs:
        side, mode = RUNS[run]
        runner.main(side, mode, folder / run, names)
        os.chdir(start)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2].split(","), sys.argv[3:])
