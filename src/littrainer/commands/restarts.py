"""Restarts of `littrainer run --restarts` after a failure: with as many processes, fewer, or none."""

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
    """Policy that `run_processes` calls after each failure.

    If a process fails twice without a new checkpoint, its device may be broken: fewer processes continue, if allowed.
    Otherwise, an exception with the same message at the same optimizer step would repeat: nothing is started.
    """

    def __init__(self, launch: Launch):
        self._launch = launch
        self._restarts = 0
        self._errors: set[tuple[str, int | None]] = set()
        self._previous: tuple[Failure, list[Any]] | None = None

    def __call__(self, failure: Failure) -> Launch | None:
        if not self._launch.is_watched:
            return None
        run_dirs = self._find_run_dirs()
        self._save_stacks(failure, run_dirs)
        fewer = self._launch.reduced_devices if self._has_failed_again(failure, run_dirs) else None
        is_repeated = bool(failure.error) and (failure.error, failure.step) in self._errors
        self._errors.add((failure.error, failure.step))
        if is_repeated and fewer is None:
            _print_message(
                "the same error has come at the same step before and would come again: nothing is started again"
            )
            return None
        if self._restarts == self._launch.restarts:
            if self._restarts:
                _print_message(f"all {self._restarts} restarts are used up")
            return None
        self._restarts += 1
        self._launch = replace(self._launch, devices=fewer or self._launch.devices)
        processes = "1 process" if self._launch.devices == 1 else f"{self._launch.devices} processes"
        _print_message(
            f"restart {self._restarts} of {self._launch.restarts}, in {processes}, from the newest checkpoint"
        )
        return self._launch

    def _has_failed_again(self, failure: Failure, run_dirs: list[str]) -> bool:
        """Return whether the same process failed, or any were killed, twice without a new checkpoint."""
        # Loads torch.
        from littrainer.checkpoint.manager import identify_checkpoints

        before, self._previous = self._previous, (failure, [identify_checkpoints(folder) for folder in run_dirs])
        if before is None or before[1] != self._previous[1]:
            return False
        return failure.rank == before[0].rank or (failure.was_killed and before[0].was_killed)

    def _find_run_dirs(self) -> list[str]:
        with suppress(OSError, ValueError, KeyError):
            trainings = json.loads(Path(os.environ[TRAININGS]).read_text("utf-8"))
            return [folder for folders in trainings.values() for folder in folders]
        return []

    def _save_stacks(self, failure: Failure, run_dirs: list[str]) -> None:
        from littrainer.checkpoint.layout import STACKS_NAME

        when = time.strftime("%Y-%m-%d %H:%M:%S")
        for folder in [*reversed(run_dirs), os.getcwd(), tempfile.gettempdir()]:
            path = os.path.join(folder, STACKS_NAME)
            with suppress(OSError), open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"==== {when}: {failure.message} ====\n{failure.stacks}\n")
                if failure.stacks:
                    _print_message(f"stack traces of all processes are in {path}")
                return


def _print_message(message: str) -> None:
    print(f"littrainer: {message}", file=sys.stderr, flush=True)
