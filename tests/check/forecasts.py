"""Comparison of `littrainer check`'s forecasts with the trainings of five examples: `python -m tests.check.forecasts`.

Prints forecast and true seconds and peak memory; the exit status is 1 if an error exceeds the promised tolerance.
Times are processor time, which other programs on the machine change little.
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
TIME_TOLERANCE, MEMORY_TOLERANCE = 0.15, 0.10


def write_and_exit(seconds: float, size: float) -> None:
    """Write the measurements, and end the process."""
    Path(sys.argv[3]).write_text(json.dumps([seconds, size]))
    os._exit(0)


def forecast(example: str) -> None:
    """Write the forecast of a check."""
    from littrainer.check.checking import TrainingCheck
    from littrainer.commands.check import check_program

    run = TrainingCheck.run

    def run_and_write(self: Any, *args: Any) -> Any:
        report = run(self, *args)
        write_and_exit(report.forecast_seconds or 0.0, report.forecast_bytes or 0.0)

    TrainingCheck.run = run_and_write  # type: ignore[method-assign]
    check_program([str(EXAMPLES / f"{example}.py"), "--output_dir", "out"])


def truth(example: str) -> None:
    """Measure a training."""
    from littrainer.commands.recorded_training import run_program
    from littrainer.redirection.redirect import install
    from littrainer.trainer import Trainer

    install()
    train = Trainer.train

    def train_and_measure(self: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        train(self, *args, **kwargs)
        write_and_exit(time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)

    Trainer.train = train_and_measure  # type: ignore[method-assign,assignment]
    run_program([str(EXAMPLES / f"{example}.py"), "--output_dir", "out"])


def run_in_process(kind: str, example: str) -> list[Any]:
    """Run `forecast` or `truth` in a new process."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.check.forecasts", kind, example, f"{folder}/result"]
        environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
        subprocess.run(command, check=True, cwd=folder, env=environment, capture_output=True)
        result: list[Any] = json.loads(Path(folder, "result").read_text())
        return result


def main() -> int:
    good, examples = 0, sys.argv[1:] or FIVE
    for example in examples:
        (seconds, size), (true_seconds, true_size) = (run_in_process(kind, example) for kind in ("forecast", "truth"))
        time_error, memory_error = seconds / true_seconds - 1, size / true_size - 1
        good += abs(time_error) <= TIME_TOLERANCE and abs(memory_error) <= MEMORY_TOLERANCE
        print(
            f"{example:24}{seconds:8.1f} s of {true_seconds:6.1f} s ({time_error:+.0%}){size / 1e6:8.0f} MB of "
            f"{true_size / 1e6:6.0f} MB ({memory_error:+.0%})",
            flush=True,
        )
    print(f"forecasts: {good} within {TIME_TOLERANCE:.0%} of the time and {MEMORY_TOLERANCE:.0%} of the memory")
    return int(good < len(examples))


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1] in ("forecast", "truth"):
        time.perf_counter = time.process_time
        {"forecast": forecast, "truth": truth}[sys.argv[1]](sys.argv[2])
    else:
        sys.exit(main())
