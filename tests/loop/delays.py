"""A check that `log_speed` measures real delays within 5 %: `python -m tests.loop.delays`, a part of `make soak`."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from littrainer.callbacks.log_history import TIME_PARTS
from tests.loop import test_speed

# Part of the time -> delayed operation.
DELAYED = {"data": "row", "other": "callback"}


class RealTime(test_speed.Now):
    """A clock that sleeps a share of the requested time."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.slept: dict[str, float] = {}

    def passes(self, what: str) -> None:
        begin = time.perf_counter()
        time.sleep(test_speed.SECONDS[what] * self.share)
        # A sleep may take longer than requested.
        self.slept[what] = self.slept.get(what, 0.0) + time.perf_counter() - begin


def trained(share: float) -> tuple[dict[str, float], dict[str, float]]:
    """Return the total of each delay, and the measured times."""
    now = RealTime(share)
    at_steps: dict[str, Any] = {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 3, "eval_steps": 3}
    with tempfile.TemporaryDirectory() as folder:
        output, _ = test_speed.train(Path(folder), now, num_train_epochs=1, **at_steps)
    return now.slept, {part: output.metrics[f"speed/{part}_seconds"] for part in TIME_PARTS}


def main() -> int:
    """Print delays and measured times, and return 1 if a difference exceeds 5 %."""
    # The first training imports, the second measures the parts without delays.
    _, (_, baseline), (slept, measured) = (trained(share) for share in (0, 0, 0.1))
    wrong = 0
    for part in TIME_PARTS:
        delay = slept.get(DELAYED.get(part, part))
        if delay is not None:
            seconds = measured[part] - baseline[part]
            off = seconds / delay - 1
            wrong += abs(off) > 0.05
            print(f"{part:>10}  delayed by {delay:6.2f} s  measured {seconds:6.2f} s  {off:+.1%}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
