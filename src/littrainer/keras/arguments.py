"""The arguments of a `TFTrainer`."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from types import SimpleNamespace

from littrainer.arguments.choices import SchedulerType
from littrainer.arguments.fields import argument
from littrainer.arguments.training_arguments import TrainingArguments

REFUSED = ("tpu_name", "tpu_zone", "gcp_project", "xla")


@dataclass
class TFTrainingArguments(TrainingArguments):
    """TrainingArguments with the arguments of the interface's first edition for TensorFlow.

    Raises:
        NotImplementedError: a TPU or XLA is requested.
        TypeError, ValueError: as TrainingArguments, or `poly_power` is no positive number or contradicts the schedule.
    """

    tpu_name: str | None = argument(None, "A TPU's name; refused, since it needs TensorFlow.")
    tpu_zone: str | None = argument(None, "A TPU's zone; refused, since it needs TensorFlow.")
    gcp_project: str | None = argument(None, "The TPU's project; refused, since it needs TensorFlow.")
    poly_power: float = argument(
        1.0, "Power of the decay of the learning rate to 0: 1 is linear, others the schedule 'polynomial'."
    )
    xla: bool = argument(False, "Compile by XLA; refused, since it compiled TensorFlow's graphs.")

    def __post_init__(self) -> None:
        super().__post_init__()
        refused = [f"{name}={getattr(self, name)!r}" for name in REFUSED if getattr(self, name)]
        if refused:
            raise NotImplementedError(
                f"{', '.join(refused)}: the first edition reached TPUs and XLA by TensorFlow, and here a Keras model "
                "runs on torch. Leave it out, and train on GPUs or the CPU."
            )
        self._choose_schedule()

    def _choose_schedule(self) -> None:
        power = self.poly_power
        if not (isinstance(power, (int, float)) and power > 0):
            raise ValueError(
                f"poly_power={power!r} has to be a number above 0: it is the power of the learning rate's decay."
            )
        if power == 1:
            return
        schedule = SchedulerType(self.lr_scheduler_type)
        if schedule not in (SchedulerType.LINEAR, SchedulerType.POLYNOMIAL):
            raise ValueError(
                f"poly_power={power} asks for the schedule 'polynomial', and lr_scheduler_type is {schedule.value!r}: "
                "give one of them."
            )
        self.lr_scheduler_type = SchedulerType.POLYNOMIAL
        kwargs = self.lr_scheduler_kwargs if isinstance(self.lr_scheduler_kwargs, dict) else {}
        self.lr_scheduler_kwargs = {"lr_end": 0.0, **kwargs, "power": float(power)}

    @property
    def n_replicas(self) -> int:
        """Number of replicas of the model, which is the number of processes."""
        return self.world_size

    @property
    def strategy(self) -> SimpleNamespace:
        """A substitute for TensorFlow's distribution strategy in `with args.strategy.scope():`."""
        return SimpleNamespace(num_replicas_in_sync=self.n_replicas, scope=contextlib.nullcontext)
