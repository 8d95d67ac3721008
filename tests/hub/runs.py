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
    """A Trainer whose output folder, and so its repository, is called `run`."""
    return quiet_trainer(folder / "run", **{**PUSHING, **changes})


def files_below(folder: Path) -> dict[str, bytes]:
    """The content of each file below a folder by its path there."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class AtStep(TrainerCallback):
    """Does something at the end of one optimizer step.

    Parameters:
        step: the step.
        work: what to do.
    """

    def __init__(self, step: int, work: Any) -> None:
        self.step, self.work = step, work

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.work()


class AtEnd(TrainerCallback):
    """Does something when training has ended, before pushes are waited for."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.work()
