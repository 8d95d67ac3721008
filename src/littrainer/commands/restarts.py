"""What `littrainer run --restarts` starts after a failure: the same again, in fewer processes, or nothing."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from littrainer.distributed.environment import TRAININGS
from littrainer.distributed.launcher import Failure, Launch


class Restarts:
    """Decides after each failure; called by `run_processes`.

    A process that fails twice without a checkpoint in between lacks something, as a device that has failed: fewer go
    on, if that is allowed. Else an exception that came before, with the same message at the same optimizer step, would
    come again.

    Parameters:
        launch: what is started first.
    """

    def __init__(self, launch: Launch):
        self._launch = launch
        self._used = 0
        self._errors: set[tuple[str, int | None]] = set()
        self._before: tuple[Failure, list[Any]] | None = None

    def __call__(self, failure: Failure) -> Launch | None:
        if not self._launch.is_watched:
            return None
        run_dirs = self._run_dirs()
        self._keep_stacks(failure, run_dirs)
        fewer = self._launch.reduced_devices if self._failed_again(failure, run_dirs) else None
        came_before = bool(failure.error) and (failure.error, failure.step) in self._errors
        self._errors.add((failure.error, failure.step))
        if came_before and fewer is None:
            _say("the same error has come at the same step before and would come again: nothing is started again")
            return None
        if self._used == self._launch.restarts:
            if self._used:
                _say(f"all {self._used} restarts are used up")
            return None
        self._used += 1
        self._launch = replace(self._launch, devices=fewer or self._launch.devices)
        processes = "1 process" if self._launch.devices == 1 else f"{self._launch.devices} processes"
        _say(f"restart {self._used} of {self._launch.restarts}, in {processes}, from the newest checkpoint")
        return self._launch

    def _failed_again(self, failure: Failure, run_dirs: list[str]) -> bool:
        """Return whether the same process failed last, or any was killed twice, with no new checkpoint since."""
        # Imported here, since it loads torch.
        from littrainer.checkpoint.distributed_resume import identify_checkpoints

        before, self._before = self._before, (failure, [identify_checkpoints(folder) for folder in run_dirs])
        if before is None or before[1] != self._before[1]:
            return False
        return failure.rank == before[0].rank or (failure.was_killed and before[0].was_killed)

    def _run_dirs(self) -> list[str]:
        """Return the folders in which trainings have begun, the last one last."""
        with suppress(OSError, ValueError, KeyError):
            trainings = json.loads(Path(os.environ[TRAININGS]).read_text("utf-8"))
            return [folder for folders in trainings.values() for folder in folders]
        return []

    def _keep_stacks(self, failure: Failure, run_dirs: list[str]) -> None:
        from littrainer.checkpoint.layout import STACKS_NAME

        when = time.strftime("%Y-%m-%d %H:%M:%S")
        for folder in [*reversed(run_dirs), os.getcwd(), tempfile.gettempdir()]:
            path = os.path.join(folder, STACKS_NAME)
            with suppress(OSError), open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"==== {when}: {failure.message} ====\n{failure.stacks}\n")
                if failure.stacks:
                    _say(f"where all processes stood is in {path}")
                return


def _say(words: str) -> None:
    print(f"littrainer: {words}", file=sys.stderr, flush=True)
