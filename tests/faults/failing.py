"""Trainers that fail in user code, by position."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from littrainer import Trainer, TrainerCallback
from littrainer.data.collators import default_data_collator
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import StepwiseTrainer, quiet_trainer

EVERY_STEP: dict[str, Any] = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 1, "logging_strategy": "steps"}


class Fuse:
    """A callable that raises at a call.

    Parameters:
        error: the exception, or None.
        at_call: the number of the call, counted from 1.
    """

    def __init__(self, error: BaseException | None, at_call: int = 2) -> None:
        self.error = error
        self.at_call = at_call
        self.calls = 0

    def __call__(self, *_: Any, **__: Any) -> None:
        self.calls += 1
        if self.error is not None and self.calls == self.at_call:
            raise self.error


def fail_in_event(event: str) -> Callable[..., Trainer]:
    def build(folder: Path, fuse: Fuse, **changes: Any) -> Trainer:
        callback: Any = TrainerCallback()
        setattr(callback, event, fuse)
        return quiet_trainer(folder, trainer_kwargs={"callbacks": [callback]}, **{**EVERY_STEP, **changes})

    return build


def fail_in_collator(folder: Path, fuse: Fuse, **changes: Any) -> Trainer:
    def collate(samples: Any) -> Any:
        fuse()
        return default_data_collator(samples)

    return quiet_trainer(folder, trainer_kwargs={"data_collator": collate}, **{**EVERY_STEP, **changes})


def fail_in_metrics(folder: Path, fuse: Fuse, **changes: Any) -> Trainer:
    return quiet_trainer(
        folder, trainer_kwargs={"compute_metrics": lambda _: fuse() or {}}, **{**EVERY_STEP, **changes}
    )


class FusedClassifier(VectorClassifier):
    def __init__(self, fuse: Fuse) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.fuse = fuse

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        self.fuse()
        return super().forward(x, labels)


def fail_in_forward(**settings: Any) -> Callable[..., Trainer]:
    def build(folder: Path, fuse: Fuse, **changes: Any) -> Trainer:
        return quiet_trainer(folder, FusedClassifier(fuse), **{**EVERY_STEP, **settings, **changes})

    return build


EVENTS = ("on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end")
FAILURES: dict[str, Callable[..., Trainer]] = {
    **{event: fail_in_event(event) for event in (*EVENTS, "on_log", "on_evaluate", "on_prediction_step")},
    "collator": fail_in_collator,
    "compute_metrics": fail_in_metrics,
    "forward": fail_in_forward(eval_strategy="no"),
    # The first call is of a training step, the next calls are of the evaluation.
    "forward of an evaluation": fail_in_forward(),
    "training_step in manual optimization": fail_in_forward(kind=StepwiseTrainer),
}
