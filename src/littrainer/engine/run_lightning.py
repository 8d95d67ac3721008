"""From training arguments to a `lightning.Trainer`, and how it is run."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

from littrainer.arguments.choices import IntervalStrategy
from littrainer.arguments.destinations import derived_keywords
from littrainer.arguments.did_you_mean import suggestion
from littrainer.callbacks.lightning_callbacks import (
    CARRIED_OUT_BY_TRAINING,
    ONLY_IN_TRAINING,
    begin_anew,
    check_can_resume,
    check_set_up,
    is_one_of,
    refuse_what_cannot_work,
)
from littrainer.callbacks.lightning_metrics import publish as publish_metrics
from littrainer.data.limits import CARRIED_OUT, development_batches, further_keywords
from littrainer.data.workers import end_workers
from littrainer.distributed.failure_report import naming_failed_processes
from littrainer.engine.batch_errors import NotedBatches
from littrainer.engine.torchmetrics_on_demand import torchmetrics_on_demand
from littrainer.errors.interruptions import CarriedStopIteration, PythonInterruptions
from littrainer.errors.lazy_isinstance import known_classes
from littrainer.errors.log_filter import quiet_lightning
from littrainer.evaluation.batch_stream import BATCHES_PER_CHUNK, BatchStream
from littrainer.tracking.lightning_loggers import LightningLoggersCallback, loggers_of

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.engine.module import TrainerModule
    from littrainer.evaluation.loop import EvaluationPass
    from littrainer.trainer import Trainer
    from littrainer.training.run import TrainingRun


# Keywords of lightning.Trainer that are the same for each training, with the reason.
FIXED_KEYWORDS: dict[str, tuple[Any, str]] = {
    "max_steps": (-1, "the Trainer's own flow callback stops at max_steps"),
    "logger": (False, "it gets those of the trackers that the Trainer reports to"),
    "enable_checkpointing": (False, "the Trainer saves checkpoints, in the transformers format"),
    "enable_progress_bar": (False, "the Trainer's callbacks show progress"),
    "enable_model_summary": (False, "a Trainer prints none"),
    "num_sanity_val_steps": (0, "a Trainer evaluates when its arguments say so"),
    "use_distributed_sampler": (False, "the Trainer's own samplers shard"),
    "inference_mode": (False, "predictions may be used in later computations with gradients"),
    "log_every_n_steps": (1, "what a Lightning callback logs is due at each step"),
}
# Keywords that follow from the training arguments.
DERIVED_KEYWORDS: dict[str, Callable[[Any], Any]] = derived_keywords()
# Keywords that follow from how the processes were started, with the reason.
FACTS_OF_LAUNCHERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "devices": (lambda args: args.visible_device_count, "each process of this node trains on one device"),
    "num_nodes": (
        lambda args: args.world_size // args.local_world_size,
        "as many nodes as the launcher has started processes on",
    ),
}
# Keywords of lightning.Trainer that a user cannot set beside the arguments, with what to set instead.
DECIDED_BY_ARGUMENTS: dict[str, str] = {
    "max_epochs": "set num_train_epochs",
    "min_epochs": "set num_train_epochs",
    "max_steps": "set max_steps",
    "min_steps": "set max_steps",
    "accumulate_grad_batches": "set gradient_accumulation_steps",
    "gradient_clip_val": "set max_grad_norm",
    "gradient_clip_algorithm": "set max_grad_norm",
    "precision": "set bf16 or fp16",
    "accelerator": "set use_cpu",
    "devices": "start the script with littrainer run --devices, or torchrun --nproc_per_node",
    "num_nodes": "start the script with littrainer run --nodes, or torchrun --nnodes",
    "val_check_interval": "set eval_strategy and eval_steps",
    "check_val_every_n_epoch": "set eval_strategy",
    "num_sanity_val_steps": "set eval_on_start",
    "use_distributed_sampler": "the Trainer shards its data itself",
    "reload_dataloaders_every_n_epochs": "override get_train_dataloader",
    "inference_mode": "evaluation runs under no_grad",
}
FIXED_LOGGER = {"logger": FIXED_KEYWORDS["logger"][0]}
# As check_val_every_n_epoch: Lightning never validates by itself, and callbacks look for metrics after evaluations.
NOT_BY_ITSELF = 2**62
# Lightning reads max_epochs into a loop counter; a stream's sys.maxsize of epochs means no limit.
NO_EPOCH_LIMIT = -1


def lightning_keywords(args: TrainingArguments, further: dict[str, Any] | None = None) -> dict[str, Any]:
    """The keywords for `lightning.Trainer` that training arguments stand for.

    Parameters:
        further: keywords given to the Trainer, added to those of `args.lightning`.

    Raises:
        ValueError: a further keyword is one that training arguments decide.
    """
    keywords = {name: value for name, (value, _) in FIXED_KEYWORDS.items()}
    keywords.update({name: derive(args) for name, derive in DERIVED_KEYWORDS.items()})
    keywords.update({name: find(args) for name, (find, _) in FACTS_OF_LAUNCHERS.items()})
    in_arguments: Any = args.lightning
    given = {**(in_arguments or {}), **(further or {})}
    for name in given:
        if name in DECIDED_BY_ARGUMENTS:
            raise ValueError(
                f"lightning={{{name!r}: ...}} is decided by training arguments: {DECIDED_BY_ARGUMENTS[name]}."
            )
    keywords.update(given)
    return keywords


def build_lightning_trainer(trainer: Trainer, run: TrainingRun | None) -> pl.Trainer:
    """A new `lightning.Trainer` for a training, or for evaluation where `run` is None.

    Raises:
        TypeError: a further keyword is none of Lightning's.
        ValueError: Lightning refuses the value of one.
    """
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import Checkpoint, ProgressBar
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from littrainer.checkpoint.lightning_io import save_in_each_process, with_checkpoint_io
    from littrainer.engine.bridge import events_around
    from littrainer.engine.fast_training_loop import use_fast_loop
    from littrainer.engine.lightning_internals import (
        count_from,
        entry_points_read_once,
        leave_signals_alone,
        resume_nothing,
    )
    from littrainer.engine.precision import precision_plugin
    from littrainer.strategies.user_strategy import fitted_strategy

    keywords = lightning_keywords(trainer.args, trainer.lightning_keywords)
    keywords["strategy"] = fitted_strategy(keywords.get("strategy", "auto"), trainer)
    # Where callbacks write that are not told where to.
    keywords.setdefault("default_root_dir", trainer._get_output_dir(trial=None if run is None else run.trial))
    for name in CARRIED_OUT:
        keywords.pop(name, None)
    callbacks = _user_callbacks(trainer, keywords)
    keywords["logger"] = _loggers(trainer, callbacks)
    if any(isinstance(callback, ProgressBar) for callback in callbacks):
        # Lightning asks for it where a callback is a bar; one of its own it adds only where there is none.
        keywords["enable_progress_bar"] = True
    if trainer.overrides_training_step():
        # Lightning accepts no other number in manual optimization, where it does not count micro-batches anyway.
        keywords["accumulate_grad_batches"] = 1
    if run is not None:
        check_set_up(callbacks, trainer.args, trainer.model, [trainer, *trainer.callback_handler.callbacks])
        begin_anew(callbacks)
    callbacks = [callback for callback in callbacks if not is_one_of(callback, *CARRIED_OUT_BY_TRAINING)]
    if run is not None:
        if run.checkpoint is not None:
            check_can_resume(callbacks)
        epochs = run.plan.num_train_epochs
        keywords["max_epochs"] = epochs if epochs < sys.maxsize // 2 else NO_EPOCH_LIMIT
        if trainer.args.eval_strategy != IntervalStrategy.NO:
            keywords["check_val_every_n_epoch"] = NOT_BY_ITSELF
        callbacks = events_around(callbacks, run)
        keywords["plugins"] = with_checkpoint_io(_as_list(keywords.get("plugins")), trainer)
    else:
        callbacks = [callback for callback in callbacks if not is_one_of(callback, *ONLY_IN_TRAINING)]
    if any(isinstance(callback, Checkpoint) for callback in callbacks):
        # Lightning asks for it where a callback saves; one of its own it adds only where there is none.
        keywords["enable_checkpointing"] = True
    plugin = precision_plugin(keywords["precision"], trainer, keywords["strategy"])
    if plugin is not None:
        # In the place of the plugin that Lightning would make for that precision.
        del keywords["precision"]
        keywords["plugins"] = [*_as_list(keywords.get("plugins")), plugin]
    known = _keywords_of(pl.Trainer)
    for name in keywords:
        if name not in known:
            raise TypeError(
                f"lightning={{{name!r}: ...}} is no keyword of lightning.Trainer ({suggestion(name, known)})."
            )
    with quiet_lightning(), entry_points_read_once():
        try:
            built = pl.Trainer(callbacks=callbacks, **keywords)
        except MisconfigurationException as error:
            raise ValueError(f"lightning.Trainer refuses a keyword given as `lightning`: {error}") from None
    if run is not None:
        use_fast_loop(built)
    save_in_each_process(built.strategy)
    leave_signals_alone(built)
    resume_nothing(built)
    if run is not None and run.checkpoint is not None:
        count_from(built, epochs=run.first_epoch, optimizer_steps=trainer.state.global_step)
    return built


@functools.cache
def _keywords_of(cls: type) -> frozenset[str]:
    return frozenset(inspect.signature(cls).parameters)


def _user_callbacks(trainer: Trainer, keywords: dict[str, Any]) -> list[Any]:
    """Lightning callbacks of the user's, from all places; takes those among the keywords out of them."""
    callbacks = [*trainer.lightning_callbacks, *_as_list(keywords.pop("callbacks", None))]
    for callback in callbacks:
        refuse_what_cannot_work(callback)
    longest = keywords.pop("max_time", None)
    if longest is not None:
        from lightning.pytorch.callbacks import Timer

        # Lightning would add it behind the Trainer's own events, which then could not end an optimizer step first.
        callbacks.append(Timer(longest))
    return callbacks


def _loggers(trainer: Trainer, callbacks: list[Any]) -> list[Any]:
    """Loggers for the `lightning.Trainer`: those of the trackers, or the Trainer's history for callbacks to log to."""
    adopt_loggers(trainer)
    loggers = loggers_of(trainer.callback_handler.callbacks)
    if not loggers and callbacks:
        from littrainer.engine.bridge import HistoryLogger

        loggers = [HistoryLogger(lambda: trainer.state)]
    return loggers


def adopt_loggers(trainer: Trainer) -> None:
    """Make trackers of the loggers that were given by `lightning={"logger": ...}`, as `report_to` has them."""
    given = {**FIXED_LOGGER, **further_keywords(trainer)}["logger"]
    if development_batches(trainer):
        return
    if given is True:
        given = trainer.lightning_keywords["logger"] = [_lightnings_choice_of_logger(trainer.args.output_dir)]
    known = [
        logger
        for callback in trainer.callback_handler.callbacks
        if isinstance(callback, LightningLoggersCallback)
        for logger in callback.loggers
    ]
    new = [logger for logger in _as_list(given or None) if all(logger is not one for one in known)]
    if new:
        trainer.callback_handler.add_callback(LightningLoggersCallback(new))


def import_lightning() -> None:
    """Load all of Lightning that a training needs.

    The Trainer calls this before it seeds: what these imports draw from Python's random generator must not change the
    numbers of a training.
    """
    with torchmetrics_on_demand():
        import littrainer.checkpoint.lightning_io
        import littrainer.engine.bridge
        import littrainer.engine.fast_evaluation_loop
        import littrainer.engine.fast_training_loop
        import littrainer.engine.lightning_internals
        import littrainer.engine.module
        import littrainer.engine.precision
        import littrainer.strategies.user_strategy  # noqa: F401


def fit(trainer: Trainer, run: TrainingRun) -> None:
    """Carry out a training with Lightning; the model is left on its device."""
    from littrainer.engine.module import TrainerModule

    # A lightning.Trainer that has been fitted does nothing when it is fitted again.
    _check_same_strategy(trainer)
    lightning_trainer = trainer.lightning_trainer = build_lightning_trainer(trainer, run)
    module = TrainerModule(trainer, run)
    trainer.lightning_module = module
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
        trainer.lightning_module = None
        end_workers(run.windows.loader)


def evaluate(trainer: Trainer, evaluation_pass: EvaluationPass) -> None:
    """Drive an evaluation or prediction with Lightning: nested where fit is running, else on its own."""
    from littrainer.engine import fast_evaluation_loop

    running = trainer.lightning_module
    if running is not None:
        _evaluate_inside_fit(trainer, running, evaluation_pass)
        return
    evaluator, has_evaluated = _evaluator_for(trainer)
    lightning_trainer, module = evaluator.lightning_trainer, evaluator.module
    if trainer.lightning_trainer is None:
        trainer.lightning_trainer = lightning_trainer
    module.evaluation_pass = evaluation_pass
    if has_evaluated and fast_evaluation_loop.may_be_fast(lightning_trainer):
        with NotedBatches(trainer), CarriedStopIteration(), naming_failed_processes("the evaluation"):
            fast_evaluation_loop.pass_over(lightning_trainer, _chunks(evaluation_pass), evaluation_pass.is_prediction)
    else:
        _evaluate_with_lightning(trainer, lightning_trainer, module, evaluation_pass)
    module.evaluation_pass = None
    trainer.idle_evaluator = evaluator


def _evaluate_inside_fit(trainer: Trainer, running: TrainerModule, evaluation_pass: EvaluationPass) -> None:
    from littrainer.engine import fast_evaluation_loop
    from littrainer.engine.lightning_internals import evaluate_inside_fit

    trainer.validation_rounds.end_earlier_one()
    outer, running.evaluation_pass = running.evaluation_pass, evaluation_pass
    try:
        if not further_keywords(trainer) and fast_evaluation_loop.may_be_fast(running.trainer):
            fast_evaluation_loop.pass_over(running.trainer, _chunks(evaluation_pass))
            end: Callable[[bool], None] = _nobody_hears
        else:
            batches = _batch_stream(trainer, running.trainer, evaluation_pass)
            end = evaluate_inside_fit(running.trainer, batches, lambda: _put_weights_back(running.trainer))
    finally:
        running.evaluation_pass = outer
    trainer.validation_rounds.add(end)


def _nobody_hears(is_monitoring: bool) -> None:
    """The end of a validation that no Lightning callback listens to."""


def _evaluate_with_lightning(
    trainer: Trainer, lightning_trainer: pl.Trainer, module: TrainerModule, evaluation_pass: EvaluationPass
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


def validation_round(trainer: Trainer) -> AbstractContextManager[None]:
    """What is evaluated within it is one validation to Lightning callbacks that monitor metrics."""
    return trainer.validation_rounds.round(lambda: stop_if_lightning_stops(trainer))


def stop_if_lightning_stops(trainer: Trainer) -> None:
    """Let training end where a Lightning callback has asked for it."""
    running = trainer.lightning_module
    if running is not None and running.trainer.should_stop:
        trainer.control.should_training_stop = True


def publish(trainer: Trainer, logs: dict[str, Any]) -> None:
    """Show Lightning callbacks what the Trainer logs while it trains, before it is in the history."""
    running = trainer.lightning_module
    if running is not None and is_listened_to(running.trainer):
        publish_metrics(running.trainer, logs)
        _add_to_history(running.trainer)


def is_listened_to(lightning_trainer: pl.Trainer) -> bool:
    """Whether there are Lightning callbacks beside the Trainer's own."""
    from littrainer.engine.bridge import users_callbacks

    return bool(users_callbacks(lightning_trainer))


def _add_to_history(lightning_trainer: pl.Trainer) -> None:
    from littrainer.engine.bridge import HistoryLogger

    for logger in lightning_trainer.loggers:
        # A shared logger would have to look up its run, to answer isinstance.
        if type(logger) is HistoryLogger:
            logger.add_to_history()


def _put_weights_back(lightning_trainer: pl.Trainer) -> None:
    # Training may go on after an evaluation that was broken off, as when a signal asks for a checkpoint.
    for callback in lightning_trainer.callbacks:  # type: ignore[attr-defined]
        if is_one_of(callback, "WeightAveraging"):
            callback.on_validation_epoch_end(lightning_trainer, lightning_trainer.lightning_module)


class Evaluator(NamedTuple):
    """What carries out evaluations outside of training; building it takes longer than a short evaluation.

    Parameters:
        made_for: what it was built from, beside the model; for anything else it is built anew.
    """

    lightning_trainer: pl.Trainer
    module: TrainerModule
    made_for: tuple[Any, ...]


def _evaluator_for(trainer: Trainer) -> tuple[Evaluator, bool]:
    """What evaluates outside of training, and whether it has done so before."""
    from littrainer.engine.module import TrainerModule

    # One that is busy, as where a callback evaluates during an evaluation, or has failed, is not idle.
    idle, trainer.idle_evaluator = trainer.idle_evaluator, None
    # What a user hands to Lightning may hold the state of one run.
    is_plain = not trainer.lightning_callbacks and not further_keywords(trainer)
    made_for = (trainer.args.device, trainer.overrides_training_step(), lightning_keywords(trainer.args))
    if idle is not None and is_plain and idle.made_for == made_for and idle.module.model is trainer.model:
        return idle, True
    _check_same_strategy(trainer)
    return Evaluator(build_lightning_trainer(trainer, run=None), TrainerModule(trainer), made_for), False


def _check_same_strategy(trainer: Trainer) -> None:
    from littrainer.strategies.consistency_checks import check_same_strategy
    from littrainer.strategies.user_strategy import name_of_strategy

    check_same_strategy(name_of_strategy(further_keywords(trainer).get("strategy", "auto"), trainer.args))


def _lightnings_choice_of_logger(folder: str) -> Any:
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    try:
        return TensorBoardLogger(folder)
    except ImportError:
        return CSVLogger(folder)


# Hooks through which a Lightning callback hears of single batches of an evaluation.
BATCH_HOOKS = (
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_predict_batch_start",
    "on_predict_batch_end",
)


def _batch_stream(trainer: Trainer, lightning_trainer: pl.Trainer, evaluation_pass: EvaluationPass) -> BatchStream:
    from lightning.pytorch import Callback

    def listens(callback: Any) -> bool:
        hooks = ((getattr(callback, name), getattr(Callback, name)) for name in BATCH_HOOKS)
        return any(getattr(hook, "__func__", hook) is not default for hook, default in hooks)

    # Further keywords, as a profiler or a limit, may be about single batches too.
    one_by_one = further_keywords(trainer) or any(map(listens, lightning_trainer.callbacks))  # type: ignore[attr-defined]
    return BatchStream(
        evaluation_pass.dataloader, 1 if one_by_one else BATCHES_PER_CHUNK, evaluation_pass.limit_of_batches
    )


def _chunks(evaluation_pass: EvaluationPass) -> BatchStream:
    return BatchStream(evaluation_pass.dataloader, BATCHES_PER_CHUNK, evaluation_pass.limit_of_batches)


def is_lightning_callback(callback: Any) -> bool:
    """Whether a callback, or a class of callbacks, is of Lightning's kind."""
    classes = known_classes("lightning callback")
    return isinstance(callback, classes) or (isinstance(callback, type) and issubclass(callback, classes))


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
