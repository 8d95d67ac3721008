"""Attributes of transformers' Trainer that only subclasses and libraries read."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from littrainer.callbacks.handler import CallbackHandler
from littrainer.callbacks.state import TrainerState
from littrainer.compat.accelerator.facade import AcceleratorFacade, wrap_accelerator
from littrainer.distributed.layout import get_requested_sizes, tensor_parallel_size
from littrainer.model.facts import read_model_facts

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.loop.reports import MemoryReport


UNSET: Any = None
# Stage of reports that a script starts, and prefixes of metrics.
SCRIPT_STAGE = "own"
STAGES = ("train", "eval", "test")


class MemoryTracker:
    """Memory tracker for overridden `evaluate` and `predict` methods."""

    def __init__(self, report: MemoryReport, skip_memory_metrics: bool):
        self._report = report
        self.skip_memory_metrics = skip_memory_metrics

    def start(self) -> None:
        self._report.start(SCRIPT_STAGE)

    def stop_and_update_metrics(self, metrics: dict[str, Any] | None = None) -> None:
        """Add the results, in bytes, to metrics with their prefix."""
        measured: dict[str, Any] = {}
        self._report.stop(SCRIPT_STAGE, None if metrics is None else measured)
        if metrics is not None:
            stage = next((stage for stage in STAGES if any(name.startswith(f"{stage}_") for name in metrics)), "eval")
            metrics.update({name.replace(f"{SCRIPT_STAGE}_", f"{stage}_", 1): size for name, size in measured.items()})


class _ComputedUntilSet:
    """Attribute that is computed until it is set."""

    def __init__(self, compute: Callable[[Any], Any]):
        self.compute = compute

    def __get__(self, instance: Any, cls: type) -> Any:
        return self if instance is None else self.compute(instance)


class TrainerAttributes:
    """Attributes of a Trainer that only subclasses and libraries read."""

    # Defaults for Trainers whose constructor does not call `super().__init__`.
    processing_class = data_collator = train_dataset = eval_dataset = compute_metrics = model_wrapped = UNSET
    is_model_parallel = False
    lightning_keywords: Any = cached_property(lambda self: {})
    lightning_callbacks: Any = cached_property(lambda self: [])
    _dropped_columns: Any = cached_property(lambda self: {})
    _loss_shifts_labels: Any = cached_property(lambda self: read_model_facts(self.model).shifts_labels)
    state: Any = cached_property(lambda self: TrainerState())
    callback_handler: Any = cached_property(lambda self: CallbackHandler([], None, None, None, None))

    is_fsdp_xla_enabled: Any = None
    is_fsdp_xla_v1_enabled: Any = None
    is_fsdp_xla_v2_enabled: Any = None
    is_distributed_loading_by_transformers = False
    _loggers_initialized = False

    # Set by the Trainer.
    args: TrainingArguments
    model: Any
    session: Any

    def _create_accelerator(self) -> Any:
        accelerator = vars(self).get("_accelerator_before_arguments")
        if accelerator is None or hasattr(self, "args"):
            accelerator = wrap_accelerator(accelerator or AcceleratorFacade(self.args), self.args, None)
            self._accelerator = accelerator
        return accelerator

    _accelerator: Any = _ComputedUntilSet(_create_accelerator)

    def _set_accelerator(self, value: Any) -> None:
        if hasattr(self, "args"):
            self._accelerator = wrap_accelerator(value, self.args, vars(self).get("_accelerator"))
        else:
            self._accelerator_before_arguments = value

    # `attrgetter`, since each step reads it.
    accelerator: Any = property(attrgetter("_accelerator"), _set_accelerator)

    @property
    def is_tp_enabled(self) -> bool:
        return tensor_parallel_size(self.args) > 1

    def get_cp_size(self) -> int:
        """Return the number of processes that share each sequence by context parallelism."""
        return get_requested_sizes(self.args)[1]["cp_size"]

    def get_sp_size(self) -> int:
        """Return the number of processes that share each sequence by sequence parallelism."""
        return get_requested_sizes(self.args)[1]["sp_size"]

    @property
    def _memory_tracker(self) -> MemoryTracker:
        return MemoryTracker(self.session.memory, self.args.skip_memory_metrics)
