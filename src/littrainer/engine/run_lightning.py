"""How a `lightning.Trainer` is run: to fit, to validate and to predict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from littrainer.callbacks.lightning_callbacks import is_one_of
from littrainer.callbacks.lightning_metrics import ValidationRounds
from littrainer.callbacks.lightning_metrics import publish as publish_metrics
from littrainer.data.limits import further_keywords
from littrainer.data.workers import end_workers
from littrainer.distributed.failure_report import naming_failed_processes
from littrainer.engine.batch_errors import NotedBatches
from littrainer.engine.torchmetrics_on_demand import torchmetrics_on_demand
from littrainer.errors.interruptions import CarriedStopIteration, PythonInterruptions
from littrainer.errors.lazy_isinstance import known_classes
from littrainer.errors.log_filter import quiet_lightning
from littrainer.evaluation.batch_stream import BatchStream

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from littrainer.engine.module import TrainerModule
    from littrainer.evaluation.loop import EvaluationPass
    from littrainer.training.run import TrainingRun


class Evaluator(NamedTuple):
    """What carries out evaluations outside of training; building it takes longer than a short evaluation.

    Parameters:
        made_for: what it was built from, besides the model; for anything else another one is built.
    """

    lightning_trainer: pl.Trainer
    module: TrainerModule
    made_for: tuple[Any, ...]


@dataclass(slots=True)
class LightningState:
    """What Lightning carries trainings and evaluations out with.

    Attributes:
        trainer: the `lightning.Trainer` of the last training, or of an evaluation before it.
        module: what fit is carrying out right now; None outside of training.
        idle_evaluator: evaluates outside of training; None while it does.
        validation_rounds: which evaluations are one validation to Lightning callbacks.
    """

    trainer: pl.Trainer | None = None
    module: Any = None
    idle_evaluator: Evaluator | None = None
    validation_rounds: ValidationRounds = field(default_factory=ValidationRounds)


def import_lightning() -> None:
    """Load all of Lightning that a training needs.

    The Trainer calls this before it seeds: what these imports draw from Python's random generator must not change the
    numbers of a training.
    """
    with torchmetrics_on_demand():
        import littrainer.checkpoint.lightning_io
        import littrainer.engine.fast_evaluation_loop
        import littrainer.engine.fast_training_loop
        import littrainer.engine.lightning_internals
        import littrainer.engine.lightning_trainer
        import littrainer.engine.module
        import littrainer.engine.precision
        import littrainer.strategies.user_strategy  # noqa: F401


def fit(trainer: Any, run: TrainingRun) -> None:
    """Carry out a training with Lightning; the model is left on its device."""
    from littrainer.engine.lightning_trainer import build_lightning_trainer
    from littrainer.engine.module import TrainerModule

    # A lightning.Trainer that has been fitted does nothing when it is fitted again.
    state = trainer.session.lightning
    lightning_trainer = state.trainer = build_lightning_trainer(trainer, run)
    module = state.module = TrainerModule(trainer, run)
    trainer.accelerator.module = module
    try:
        with (
            quiet_lightning(),
            NotedBatches(trainer),
            PythonInterruptions(),
            naming_failed_processes("training"),
        ):
            lightning_trainer.fit(module, train_dataloaders=run.windows)
        _add_to_history(lightning_trainer)
    finally:
        trainer.accelerator.module = None
        state.module = None
        end_workers(run.windows.loader)


def evaluate(trainer: Any, evaluation_pass: EvaluationPass) -> None:
    """Drive an evaluation or prediction with Lightning: nested where fit is running, else on its own."""
    from littrainer.engine import fast_evaluation_loop

    state = trainer.session.lightning
    if state.module is not None:
        _evaluate_inside_fit(trainer, state.module, evaluation_pass)
        return
    evaluator, has_evaluated = _evaluator_for(trainer)
    lightning_trainer, module = evaluator.lightning_trainer, evaluator.module
    if state.trainer is None:
        state.trainer = lightning_trainer
    module.evaluation_pass = evaluation_pass
    if has_evaluated and fast_evaluation_loop.may_be_fast(lightning_trainer):
        with NotedBatches(trainer), CarriedStopIteration(), naming_failed_processes("the evaluation"):
            fast_evaluation_loop.pass_over(lightning_trainer, _one_step(evaluation_pass), evaluation_pass.is_prediction)
    else:
        _evaluate_with_lightning(trainer, lightning_trainer, module, evaluation_pass)
    module.evaluation_pass = None
    state.idle_evaluator = evaluator


def _evaluate_inside_fit(trainer: Any, running: TrainerModule, evaluation_pass: EvaluationPass) -> None:
    from littrainer.engine import fast_evaluation_loop
    from littrainer.engine.lightning_internals import evaluate_inside_fit

    trainer.validation_rounds.end_earlier_one()
    outer, running.evaluation_pass = running.evaluation_pass, evaluation_pass
    try:
        if not further_keywords(trainer) and fast_evaluation_loop.may_be_fast(running.trainer):
            fast_evaluation_loop.pass_over(running.trainer, _one_step(evaluation_pass))
            end: Callable[[bool], None] | None = None
        else:
            batches = _batch_stream(trainer, running.trainer, evaluation_pass)
            end = evaluate_inside_fit(running.trainer, batches, lambda: _put_weights_back(running.trainer))
    finally:
        running.evaluation_pass = outer
    # Nobody hears of the end of a fast one.
    trainer.validation_rounds.add(end or (lambda is_monitoring: None))


def _evaluate_with_lightning(
    trainer: Any, lightning_trainer: pl.Trainer, module: TrainerModule, evaluation_pass: EvaluationPass
) -> None:
    batches = _batch_stream(trainer, lightning_trainer, evaluation_pass)
    with (
        quiet_lightning(),
        NotedBatches(trainer),
        PythonInterruptions(),
        naming_failed_processes("the evaluation"),
    ):
        if evaluation_pass.is_prediction:
            lightning_trainer.predict(module, dataloaders=batches, return_predictions=False)
        else:
            lightning_trainer.validate(module, dataloaders=batches, verbose=False)
    _add_to_history(lightning_trainer)
    batches.release()


@contextmanager
def validation_round(trainer: Any) -> Iterator[None]:
    """What is evaluated within it is one validation to Lightning callbacks that monitor metrics."""
    with (
        trainer.session.speed.during("evaluation"),
        trainer.validation_rounds.round(lambda: stop_if_lightning_stops(trainer)),
        weights_to("evaluate", trainer.session.lightning.module),
    ):
        yield


def weights_to(use: str, module: Any) -> AbstractContextManager[None]:
    """Within it the model of a module that is fitted, or of None, has the weights to "evaluate" or to "save"."""
    callbacks = [] if module is None else module.trainer.callbacks
    averaging = next((callback for callback in callbacks if hasattr(callback, "weights_to")), None)
    return nullcontext() if averaging is None else averaging.weights_to(use, module)


def stop_if_lightning_stops(trainer: Any) -> None:
    """Let training end where a Lightning callback has asked for it."""
    running = trainer.lightning_module
    if running is not None and running.trainer.should_stop:
        trainer.control.should_training_stop = True


def publish(trainer: Any, logs: dict[str, Any]) -> None:
    """Show Lightning callbacks what the Trainer logs while it trains, before it is in the history."""
    running = trainer.lightning_module
    if running is None:
        return
    from littrainer.engine.module import users_callbacks

    if users_callbacks(running.trainer):
        publish_metrics(running.trainer, logs)
        _add_to_history(running.trainer)


def _add_to_history(lightning_trainer: pl.Trainer) -> None:
    from littrainer.engine.lightning_trainer import HistoryLogger

    for logger in lightning_trainer.loggers:
        # A shared logger would have to look up its run, to answer isinstance.
        if type(logger) is HistoryLogger:
            logger.add_to_history()


def _put_weights_back(lightning_trainer: pl.Trainer) -> None:
    # Training may go on after an evaluation that was broken off, as when a signal asks for a checkpoint.
    for callback in lightning_trainer.callbacks:  # type: ignore[attr-defined]
        if is_one_of(callback, "WeightAveraging"):
            callback.on_validation_epoch_end(lightning_trainer, lightning_trainer.lightning_module)


def _evaluator_for(trainer: Any) -> tuple[Evaluator, bool]:
    """What evaluates outside of training, and whether it has done so before."""
    from littrainer.engine.lightning_trainer import build_lightning_trainer, lightning_keywords
    from littrainer.engine.module import TrainerModule

    # One that is busy, as where a callback evaluates during an evaluation, or has failed, is not idle.
    state = trainer.session.lightning
    idle, state.idle_evaluator = state.idle_evaluator, None
    # What a user hands to Lightning may hold the state of one run.
    is_plain = not trainer.lightning_callbacks and not further_keywords(trainer)
    made_for = (trainer.args.device, trainer.overrides_training_step(), lightning_keywords(trainer.args))
    if idle is not None and is_plain and idle.made_for == made_for and idle.module.model is trainer.model:
        return idle, True
    return Evaluator(build_lightning_trainer(trainer, run=None), TrainerModule(trainer), made_for), False


# Hooks through which a Lightning callback hears of single batches of an evaluation.
BATCH_HOOKS = (
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_predict_batch_start",
    "on_predict_batch_end",
)


def _batch_stream(trainer: Any, lightning_trainer: pl.Trainer, evaluation_pass: EvaluationPass) -> BatchStream:
    from lightning.pytorch import Callback

    def listens(callback: Any) -> bool:
        hooks = ((getattr(callback, name), getattr(Callback, name)) for name in BATCH_HOOKS)
        return any(getattr(hook, "__func__", hook) is not default for hook, default in hooks)

    # Further keywords, as a profiler or a limit, may be about single batches too.
    one_by_one = further_keywords(trainer) or any(map(listens, lightning_trainer.callbacks))  # type: ignore[attr-defined]
    return BatchStream(evaluation_pass.dataloader, bool(one_by_one), evaluation_pass.limit_of_batches)


def _one_step(evaluation_pass: EvaluationPass) -> BatchStream:
    return BatchStream(evaluation_pass.dataloader, limit=evaluation_pass.limit_of_batches)


def is_lightning_callback(callback: Any) -> bool:
    """Whether a callback, or a class of callbacks, is of Lightning's kind."""
    classes = known_classes("lightning callback")
    return isinstance(callback, classes) or (isinstance(callback, type) and issubclass(callback, classes))
