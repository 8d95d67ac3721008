"""Arguments about where results go, how long training lasts and how the learning rate moves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from littrainer.arguments.about import about
from littrainer.arguments.choices import SchedulerType


@dataclass
class ScheduleFields:
    """Output folder, micro-batch size, duration, learning rate and its schedule."""

    # None becomes the default folder at construction: whoever reads the field finds a string.
    output_dir: str = field(
        default=cast("str", None),
        metadata=about("Folder for checkpoints and the final model; `trainer_output` where none is given."),
    )
    per_device_train_batch_size: int = field(
        default=8, metadata=about("Samples in one training micro-batch on each device.")
    )
    num_train_epochs: float = field(
        default=3.0,
        metadata=about("Passes over the training data; a fraction stops part of the way through the last pass."),
    )
    max_steps: int = field(
        default=-1,
        metadata=about("Optimizer steps to train for; when positive it decides instead of `num_train_epochs`."),
    )
    learning_rate: float = field(default=5e-5, metadata=about("Peak learning rate, reached when warmup is over."))
    lr_scheduler_type: SchedulerType | str = field(
        default="linear", metadata=about("Shape of the learning-rate curve after warmup.")
    )
    lr_scheduler_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata=about("Further settings of the schedule, such as `num_cycles`; a dict, or JSON on the command line."),
    )
    warmup_steps: float = field(
        default=0,
        metadata=about("Length of the linear warmup: from 1 up in optimizer steps, below 1 as a share of all steps."),
    )
