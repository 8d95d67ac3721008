"""Shows that `log_speed` finds real delays within 5 %: `python -m tests.loop.delays`, a part of `make soak`."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from littrainer.callbacks.log_history import TIME_PARTS
from tests.loop import test_speed

# Part of the time -> what is delayed there.
DELAYED = {"data": "row", "other": "callback"}


class RealTime(test_speed.Now):
    """Sleeps a share of what is asked for."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.slept: dict[str, float] = {}

    def passes(self, what: str) -> None:
        begin = time.perf_counter()
        time.sleep(test_speed.SECONDS[what] * self.share)
        # A sleep may take longer than it is asked to.
        self.slept[what] = self.slept.get(what, 0.0) + time.perf_counter() - begin


def trained(share: float) -> tuple[dict[str, float], dict[str, float]]:
    """How long each delay was in all, and what was found."""
    now = RealTime(share)
    at_steps: dict[str, Any] = {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 3, "eval_steps": 3}
    with tempfile.TemporaryDirectory() as folder:
        output, _ = test_speed.train(Path(folder), now, num_train_epochs=1, **at_steps)
    return now.slept, {part: output.metrics[f"speed/{part}_seconds"] for part in TIME_PARTS}


def main() -> int:
    """Train with delays, and print them and what was found; one that is off by 5 % makes the status 1."""
    # The first one imports, and the second one says what the parts take by themselves.
    _, (_, alone), (slept, found) = (trained(share) for share in (0, 0, 0.1))
    wrong = 0
    for part in TIME_PARTS:
        delay = slept.get(DELAYED.get(part, part))
        if delay is not None:
            off = (found[part] - alone[part]) / delay - 1
            wrong += abs(off) > 0.05
            print(f"{part:>10}  delayed by {delay:6.2f} s  found {found[part] - alone[part]:6.2f} s  {off:+.1%}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
