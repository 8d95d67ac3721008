"""Short trainings that push to the local Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from littrainer import Trainer, TrainerCallback
from tests.hub.server import GOOD_TOKEN
from tests.scenarios.trainers import quiet_trainer

# Three saves.
PUSHING: dict[str, Any] = {
    "push_to_hub": True,
    "hub_token": GOOD_TOKEN,
    "hub_always_push": True,
    "save_strategy": "steps",
    "save_steps": 2,
    "max_steps": 6,
}


def pushing_trainer(folder: Path, **changes: Any) -> Trainer:
    """Return a Trainer with output folder and repository `run`."""
    return quiet_trainer(folder / "run", **{**PUSHING, **changes})


def files_below(folder: Path) -> dict[str, bytes]:
    """Return the contents of the files in a folder by relative path."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class AtStep(TrainerCallback):
    """A callback that calls `work` at the end of an optimizer step."""

    def __init__(self, step: int, work: Any) -> None:
        self.step, self.work = step, work

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.work()


class AtEnd(TrainerCallback):
    """A callback that calls `work` at the end of training, before the wait for pushes."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.work()
