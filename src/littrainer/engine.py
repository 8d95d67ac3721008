"""From training arguments to a `lightning.Trainer`, and how it is run."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from littrainer.data.windows import BatchStream
from littrainer.ecosystem import is_a

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.evaluation.loop import EvaluationPass
    from littrainer.trainer import Trainer
    from littrainer.training.run import TrainingRun

# Keywords of lightning.Trainer that are the same for each training, with the reason.
FIXED_KEYWORDS: dict[str, tuple[Any, str]] = {
    "devices": (1, "this process trains on one device"),
    "precision": ("32-true", "the model trains in the precision it has"),
    "max_steps": (-1, "the Trainer's own flow callback stops at max_steps"),
    "logger": (False, "the Trainer's callbacks log"),
    "enable_checkpointing": (False, "the Trainer saves checkpoints, in the transformers format"),
    "enable_progress_bar": (False, "the Trainer's callbacks show progress"),
    "enable_model_summary": (False, "a Trainer prints none"),
    "num_sanity_val_steps": (0, "a Trainer evaluates when its arguments say so"),
    "use_distributed_sampler": (False, "the Trainer's own samplers shard"),
    "inference_mode": (False, "predictions may be used in later computations with gradients"),
    "log_every_n_steps": (1, "what a Lightning callback logs is due at each step"),
}
# Keywords that follow from the training arguments.
DERIVED_KEYWORDS: dict[str, Callable[[Any], Any]] = {
    "accelerator": lambda args: "gpu" if args.device.type == "cuda" else args.device.type,
    "accumulate_grad_batches": lambda args: args.gradient_accumulation_steps,
}
# Advice of Lightning's that does not apply to what is set up here.
SILENCED_WARNINGS = (
    r".*You defined a `validation_step` but have no `val_dataloader`.*",
    r".*GPU available but not used.*",
    r".*does not have many workers.*",
    r".*isinstance\(treespec, LeafSpec\).*",
)
LIGHTNING_LOGGERS = ("lightning.pytorch", "lightning.fabric")
# Lightning reads max_epochs into a loop counter; a stream's sys.maxsize of epochs means no limit.
NO_EPOCH_LIMIT = -1


def lightning_keywords(args: TrainingArguments) -> dict[str, Any]:
    """The keywords for `lightning.Trainer` that training arguments stand for; `args.lightning` has the last word."""
    keywords = {name: value for name, (value, _) in FIXED_KEYWORDS.items()}
    keywords.update({name: derive(args) for name, derive in DERIVED_KEYWORDS.items()})
    further: Any = args.lightning
    keywords.update(further or {})
    return keywords


def build_lightning_trainer(trainer: Trainer, run: TrainingRun | None) -> pl.Trainer:
    """A new `lightning.Trainer` for a training, or for evaluation where `run` is None."""
    import lightning.pytorch as pl

    from littrainer.callbacks.bridge import TrainerEvents
    from littrainer.strategies import ResidentSingleDeviceStrategy

    keywords = lightning_keywords(trainer.args)
    keywords.setdefault("strategy", ResidentSingleDeviceStrategy(device=trainer.args.device))
    callbacks = [*trainer.lightning_callbacks, *_as_list(keywords.pop("callbacks", None))]
    if trainer.overrides_training_step():
        # Lightning accepts no other number in manual optimization, where it does not count micro-batches anyway.
        keywords["accumulate_grad_batches"] = 1
    if run is not None:
        epochs = run.epochs_left
        keywords["max_epochs"] = epochs if epochs < sys.maxsize // 2 else NO_EPOCH_LIMIT
        callbacks.insert(0, TrainerEvents(run))
    with quiet_lightning():
        return pl.Trainer(callbacks=callbacks, **keywords)


def import_lightning() -> None:
    """Load all of Lightning that a training needs.

    The Trainer calls this before it seeds: what these imports draw from Python's random generator must not change the
    numbers of a training.
    """
    import littrainer.callbacks.bridge
    import littrainer.lightning_internals
    import littrainer.module
    import littrainer.strategies  # noqa: F401


def fit(trainer: Trainer, run: TrainingRun) -> None:
    """Carry out a training with Lightning; the model is left on its device."""
    from littrainer.callbacks.bridge import TrainerEvents
    from littrainer.module import TrainerModule

    # A lightning.Trainer that has been fitted does nothing when it is fitted again.
    lightning_trainer = trainer.lightning_trainer = build_lightning_trainer(trainer, run)
    module = TrainerModule(trainer, run)
    trainer.lightning_module = module
    trainer.accelerator.module = module
    module.train()
    callbacks: list[Any] = lightning_trainer.callbacks  # type: ignore[attr-defined]
    events = next(callback for callback in callbacks if isinstance(callback, TrainerEvents))
    try:
        with quiet_lightning(), _interrupts_stay_interrupts(events):
            lightning_trainer.fit(module, train_dataloaders=run.windows)
    finally:
        trainer.accelerator.module = None
        trainer.lightning_module = None


def evaluate(trainer: Trainer, evaluation_pass: EvaluationPass) -> None:
    """Drive an evaluation or prediction with Lightning: nested where fit is running, else on its own."""
    from littrainer.module import TrainerModule

    batches = BatchStream(evaluation_pass.dataloader)
    running = trainer.lightning_module
    if running is not None:
        from littrainer.lightning_internals import evaluate_inside_fit

        outer, running.evaluation_pass = running.evaluation_pass, evaluation_pass
        try:
            evaluate_inside_fit(running.trainer, batches)
        finally:
            running.evaluation_pass = outer
        return
    module = TrainerModule(trainer)
    module.evaluation_pass = evaluation_pass
    lightning_trainer = build_lightning_trainer(trainer, run=None)
    if trainer.lightning_trainer is None:
        trainer.lightning_trainer = lightning_trainer
    with quiet_lightning():
        if evaluation_pass.is_prediction:
            lightning_trainer.predict(module, dataloaders=batches, return_predictions=False)
        else:
            lightning_trainer.validate(module, dataloaders=batches, verbose=False)


def split_callbacks(callbacks: list[Any]) -> tuple[list[Any], list[Any]]:
    """Callbacks of the Trainer's kind, and those of Lightning's kind, which may stand in one list."""
    for_lightning = [callback for callback in callbacks if is_a(callback, "lightning callback")]
    return [callback for callback in callbacks if not is_a(callback, "lightning callback")], for_lightning


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Keep Lightning's start-up messages from the user; levels and filters are put back afterwards."""
    loggers = [logging.getLogger(name) for name in LIGHTNING_LOGGERS]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        for message in SILENCED_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


@contextmanager
def _interrupts_stay_interrupts(events: Any) -> Iterator[None]:
    # On Ctrl-C Lightning ignores further ones and exits with status 1; a Trainer's user gets KeyboardInterrupt, and the
    # handler that was there before.
    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if in_main_thread else None
    try:
        yield
    except SystemExit:
        if isinstance(events.interruption, KeyboardInterrupt):
            raise events.interruption from None
        raise
    finally:
        if in_main_thread and handler is not None:
            signal.signal(signal.SIGINT, handler)
