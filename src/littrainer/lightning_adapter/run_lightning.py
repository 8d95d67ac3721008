"""How a `lightning.Trainer` is run: to fit, to validate and to predict."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from littrainer.callbacks.lightning_callbacks import is_lightning_class
from littrainer.callbacks.lightning_metrics import DeferredValidationEnd
from littrainer.callbacks.lightning_metrics import publish as publish_metrics
from littrainer.data.limits import get_lightning_keywords
from littrainer.data.workers import shut_down_workers
from littrainer.distributed.failures import name_failed_process
from littrainer.lightning_adapter.torchmetrics_on_demand import torchmetrics_on_demand
from littrainer.loop.batch_errors import note_reading_errors
from littrainer.runtime.interruptions import PythonInterruptions
from littrainer.runtime.lazy_isinstance import loaded_classes
from littrainer.runtime.log_filter import quiet_lightning
from littrainer.runtime.weak_attributes import load_in_thread
from littrainer.strategies.choice import SHARDING_STRATEGIES, strategy_name
from littrainer.strategies.full_state import is_sharded

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from littrainer.evaluation.loop import EvaluationLoop
    from littrainer.loop.run import TrainingRun

# Hooks of callbacks that Lightning calls during an evaluation inside fit.
VALIDATION_HOOKS = tuple(
    f"on_validation_{moment}" for moment in ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end")
)


@dataclass(slots=True)
class LightningState:
    """What Lightning carries trainings and evaluations out with.

    Attributes:
        trainer: the `lightning.Trainer` of the last training, or of an evaluation that Lightning ran before it.
        module: what fit is carrying out right now; None outside of training.
        evaluation: the evaluation or prediction that is running, the innermost one.
        deferred_validation_end: which evaluations are one validation to Lightning callbacks.
    """

    trainer: pl.Trainer | None = None
    module: Any = None
    evaluation: EvaluationLoop | None = None
    deferred_validation_end: DeferredValidationEnd = field(default_factory=DeferredValidationEnd)

    def __del__(self, modules: dict[str, Any] = sys.modules) -> None:
        # Its parts refer to it, so without this nothing but the garbage collector would free it.
        if self.trainer is not None and (internals := modules.get("littrainer.lightning_adapter.lightning_internals")):
            internals.weaken_back_references(self.trainer)

    def end_without_callbacks(self) -> None:
        """Keep the exception that takes the training out of fit, and is no error, from callbacks."""
        lightning_trainer: Any = self.trainer
        lightning_trainer.callbacks = []


def import_lightning() -> None:
    """Load all of Lightning that a training needs.

    The Trainer calls this before it seeds: what these imports draw from Python's random generator must not change the
    numbers of a training.
    """
    if "littrainer.lightning_adapter.lightning_trainer" not in sys.modules:
        load_in_thread(_import_all)


def _import_all() -> None:
    with torchmetrics_on_demand():
        import littrainer.lightning_adapter.lightning_trainer  # noqa: F401


def fit(trainer: Any, run: TrainingRun) -> None:
    """Carry out a training with Lightning; the model is left on its device."""
    from littrainer.lightning_adapter.lightning_trainer import build_lightning_trainer
    from littrainer.lightning_adapter.module import TrainerModule

    # A lightning.Trainer that has been fitted does nothing when it is fitted again.
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


def evaluate(trainer: Any, evaluation: EvaluationLoop) -> None:
    """Run an evaluation or a prediction over all batches.

    That is a plain loop, unless a callback or a keyword of Lightning may listen.
    """
    state = trainer.session.lightning
    running = state.module
    outer, state.evaluation = state.evaluation, evaluation
    if running is not None:
        trainer.deferred_validation_end.notify_previous_end()
    try:
        with note_reading_errors(trainer, evaluation):
            if not _has_listeners(trainer):
                with name_failed_process("the evaluation"):
                    evaluation.run()
                if running is not None:
                    # The round ends with it, although no callback is called.
                    trainer.deferred_validation_end.add(lambda is_monitoring: None)
            elif running is None:
                _evaluate_with_lightning(trainer, evaluation)
            else:
                _evaluate_inside_fit(trainer, running.trainer, evaluation)
    finally:
        state.evaluation = outer


def _has_listeners(trainer: Any) -> bool:
    """Return whether a callback of Lightning's may listen to an evaluation, or a keyword is for its loops."""
    running = trainer.session.lightning.module
    if get_lightning_keywords(trainer):
        return True
    if running is None:
        # Outside of fit Lightning calls `setup` and `teardown` of callbacks around each evaluation too.
        return bool(trainer.lightning_callbacks)
    from littrainer.lightning_adapter.fast_training_loop import overrides_hook
    from littrainer.lightning_adapter.module import get_user_callbacks

    return any(
        overrides_hook(callback, hook) for callback in get_user_callbacks(running.trainer) for hook in VALIDATION_HOOKS
    )


def _evaluate_inside_fit(trainer: Any, lightning_trainer: pl.Trainer, evaluation: EvaluationLoop) -> None:
    from littrainer.lightning_adapter.lightning_internals import evaluate_inside_fit

    end = evaluate_inside_fit(
        lightning_trainer, BatchStream(evaluation), lambda: _restore_trained_weights(lightning_trainer)
    )
    trainer.deferred_validation_end.add(end)


def _evaluate_with_lightning(trainer: Any, evaluation: EvaluationLoop) -> None:
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
        # Lightning keeps what it has iterated last.
        batches.evaluation = None
        weaken_back_references(lightning_trainer)


class BatchStream:
    """The batches of an evaluation, as Lightning's loops iterate them.

    The length is never reached: without any, Lightning prefetches a batch, which changes the order of random draws, and
    at the loader's own it stops, even if the loader has more.
    """

    UNREACHABLE_LENGTH = 2**40

    def __init__(self, evaluation: EvaluationLoop):
        self.evaluation: EvaluationLoop | None = evaluation

    def __len__(self) -> int:
        return self.UNREACHABLE_LENGTH

    def __iter__(self) -> Iterator[Any]:
        return iter(()) if self.evaluation is None else self.evaluation.batches()


def shard_for_evaluation(trainer: Any) -> None:
    """Let the strategy shard the model, if it does and no training has; a collective call."""
    name = strategy_name(trainer.args)
    is_running = trainer.session.lightning.module is not None
    if is_running or name not in SHARDING_STRATEGIES or is_sharded(trainer.model_wrapped):
        return
    from littrainer.lightning_adapter.lightning_internals import weaken_back_references
    from littrainer.lightning_adapter.lightning_trainer import build_lightning_trainer
    from littrainer.lightning_adapter.module import TrainerModule

    lightning_trainer = build_lightning_trainer(trainer, run=None)
    # The evaluation itself calls their `setup` and `teardown`.
    lightning_trainer.callbacks = []  # type: ignore[attr-defined]
    with quiet_lightning():
        # Lightning sets the strategy up before it finds that there is nothing to evaluate.
        lightning_trainer.validate(TrainerModule(trainer), dataloaders=[], verbose=False)
    weaken_back_references(lightning_trainer)


@contextmanager
def group_validations(trainer: Any) -> Iterator[None]:
    """What is evaluated within it is one validation to Lightning callbacks that monitor metrics."""
    with (
        trainer.session.speed.during("evaluation"),
        trainer.deferred_validation_end.round(lambda: propagate_stop(trainer)),
        swap_in_weights_for("evaluate", trainer.session.lightning.module),
    ):
        yield


def swap_in_weights_for(use: str, module: Any) -> AbstractContextManager[None]:
    """Within it the model of a module that is fitted, or of None, has the weights to "evaluate" or to "save"."""
    callbacks = [] if module is None else module.trainer.callbacks
    averaging = next((callback for callback in callbacks if hasattr(callback, "swap_in_weights_for")), None)
    return nullcontext() if averaging is None else averaging.swap_in_weights_for(use, module)


def propagate_stop(trainer: Any) -> None:
    """Let training end where a Lightning callback has asked for it."""
    running = trainer.lightning_module
    if running is not None and running.trainer.should_stop:
        trainer.control.should_training_stop = True


def publish(trainer: Any, logs: dict[str, Any]) -> None:
    """Show Lightning callbacks what the Trainer logs while it trains, before it is in the history."""
    running = trainer.lightning_module
    if running is None:
        return
    from littrainer.lightning_adapter.module import get_user_callbacks

    if get_user_callbacks(running.trainer):
        publish_metrics(running.trainer, logs)
        _add_to_history(running.trainer)


def _add_to_history(lightning_trainer: pl.Trainer) -> None:
    from littrainer.lightning_adapter.lightning_trainer import HistoryLogger

    for logger in lightning_trainer.loggers:
        # A shared logger would have to look up its run, to answer isinstance.
        if type(logger) is HistoryLogger:
            logger.add_to_history()


def _restore_trained_weights(lightning_trainer: pl.Trainer) -> None:
    # Training may go on after an evaluation that was broken off, as when a signal asks for a checkpoint.
    for callback in lightning_trainer.callbacks:  # type: ignore[attr-defined]
        if is_lightning_class(callback, "WeightAveraging"):
            callback.on_validation_epoch_end(lightning_trainer, lightning_trainer.lightning_module)


def is_lightning_callback(callback: Any) -> bool:
    """Whether a callback, or a class of callbacks, is of Lightning's kind."""
    classes = loaded_classes("lightning callback")
    return isinstance(callback, classes) or (isinstance(callback, type) and issubclass(callback, classes))
