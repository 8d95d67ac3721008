"""Attributes that transformers' Trainer sets on itself and that only subclasses and libraries read."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from littrainer.callbacks.handler import CallbackHandler
from littrainer.callbacks.state import TrainerState
from littrainer.compat.accelerator.facade import AcceleratorFacade, wrap_accelerator
from littrainer.distributed.layout import tensor_parallel_size
from littrainer.model.facts import read_model_facts

if TYPE_CHECKING:
    from littrainer.loop.reports import MemoryReport


UNSET: Any = None
# Stage of a memory report that a script starts itself, and the stages by the names of which its metrics begin.
OWN_STAGE, STAGES = "own", ("train", "eval", "test")


class MemoryTracker:
    """Measures the memory of an overridden `evaluate` or `predict` that calls it, unless `skip_memory_metrics`."""

    def __init__(self, report: MemoryReport, skips: bool):
        self._report = report
        self.skip_memory_metrics = skips

    def start(self) -> None:
        """Start to measure."""
        self._report.start(OWN_STAGE)

    def stop_and_update_metrics(self, metrics: dict[str, Any] | None = None) -> None:
        """End the measurement and write its results into metrics, in bytes, under the prefix of the metrics."""
        measured: dict[str, Any] = {}
        self._report.stop(OWN_STAGE, None if metrics is None else measured)
        if metrics is not None:
            stage = next((stage for stage in STAGES if any(name.startswith(f"{stage}_") for name in metrics)), "eval")
            metrics.update({name.replace(f"{OWN_STAGE}_", f"{stage}_", 1): size for name, size in measured.items()})


class _Unset:
    """An attribute that is computed from its object until somebody sets it."""

    def __init__(self, value_of: Callable[[Any], Any]):
        self.value_of = value_of

    def __get__(self, instance: Any, kind: type) -> Any:
        return self if instance is None else self.value_of(instance)


class TrainerAttributes:
    """Attributes of a Trainer that only subclasses and libraries read."""

    # Defaults for a Trainer made without `__init__`.
    processing_class = data_collator = train_dataset = eval_dataset = compute_metrics = model_wrapped = UNSET
    _parameters_without_embeddings: int | None = None
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

    def _accelerator_as_set(self: Any) -> Any:
        given = vars(self).get("_accelerator_before_arguments")
        if given is None or hasattr(self, "args"):
            given = self._accelerator = wrap_accelerator(given or AcceleratorFacade(self.args), self.args, None)
        return given

    _accelerator: Any = _Unset(_accelerator_as_set)

    def _adopt_accelerator(self: Any, value: Any) -> None:
        if hasattr(self, "args"):
            self._accelerator = wrap_accelerator(value, self.args, vars(self).get("_accelerator"))
        else:
            self._accelerator_before_arguments = value

    # `create_accelerator_and_postprocess` or a script sets it; accelerate's own becomes a facade. Steps read it often.
    accelerator: Any = property(attrgetter("_accelerator"), _adopt_accelerator)

    @property
    def is_tp_enabled(self: Any) -> bool:
        """Whether processes compute each layer together."""
        return tensor_parallel_size(self.args) > 1

    @property
    def _memory_tracker(self: Any) -> MemoryTracker:
        return MemoryTracker(self.session.memory, self.args.skip_memory_metrics)
