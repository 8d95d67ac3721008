"""Checks scripts that fail late: `python -m tests.check.late_failures [NAME ...]`, by default all of them.

Each is a process of its own, forked after the imports that they share. A script's first line says what the check has to
find. Prints which were found and the counts; the exit status is 1 if fewer are found than is promised, or one took too
long.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
import traceback
from pathlib import Path

SCRIPTS = Path(__file__).parent
MOST_MISSED = 2
LONGEST_CHECK_SECONDS = 60
WOULD_FAIL = 1


def names() -> list[str]:
    """The scripts, `small.py` and the sound one left out."""
    return sorted(
        path.stem for path in SCRIPTS.glob("*.py") if path.stem not in ("small", "sound", "__main__", "__init__")
    )


def checked(name: str) -> tuple[int, str]:
    """Exit status of a check in a process of its own, and its page."""
    from littrainer.commands.check import check_program

    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        status, page = 99, io.StringIO()
        try:
            with (
                contextlib.redirect_stdout(page),
                open(os.devnull, "w") as nothing,
                contextlib.redirect_stderr(nothing),
            ):
                status = check_program([str(SCRIPTS / f"{name}.py")])
        except BaseException:
            traceback.print_exc(file=page)
        with os.fdopen(writing, "w") as pipe:
            pipe.write(page.getvalue())
        os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        printed = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), printed


def expected(name: str) -> str:
    """What the page has to say would fail."""
    return (SCRIPTS / f"{name}.py").read_text(encoding="utf-8").splitlines()[0].removeprefix("# Fails: ")


def failures_on(page: str) -> str:
    """The part of a page with what would fail."""
    return "would fail" + page.partition("\nwould fail")[2]


def main(wanted: list[str]) -> int:
    from littrainer.commands.check import check_program  # noqa: F401 - what all processes share
    from littrainer.trainer import Trainer  # noqa: F401

    found, slow = 0, 0
    for name in wanted:
        began = time.monotonic()
        status, page = checked(name)
        seconds = time.monotonic() - began
        is_found = status == WOULD_FAIL and expected(name) in failures_on(page)
        found, slow = found + is_found, slow + (seconds > LONGEST_CHECK_SECONDS)
        print(f"{'found' if is_found else 'MISSED':<7}{seconds:5.1f} s  {name}", flush=True)
        if not is_found:
            print(page)
    print(f"late failures: {found} of {len(wanted)} found, {slow} in more than {LONGEST_CHECK_SECONDS} s")
    return int(len(wanted) - found > MOST_MISSED or slow > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or names()))
