"""TFTrainingArguments: the arguments of a `TFTrainer`."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from littrainer.arguments.about import about
from littrainer.arguments.choices import SchedulerType
from littrainer.arguments.training_arguments import TrainingArguments

# Fields that speak of a TPU, which the first edition reached by TensorFlow.
OF_TPUS = ("tpu_name", "tpu_zone", "gcp_project")


@dataclass
class TFTrainingArguments(TrainingArguments):
    """TrainingArguments, and what the first edition of the interface had besides for TensorFlow.

    Raises:
        NotImplementedError: a TPU or XLA is asked for.
        TypeError, ValueError: as TrainingArguments, or `poly_power` is no positive number, or contradicts the schedule.
    """

    tpu_name: str | None = field(default=None, metadata=about("A TPU's name; refused, since it needs TensorFlow."))
    tpu_zone: str | None = field(default=None, metadata=about("A TPU's zone; refused, since it needs TensorFlow."))
    gcp_project: str | None = field(
        default=None, metadata=about("The TPU's project; refused, since it needs TensorFlow.")
    )
    poly_power: float = field(
        default=1.0,
        metadata=about("Power of the decay of the learning rate to 0: 1 is linear, others the schedule 'polynomial'."),
    )
    xla: bool = field(default=False, metadata=about("Compile by XLA; refused, since it compiled TensorFlow's graphs."))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._refuse_tpus_and_xla()
        self._choose_schedule()

    def _refuse_tpus_and_xla(self) -> None:
        of_tpus = [f"{name}={getattr(self, name)!r}" for name in OF_TPUS if getattr(self, name)]
        if of_tpus:
            raise NotImplementedError(
                f"{', '.join(of_tpus)}: the first edition reached TPUs by TensorFlow, and here a Keras model runs on "
                "torch. Leave it out, and train on GPUs or the CPU."
            )
        if self.xla:
            raise NotImplementedError(
                "xla=True compiled TensorFlow's graphs, and here a Keras model runs on torch, as it is. Leave it out."
            )

    def _choose_schedule(self) -> None:
        power = self.poly_power
        if isinstance(power, bool) or not isinstance(power, (int, float)):
            raise TypeError(f"poly_power={power!r} has to be a number.")
        if not power > 0:
            raise ValueError(f"poly_power={power!r} has to be above 0: it is the power of the learning rate's decay.")
        if power == 1:
            return
        if self.lr_scheduler_type not in (SchedulerType.LINEAR, SchedulerType.POLYNOMIAL):
            schedule = SchedulerType(self.lr_scheduler_type).value
            raise ValueError(
                f"poly_power={power} asks for the schedule 'polynomial', and lr_scheduler_type is {schedule!r}: give "
                "one of them."
            )
        self.lr_scheduler_type = SchedulerType.POLYNOMIAL
        given = self.lr_scheduler_kwargs if isinstance(self.lr_scheduler_kwargs, dict) else {}
        self.lr_scheduler_kwargs = {"lr_end": 0.0, **given, "power": float(power)}

    @property
    def n_replicas(self) -> int:
        """Copies of the model that train together: one in each process."""
        return self.world_size

    @property
    def strategy(self) -> ReplicaStrategy:
        """Stands for TensorFlow's distribution strategy, so that `with args.strategy.scope():` around a model works."""
        return ReplicaStrategy(self.n_replicas)


class ReplicaStrategy:
    """What scripts ask of a TensorFlow distribution strategy; nothing has to be done for a model of torch.

    Parameters:
        num_replicas_in_sync: copies of the model that train together.
    """

    def __init__(self, num_replicas_in_sync: int):
        self.num_replicas_in_sync = num_replicas_in_sync

    def scope(self) -> contextlib.AbstractContextManager[None]:
        """A context to make the model in, which changes nothing."""
        return contextlib.nullcontext()
