"""Checks that two processes carry out together: each process asserts what it finds, and a test reads how it ended."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from tests.distributed.together import PROCESSES, run_in_processes
from tests.scenarios.once_per_session import carried_out_once

Check = Callable[[Path], None]


def carry_out(
    checks: Sequence[Check], folder: Path, within: Callable[[Path], AbstractContextManager[None]] = nullcontext
) -> None:
    """Carry checks out, each in its own folder, and write how they ended to `RANK.json`.

    Parameters:
        checks: have to be done with what processes exchange before they assert anything: one that fails in one process
            does not keep the others from the next check.
        within: a context for each check, made with a path that is its own.
    """
    endings = {}
    for check in checks:
        try:
            with within(folder / f"context-of-{check.__name__}"):
                check(folder / check.__name__)
        except Exception as error:
            told = traceback.TracebackException.from_exception(error, capture_locals=True)
            endings[check.__name__] = "".join(told.format())
        else:
            endings[check.__name__] = "well"
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(endings))


def endings_of(factory: pytest.TempPathFactory, module: str, are_told_where_to_meet: bool = True) -> Path:
    """The folder in which two processes have carried the checks of a module out, once for all tests."""

    def run(folder: Path) -> None:
        run_in_processes(module, folder, are_told_where_to_meet)

    return carried_out_once(factory, module, run)


def assert_well(folder: Path, check: str) -> None:
    """See that a check has ended well in both processes."""
    for rank in range(PROCESSES):
        ending = json.loads((folder / f"{rank}.json").read_text())[check]
        assert ending == "well", f"In process {rank}:\n{ending}"
