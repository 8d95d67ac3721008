"""From Lightning's hooks to the Trainer's events, and from what Lightning's callbacks log to its history."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyExperiment

from littrainer.callbacks.lightning_metrics import COUNTS, is_number
from littrainer.callbacks.state import TrainerState
from littrainer.data.windows import MicroBatch
from littrainer.engine.lightning_internals import announce_validations
from littrainer.errors.interruptions import carries_stop_iteration

logger = logging.getLogger(__name__)


class _Events(pl.Callback):
    # Of the training its methods are called by name: it knows the engine, which makes these callbacks.
    def __init__(self, run: Any):
        self.run = run
        self._stop_was_asked_for = False


class OpeningEvents(_Events):
    """Tells a training what Lightning is about to do, before other Lightning callbacks hear of it.

    Parameters:
        run: the training.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Callbacks are set up next; some make ready for evaluations where there are any."""
        announce_validations(trainer, pl_module, are_announced=True)

    @carries_stop_iteration
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Callbacks are set up."""
        announce_validations(trainer, pl_module, are_announced=False)
        self.run.restore_lightning_callbacks()

    @carries_stop_iteration
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Model and optimizer are set up."""
        self.run.restore()

    @carries_stop_iteration
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """An epoch comes next."""
        self.run.begin_epoch(trainer.current_epoch)

    @carries_stop_iteration
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: MicroBatch, batch_idx: int) -> None:
        """A micro-batch comes next."""
        if batch_idx == 0:
            behind = self.run.take_micro_batches_behind()
            if behind:
                # Those of a resumed epoch that are not drawn again; Lightning's end of an epoch goes by all of them.
                trainer.fit_loop.epoch_loop.batch_progress.increment_by(behind)
        pl_module.follow_window(batch)
        self.run.step.begin_micro_batch(batch)


class ClosingEvents(_Events):
    """Tells a training what Lightning has done, after other Lightning callbacks have heard of it.

    So what they keep belongs to the same step when an evaluation or a checkpoint follows. When to stop is told from one
    side to the other.

    Parameters:
        run: the training.
    """

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Callbacks have the states of a checkpoint. Where one asks to stop now, Lightning would not begin at all."""
        self._note_stop(trainer)

    @carries_stop_iteration
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The first epoch comes next."""
        self.run.begin()
        if self._stop_was_asked_for:
            self.run.trainer.control.should_training_stop = True
        # What a Trainer callback asks for when training begins is done after the first micro-batch; here ends what a
        # Lightning callback, or work left over by the checkpoint, has ended.
        if self._stop_was_asked_for or self.run.evaluation_due is not None or self.run.epoch_end_is_due:
            self._stop_if_asked(trainer)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Callbacks have made their changes for an epoch."""
        pl_module.follow_replacements()
        self.run.note_schedule([config.scheduler for config in trainer.lr_scheduler_configs])

    @carries_stop_iteration
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: MicroBatch, batch_idx: int
    ) -> None:
        """A micro-batch is done, the optimizer and its schedule have stepped where it was the last of its window."""
        self._note_stop(trainer)
        if self._stop_was_asked_for and batch.closes_window:
            self.run.trainer.control.should_training_stop = True
        self.run.step.end_micro_batch(batch)
        self._stop_if_asked(trainer)

    @carries_stop_iteration
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """An epoch is done."""
        self._note_stop(trainer)
        if self._stop_was_asked_for:
            self.run.trainer.control.should_training_stop = True
        self.run.end_epoch()
        self._stop_if_asked(trainer)

    def _note_stop(self, pl_trainer: pl.Trainer) -> None:
        # Lightning would stop within the window of an optimizer step. The Trainer stops where one is complete.
        if pl_trainer.should_stop:
            self._stop_was_asked_for = True
            pl_trainer.should_stop = False

    def _stop_if_asked(self, pl_trainer: pl.Trainer) -> None:
        if self.run.trainer.control.should_training_stop:
            pl_trainer.should_stop = True


class TrainerEvents(OpeningEvents, ClosingEvents):
    """Both in one, where there are no other callbacks to be first or last among."""

    @carries_stop_iteration
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Model and optimizer are set up, the first epoch comes next."""
        OpeningEvents.on_train_start(self, trainer, pl_module)
        ClosingEvents.on_train_start(self, trainer, pl_module)

    @carries_stop_iteration
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """An epoch comes next."""
        OpeningEvents.on_train_epoch_start(self, trainer, pl_module)
        pl_module.follow_replacements()


def events_around(callbacks: list[Any], run: Any) -> list[Any]:
    """Lightning callbacks, with the events of a training before and after them."""
    if not callbacks:
        return [TrainerEvents(run)]
    return [OpeningEvents(run), *callbacks, ClosingEvents(run)]


def users_callbacks(pl_trainer: pl.Trainer) -> list[Any]:
    """The Lightning callbacks beside the Trainer's own."""
    return [callback for callback in pl_trainer.callbacks if not isinstance(callback, _Events)]  # type: ignore[attr-defined]


class _NothingIsKept(DummyExperiment):
    has_told = False

    def nop(self, *args: Any, **kwargs: Any) -> None:
        if not self.has_told:
            self.has_told = True
            logger.warning(
                "A Lightning callback writes to `logger.experiment`, and no tracker is there to keep that. Set "
                "report_to to the one it is made for."
            )


class HistoryLogger(Logger):
    """Adds what Lightning's callbacks log to `state.log_history`, which checkpoints keep and reports show.

    They may log at every micro-batch, and checkpoints would hold an entry for each. So only the newest values are kept,
    and added when the Trainer logs. Nothing is printed, and no event of the Trainer's callbacks comes of it.

    Parameters:
        state: returns the state whose history it is.
    """

    def __init__(self, state: Callable[[], TrainerState]):
        super().__init__()
        self._state = state
        # Name -> the optimizer step at which it was logged last, and its value.
        self._newest: dict[str, tuple[int, float]] = {}
        self._experiment = _NothingIsKept()

    @property
    def name(self) -> str:
        """None, so that it makes no folder of callbacks that save."""
        return ""

    @property
    def version(self) -> str:
        """None, as there is no name."""
        return ""

    @property
    def experiment(self) -> Any:
        """Takes what callbacks write to the object of a service, as pictures, and keeps nothing of it; says so once."""
        return self._experiment

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Keep values until the Trainer logs; newer ones of a name take the place of older ones."""
        # Lightning's step is a number of batches in some cases. Its epoch counts complete ones only.
        now = self._state().global_step
        numbers = {name: value for name, value in metrics.items() if is_number(value) and name not in COUNTS}
        self._newest.update((name, (now, float(value))) for name, value in numbers.items())

    def add_to_history(self) -> None:
        """Add what is new to the history, as one entry for each optimizer step."""
        for step in sorted({step for step, _ in self._newest.values()}):
            values = {name: value for name, (of, value) in self._newest.items() if of == step}
            self._state().log_history.append({**values, "step": step})
        self._newest = {}

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: the arguments are saved beside the model."""
