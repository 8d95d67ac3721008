"""Shows that `log_speed` finds real delays: `python -m tests.training.delays`. No test: it depends on the machine."""

from __future__ import annotations

import sys
import tempfile
import time
from typing import Any

from littrainer.training.speed_advice import TIME_PARTS
from tests.training import test_speed


class RealTime(test_speed.Now):
    """Sleeps a tenth of what is asked for."""

    asked: dict[str, float]

    def passes(self, what: str) -> None:
        seconds = test_speed.SECONDS[what] / 10
        self.asked[what] = self.asked.get(what, 0.0) + seconds
        time.sleep(seconds)


def main() -> int:
    """Train with delays, and print what was asked for and what was found; a delay that is off by 5 % fails."""
    now = RealTime()
    now.asked = {}
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
    with tempfile.TemporaryDirectory() as folder:
        output, _ = test_speed.train(folder, now, num_train_epochs=1, **saving)  # type: ignore[arg-type]
    names = {"row": "data", "callback": "other"}
    asked = {names.get(what, what): seconds for what, seconds in now.asked.items()}
    found = {part: output.metrics[f"speed/{part}_seconds"] for part in TIME_PARTS}
    for part in asked:
        print(
            f"{part:>10}  asked {asked[part]:6.2f} s  found {found[part]:6.2f} s  {found[part] / asked[part] - 1:+.1%}"
        )
    return int(any(abs(found[part] / asked[part] - 1) > 0.05 for part in asked))


if __name__ == "__main__":
    sys.exit(main())
