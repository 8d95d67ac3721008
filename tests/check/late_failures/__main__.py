"""Checks of scripts that fail late, and of examples: `python -m tests.check.late_failures [NAME ...]`, by default all.

Each check runs in a process forked after the common imports. A script's first line has the expected finding; examples
have none. Prints results and counts; the exit status is 1 if more scripts are missed than allowed, a check takes too
long, or an example fails.
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
MAX_MISSED = 2
MAX_CHECK_S = 60
WOULD_FAIL = 1
CHECKED_EXAMPLES = [name for name in OPTIONS if name != "hyperparameter_search.py"]


def names() -> list[str]:
    """Return the scripts that fail."""
    return sorted(
        path.stem for path in SCRIPTS.glob("*.py") if path.stem not in ("small", "sound", "__main__", "__init__")
    )


def run_check(script: Path, *options: str) -> tuple[int, str]:
    """Run a check in a forked process and an empty folder; return its exit status and its report."""
    from littrainer.commands.check import check_program

    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writing, 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            with tempfile.TemporaryDirectory() as folder:
                os.chdir(folder)
                # Returns only if the script does not train.
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
    """Return the failure that the report must have."""
    return (SCRIPTS / f"{name}.py").read_text(encoding="utf-8").splitlines()[0].removeprefix("# Fails: ")


def failures_on(page: str) -> str:
    """Return the failures in a report."""
    return "would fail" + page.partition("\nwould fail")[2]


def main(selected: list[str]) -> int:
    from littrainer.commands.check import check_program  # noqa: F401 - imported before the forks
    from littrainer.trainer import Trainer  # noqa: F401

    good, slow = {"late failures": 0, "examples": 0}, 0
    scripts = [name for name in selected if name not in OPTIONS]
    for name in selected:
        start = time.monotonic()
        if name in scripts:
            status, page = run_check(SCRIPTS / f"{name}.py")
            kind, is_right = "late failures", status == WOULD_FAIL and expected(name) in failures_on(page)
        else:
            status, page = run_check(EXAMPLES / name, *OPTIONS[name])
            kind, is_right = "examples", status == 0
        seconds = time.monotonic() - start
        good[kind], slow = good[kind] + is_right, slow + (seconds > MAX_CHECK_S and name in scripts)
        print(f"{'right' if is_right else 'WRONG':<7}{seconds:5.1f} s  {name}", flush=True)
        if not is_right:
            print(page, flush=True)
    examples = len(selected) - len(scripts)
    print(f"examples: {good['examples']} of {examples} are called good")
    print(f"late failures: {good['late failures']} of {len(scripts)} found, {slow} in more than {MAX_CHECK_S} s")
    return int(len(scripts) - good["late failures"] > MAX_MISSED or slow > 0 or good["examples"] < examples)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or [*names(), *CHECKED_EXAMPLES]))
