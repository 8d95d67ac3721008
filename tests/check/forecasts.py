"""Compares what `littrainer check` forecasts with the trainings of five examples: `python -m tests.check.forecasts`.

Prints seconds and peak memory of each, forecast and true; the exit status is 1 if one is further off than promised.
All clocks are of processor time, which other programs on the machine change little.
"""

from __future__ import annotations

import json
import os
import resource
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


def leave(seconds: float, size: float) -> None:
    """Write what was measured, and end the process."""
    Path(sys.argv[3]).write_text(json.dumps([seconds, size]))
    os._exit(0)


def forecast(example: str) -> None:
    """Measure what a check says."""
    from littrainer.check.checking import TrainingCheck
    from littrainer.commands.check import check_program

    run = TrainingCheck.run

    def noting(self: Any, *given: Any) -> Any:
        report = run(self, *given)
        leave(report.forecast_seconds or 0.0, report.forecast_bytes or 0.0)

    TrainingCheck.run = noting  # type: ignore[method-assign]
    check_program([str(EXAMPLES / f"{example}.py"), "--output_dir", "out"])


def truth(example: str) -> None:
    """Measure the training itself."""
    from littrainer.commands.recorded_training import run_program
    from littrainer.redirection.redirect import install
    from littrainer.trainer import Trainer

    install()
    train = Trainer.train

    def timed(self: Any, *given: Any, **keywords: Any) -> Any:
        began = time.perf_counter()
        train(self, *given, **keywords)
        leave(time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)

    Trainer.train = timed  # type: ignore[method-assign,assignment]
    run_program([str(EXAMPLES / f"{example}.py"), "--output_dir", "out"])


def in_a_process(kind: str, example: str) -> list[Any]:
    """What one of the two functions returns in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.check.forecasts", kind, example, f"{folder}/found"]
        environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
        subprocess.run(command, check=True, cwd=folder, env=environment, capture_output=True)
        found: list[Any] = json.loads(Path(folder, "found").read_text())
        return found


def main() -> int:
    good, examples = 0, sys.argv[1:] or FIVE
    for example in examples:
        (seconds, size), (true_seconds, true_size) = (in_a_process(kind, example) for kind in ("forecast", "truth"))
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
    if len(sys.argv) == 4 and sys.argv[1] in ("forecast", "truth"):
        time.perf_counter = time.process_time
        {"forecast": forecast, "truth": truth}[sys.argv[1]](sys.argv[2])
    else:
        sys.exit(main())
