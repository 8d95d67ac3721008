"""Attributes that transformers' Trainer sets on itself and that only subclasses and libraries read."""

from __future__ import annotations

import sys
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from littrainer.compat.accelerator.facade import adopted
from littrainer.distributed.layout import tensor_parallel_size

if TYPE_CHECKING:
    from littrainer.training.reports import MemoryReport


STAGES = {"__init__": "init", "train": "train", "_inner_training_loop": "train", "evaluate": "eval", "predict": "test"}


class MemoryTracker:
    """Measures the memory of an overridden `evaluate` or `predict` that calls it.

    Parameters:
        report: measures, if `skip_memory_metrics` is False.
        skips: the value of `skip_memory_metrics`.
    """

    def __init__(self, report: MemoryReport, skips: bool):
        self._report = report
        self.skip_memory_metrics = skips

    def start(self) -> None:
        """Start to measure the method that calls this."""
        self._report.start(_stage_of_caller())

    def stop_and_update_metrics(self, metrics: dict[str, Any] | None = None) -> None:
        """End the measurement and write what the method took into its metrics, in bytes."""
        self._report.stop(_stage_of_caller(), metrics)


def _stage_of_caller() -> str:
    name = sys._getframe(2).f_code.co_name
    return STAGES.get(name, name)


class TrainerAttributes:
    """Attributes of a Trainer that only subclasses and libraries read."""

    is_fsdp_xla_enabled: Any = None
    is_fsdp_xla_v1_enabled: Any = None
    is_fsdp_xla_v2_enabled: Any = None
    is_distributed_loading_by_transformers = False
    _loggers_initialized = False

    def _adopt_accelerator(self: Any, value: Any) -> None:
        self._accelerator = adopted(value, self.args, vars(self).get("_accelerator"))

    # `create_accelerator_and_postprocess` or a script sets it; accelerate's own becomes a facade. Steps read it often.
    accelerator: Any = property(attrgetter("_accelerator"), _adopt_accelerator)

    @property
    def is_tp_enabled(self: Any) -> bool:
        """Whether processes compute each layer together."""
        return tensor_parallel_size(self.args) > 1

    @property
    def _memory_tracker(self: Any) -> MemoryTracker:
        return MemoryTracker(self.session.memory, self.args.skip_memory_metrics)
