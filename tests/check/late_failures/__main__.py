"""Checks scripts that fail late, and examples: `python -m tests.check.late_failures [NAME ...]`, by default all.

Each is a process of its own, forked after the imports that they share. A script's first line says what the check has to
find; of an example nothing may be called bad. Prints which are right and the counts; the exit status is 1 if fewer are
found than is promised, one took too long, or an example is called bad.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.commands.verified_scripts import EXAMPLES, OPTIONS

SCRIPTS = Path(__file__).parent
MOST_MISSED = 2
LONGEST_CHECK_SECONDS = 60
WOULD_FAIL = 1
# The trainings of a search are not checked.
CHECKED_EXAMPLES = [name for name in OPTIONS if name != "hyperparameter_search.py"]


def names() -> list[str]:
    """The scripts, `small.py` and the sound one left out."""
    return sorted(
        path.stem for path in SCRIPTS.glob("*.py") if path.stem not in ("small", "sound", "__main__", "__init__")
    )


def checked(script: Path, *options: str) -> tuple[int, str]:
    """Exit status of a check in a process of its own, in an empty folder, and its page."""
    from littrainer.commands.check import check_program

    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writing, 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            with tempfile.TemporaryDirectory() as folder:
                os.chdir(folder)
                # It ends the process, unless the script does not train.
                status = check_program([str(script), *options])
        except BaseException:
            status = 99
            traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
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

    good, slow = {"late failures": 0, "examples": 0}, 0
    scripts = [name for name in wanted if name not in OPTIONS]
    for name in wanted:
        began = time.monotonic()
        if name in scripts:
            status, page = checked(SCRIPTS / f"{name}.py")
            kind, is_right = "late failures", status == WOULD_FAIL and expected(name) in failures_on(page)
        else:
            status, page = checked(EXAMPLES / name, *OPTIONS[name])
            kind, is_right = "examples", status == 0
        seconds = time.monotonic() - began
        good[kind], slow = good[kind] + is_right, slow + (seconds > LONGEST_CHECK_SECONDS and name in scripts)
        print(f"{'right' if is_right else 'WRONG':<7}{seconds:5.1f} s  {name}", flush=True)
        if not is_right:
            print(page, flush=True)
    examples = len(wanted) - len(scripts)
    print(f"examples: {good['examples']} of {examples} are called good")
    print(
        f"late failures: {good['late failures']} of {len(scripts)} found, {slow} in more than {LONGEST_CHECK_SECONDS} s"
    )
    return int(len(scripts) - good["late failures"] > MOST_MISSED or slow > 0 or good["examples"] < examples)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or [*names(), *CHECKED_EXAMPLES]))
