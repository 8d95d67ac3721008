"""A training that fails during a push: `python -m tests.hub.dying_process FOLDER`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Allow requests to the local Hub only.
os.environ["HF_HUB_OFFLINE"] = "0"
assert os.environ["HF_ENDPOINT"].startswith("http://127.0.0.1:")

from tests.hub.runs import AtStep, pushing_trainer  # noqa: E402


def die() -> None:
    raise MemoryError("no memory for the third step")


if __name__ == "__main__":
    pushing_trainer(
        Path(sys.argv[1]), hub_strategy="checkpoint", save_total_limit=1, trainer_kwargs={"callbacks": [AtStep(3, die)]}
    ).train()
