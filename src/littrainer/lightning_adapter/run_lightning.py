"""Runs of a `lightning.Trainer`: fit, validate and predict."""

from __future__ import annotations

import importlib.util
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from littrainer.callbacks.lightning_metrics import DeferredValidationEnd
from littrainer.callbacks.lightning_metrics import publish as publish_metrics
from littrainer.callbacks.trainer_context import TrainerContext
from littrainer.data.limits import get_lightning_keywords
from littrainer.data.workers import shut_down_workers
from littrainer.distributed.failures import name_failed_process
from littrainer.loop.batch_errors import note_reading_errors
from littrainer.runtime.interruptions import PythonInterruptions
from littrainer.runtime.lazy_isinstance import loaded_classes
from littrainer.runtime.log_filter import quiet_lightning
from littrainer.runtime.weak_attributes import load_in_thread
from littrainer.strategies.choice import SHARDING_STRATEGIES, strategy_name
from littrainer.strategies.full_state import is_sharded

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from littrainer.callbacks.state import TrainerControl
    from littrainer.evaluation.loop import EvaluationLoop
    from littrainer.loop.run import TrainingRun

VALIDATION_HOOKS = tuple(
    f"on_validation_{moment}" for moment in ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end")
)


@dataclass(slots=True)
class LightningState:
    """The Lightning objects of trainings and evaluations.

    Attributes:
        trainer: the `lightning.Trainer` of the last training; before any training, of the first evaluation by
            Lightning's loops.
        module: None outside of training.
        evaluation: the innermost running evaluation.
        deferred_validation_end: delays `on_validation_end` until the metrics are computed.
    """

    trainer: pl.Trainer | None = None
    module: Any = None
    evaluation: EvaluationLoop | None = None
    deferred_validation_end: DeferredValidationEnd = field(default_factory=DeferredValidationEnd)

    def __del__(self, modules: dict[str, Any] = sys.modules) -> None:
        # Only the garbage collector would free its reference cycles.
        if self.trainer is not None and (internals := modules.get("littrainer.lightning_adapter.lightning_internals")):
            internals.weaken_back_references(self.trainer)

    def end_without_callbacks(self) -> None:
        """Remove all callbacks before a rollback ends fit, so that no `on_exception` gets its exception."""
        lightning_trainer: Any = self.trainer
        lightning_trainer.callbacks = []


def import_lightning() -> None:
    """Import Lightning before seeding, since imports draw random numbers."""
    if "littrainer.lightning_adapter.lightning_trainer" not in sys.modules:
        load_in_thread(_import_all)


def _import_all() -> None:
    if "torchmetrics" not in sys.modules:
        _import_base_classes_of_torchmetrics()
    import littrainer.lightning_adapter.lightning_trainer  # noqa: F401


def _import_base_classes_of_torchmetrics() -> None:
    """Import the two classes of torchmetrics that Lightning needs; the first use of another name runs the package.

    The package imports scipy and models of transformers too, which takes longer than `import torch`.
    """
    spec: Any = importlib.util.find_spec("torchmetrics")
    package: Any = importlib.util.module_from_spec(spec)
    lock, pending = threading.RLock(), [spec.loader]

    def run_package() -> dict[str, Any]:
        with lock:
            if pending:
                loader = pending.pop()
                try:
                    loader.exec_module(package)
                except BaseException:
                    # The next use raises the same error.
                    pending.append(loader)
                    raise
        return vars(package)

    def find_name(name: str) -> Any:
        try:
            # Code that looks through `sys.modules`, such as `assertWarns`, must not import the package.
            if pending and name.startswith("__") and name != "__all__":
                raise KeyError(name)
            return run_package()[name]
        except KeyError:
            raise AttributeError(f"module 'torchmetrics' has no attribute {name!r}") from None

    # Functions with these names are called for missing attributes, and by `dir`.
    vars(package).update(__getattr__=find_name, __dir__=lambda: [*run_package()])
    package.__version__, package._logger = version("torchmetrics"), logging.getLogger("torchmetrics")
    sys.modules["torchmetrics"] = package
    # First, since the base class and its utilities import each other.
    importlib.import_module("torchmetrics.utilities")
    package.Metric = importlib.import_module("torchmetrics.metric").Metric
    package.MetricCollection = importlib.import_module("torchmetrics.collections").MetricCollection


def fit(trainer: TrainerContext, run: TrainingRun) -> None:
    from littrainer.lightning_adapter.lightning_trainer import build_lightning_trainer
    from littrainer.lightning_adapter.module import TrainerModule

    # A second fit of a lightning.Trainer does nothing, so each training builds a new instance.
    state = trainer.session.lightning
    lightning_trainer = state.trainer = build_lightning_trainer(trainer, run)
    module = state.module = TrainerModule(trainer, run)
    trainer.accelerator.module = module
    try:
        with (
            quiet_lightning(),
            note_reading_errors(trainer),
            PythonInterruptions(),
            name_failed_process("training"),
        ):
            lightning_trainer.fit(module, train_dataloaders=run.windows)
        _add_to_history(lightning_trainer)
    finally:
        trainer.accelerator.module = None
        state.module = None
        shut_down_workers(run.windows.loader)


def evaluate(trainer: TrainerContext, evaluation: EvaluationLoop) -> None:
    """Run an evaluation, with Lightning's loops only if callbacks or keywords need them."""
    state = trainer.session.lightning
    running = state.module
    outer, state.evaluation = state.evaluation, evaluation
    if running is not None:
        state.deferred_validation_end.notify_previous_end()
    try:
        with note_reading_errors(trainer, evaluation):
            if not get_lightning_keywords(trainer) and not _has_listeners(running, trainer.lightning_callbacks):
                with name_failed_process("the evaluation"):
                    evaluation.run()
                if running is not None:
                    # An end without callbacks: `merge_evaluations` passes on stop requests only if there was an end.
                    state.deferred_validation_end.add(lambda is_monitoring: None)
            elif running is None:
                _evaluate_with_lightning(trainer, evaluation)
            else:
                state.deferred_validation_end.add(_evaluate_inside_fit(running.trainer, evaluation))
    finally:
        state.evaluation = outer


def _has_listeners(running: Any, callbacks: list[Any]) -> bool:
    if running is None:
        from littrainer.lightning_adapter.lightning_internals import has_registered_callbacks

        # Outside of fit any callback counts, since Lightning also calls `setup` and `teardown`.
        return bool(callbacks) or has_registered_callbacks()
    from littrainer.lightning_adapter.fast_training_loop import overrides_hook
    from littrainer.lightning_adapter.module import get_user_callbacks

    return any(
        overrides_hook(callback, hook) for callback in get_user_callbacks(running.trainer) for hook in VALIDATION_HOOKS
    )


def _evaluate_inside_fit(lightning_trainer: pl.Trainer, evaluation: EvaluationLoop) -> Callable[[bool], None]:
    from littrainer.lightning_adapter.lightning_internals import evaluate_inside_fit

    return evaluate_inside_fit(lightning_trainer, BatchStream(evaluation))


def _evaluate_with_lightning(trainer: TrainerContext, evaluation: EvaluationLoop) -> None:
    from littrainer.lightning_adapter.lightning_internals import weaken_back_references
    from littrainer.lightning_adapter.lightning_trainer import build_lightning_trainer
    from littrainer.lightning_adapter.module import TrainerModule

    lightning_trainer = build_lightning_trainer(trainer, run=None)
    state = trainer.session.lightning
    if state.trainer is None:
        state.trainer = lightning_trainer
    module, batches = TrainerModule(trainer), BatchStream(evaluation)
    try:
        with quiet_lightning(), PythonInterruptions(), name_failed_process("the evaluation"):
            if evaluation.is_prediction:
                lightning_trainer.predict(module, dataloaders=batches, return_predictions=False)
            else:
                lightning_trainer.validate(module, dataloaders=batches, verbose=False)
        _add_to_history(lightning_trainer)
    finally:
        # Lightning keeps a reference to the stream, which must not keep the evaluation's outputs alive.
        batches.evaluation = None
        weaken_back_references(lightning_trainer)


class BatchStream:
    """The batches of an evaluation for Lightning's loops, with an unreachable length.

    Without a length Lightning would prefetch, which changes random draws. With the loader's length Lightning would not
    exhaust the iterator, so the loader's code after its last batch would not run.
    """

    UNREACHABLE_LENGTH = 2**40

    def __init__(self, evaluation: EvaluationLoop):
        self.evaluation: EvaluationLoop | None = evaluation

    def __len__(self) -> int:
        return self.UNREACHABLE_LENGTH

    def __iter__(self) -> Iterator[Any]:
        return iter(()) if self.evaluation is None else self.evaluation.batches()


def shard_for_evaluation(trainer: TrainerContext) -> None:
    """Shard an unsharded model outside of training; a collective call."""
    name = strategy_name(trainer.args)
    is_running = trainer.session.lightning.module is not None
    if is_running or name not in SHARDING_STRATEGIES or is_sharded(trainer.model_wrapped):
        return
    from littrainer.lightning_adapter.lightning_internals import weaken_back_references
    from littrainer.lightning_adapter.lightning_trainer import build_lightning_trainer
    from littrainer.lightning_adapter.module import TrainerModule

    lightning_trainer = build_lightning_trainer(trainer, run=None)
    lightning_trainer.callbacks = []  # type: ignore[attr-defined]
    with quiet_lightning():
        # An empty validation sets up the strategy, which shards the model.
        lightning_trainer.validate(TrainerModule(trainer), dataloaders=[], verbose=False)
    weaken_back_references(lightning_trainer)


@contextmanager
def group_validations(trainer: TrainerContext) -> Iterator[None]:
    """Group evaluations into a validation for callbacks that monitor metrics; time it, and use averaged weights."""
    state = trainer.session.lightning
    with (
        trainer.session.speed.during("evaluation"),
        state.deferred_validation_end.merge_evaluations(lambda: _propagate_stop(state.module, trainer.control)),
        swap_in_weights_for("evaluate", state.module),
    ):
        yield


def swap_in_weights_for(purpose: str, module: Any) -> AbstractContextManager[None]:
    """Swap in the weights that an averaging callback chooses to "evaluate" or to "save", for the block."""
    callbacks = [] if module is None else module.trainer.callbacks
    averaging = next((callback for callback in callbacks if hasattr(callback, "swap_in_weights_for")), None)
    return nullcontext() if averaging is None else averaging.swap_in_weights_for(purpose, module)


def _propagate_stop(running: Any, control: TrainerControl) -> None:
    if running is not None and running.trainer.should_stop:
        control.should_training_stop = True


def publish(running: Any, logs: dict[str, Any]) -> None:
    """Publish logs to the Lightning callbacks of a running fit, before the Trainer adds the logs to its history."""
    if running is None:
        return
    from littrainer.lightning_adapter.module import get_user_callbacks

    if get_user_callbacks(running.trainer):
        publish_metrics(running.trainer, logs)
        _add_to_history(running.trainer)


def _add_to_history(lightning_trainer: pl.Trainer) -> None:
    from littrainer.lightning_adapter.lightning_trainer import HistoryLogger

    for logger in lightning_trainer.loggers:
        # `isinstance` would make a shared logger look up its run.
        if type(logger) is HistoryLogger:
            logger.add_to_history()


def is_lightning_callback(callback: Any) -> bool:
    classes = loaded_classes("lightning callback")
    return isinstance(callback, classes) or (isinstance(callback, type) and issubclass(callback, classes))
