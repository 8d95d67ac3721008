"""Compares what `littrainer check` forecasts with the trainings of five examples: `python -m tests.check.forecasts`.

Prints seconds and peak memory of each, forecast and true; the exit status is 1 if one is further off than promised.
All clocks are of processor time, which other programs on the machine change little; `--wall` takes those on the wall.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"
FIVE = ("digits", "lora", "multiple_choice", "masked_language_model", "text_classification")
# Shares of the true values.
TIME_WITHIN, MEMORY_WITHIN = 0.15, 0.10


def forecast(example: str) -> list[Any]:
    """Seconds and bytes that a check says."""
    from littrainer.check.checking import TrainingCheck
    from littrainer.commands.check import check_program

    found: list[Any] = []
    run = TrainingCheck.run

    def noting(self: Any, *given: Any) -> Any:
        report = run(self, *given)
        found.extend([report.forecast_seconds, report.forecast_bytes])
        raise SystemExit

    TrainingCheck.run = noting  # type: ignore[method-assign]
    with contextlib.suppress(SystemExit):
        check_program([str(EXAMPLES / f"{example}.py"), "--output_dir", "out"])
    return found


def truth(example: str) -> list[Any]:
    """Seconds and bytes of the training itself."""
    from littrainer.redirection.redirect import install
    from littrainer.trainer import Trainer

    install()
    found: list[Any] = []
    train = Trainer.train

    def timed(self: Any, *given: Any, **keywords: Any) -> Any:
        began = time.perf_counter()
        train(self, *given, **keywords)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        found.extend([time.perf_counter() - began, peak])
        raise SystemExit

    Trainer.train = timed  # type: ignore[method-assign,assignment]
    sys.argv, sys.path[0] = [example, "--output_dir", "out"], str(EXAMPLES)
    with contextlib.suppress(SystemExit):
        runpy.run_path(str(EXAMPLES / f"{example}.py"), run_name="__main__")
    return found


def in_a_process(kind: str, example: str, clock: str) -> list[Any]:
    """What one of the two functions returns in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.check.forecasts", kind, example, f"{folder}/found", clock]
        subprocess.run(
            command,
            check=True,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        found: list[Any] = json.loads(Path(folder, "found").read_text())
        return found


def main() -> int:
    good, clock = 0, "--wall" if "--wall" in sys.argv else "--processor"
    examples = [word for word in sys.argv[1:] if word != clock] or FIVE
    for example in examples:
        (seconds, size), (true_seconds, true_size) = (
            in_a_process(kind, example, clock) for kind in ("forecast", "truth")
        )
        off, memory_off = seconds / true_seconds - 1, size / true_size - 1
        good += abs(off) <= TIME_WITHIN and abs(memory_off) <= MEMORY_WITHIN
        print(
            f"{example:24}{seconds:8.1f} s of {true_seconds:6.1f} s ({off:+.0%}){size / 1e6:8.0f} MB of "
            f"{true_size / 1e6:6.0f} MB ({memory_off:+.0%})",
            flush=True,
        )
    print(f"forecasts: {good} within {TIME_WITHIN:.0%} of the time and {MEMORY_WITHIN:.0%} of the memory")
    return int(good < len(examples))


if __name__ == "__main__":
    if len(sys.argv) == 5 and sys.argv[1] in ("forecast", "truth"):
        if sys.argv[4] == "--processor":
            time.perf_counter = time.process_time
        Path(sys.argv[3]).write_text(json.dumps({"forecast": forecast, "truth": truth}[sys.argv[1]](sys.argv[2])))
    else:
        sys.exit(main())
