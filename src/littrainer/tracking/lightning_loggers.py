"""Lightning's loggers as trackers, and trackers as loggers of a `lightning.Trainer`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from littrainer.callbacks.handler import CallbackHandler
from littrainer.data.limits import HasKeywords, development_batches, further_keywords
from littrainer.errors.lazy_isinstance import is_a
from littrainer.tracking.base import TrackerCallback, hyperparameters, only_numbers, with_tracked_names

# What Lightning reads from a logger -> its value before the run starts.
BEFORE_ITS_RUN = {"name": "", "version": "", "save_dir": None, "log_dir": None, "group_separator": "/"}
# Methods of a shared logger with which Lightning writes, and methods that only its tracker calls. What Lightning trains
# is a wrapper around the model, whose graph nobody wants.
WRITING = ("log_metrics", "log_hyperparams", "after_save_checkpoint")
OF_THE_TRACKER = ("log_graph", "save", "finalize")


class SharedLogger:
    """A Lightning logger that a `lightning.Trainer` may write to, without ending the run or failing the training.

    It behaves as the logger, `isinstance` included. Its tracker callback starts and ends the run.

    Parameters:
        tracker: the callback that it belongs to; it is called when the logger fails.
        find: returns the logger, or None before there is a run.
    """

    def __init__(self, tracker: TrackerCallback, find: Callable[[], Any]):
        self._tracker = tracker
        self._find = find

    def _found(self) -> Any:
        if self._tracker.has_failed:
            return None
        try:
            return self._find()
        except Exception as error:
            self._tracker.give_up(error)
            return None

    @property
    def __class__(self) -> type:
        from lightning.pytorch.loggers import Logger

        found = self._found()
        return Logger if found is None else type(found)

    @__class__.setter
    def __class__(self, value: type) -> None:
        raise AttributeError("the class of a shared logger is that of its logger")

    def __getattr__(self, name: str) -> Any:
        if name in WRITING:
            return functools.partial(self._guarded, name)
        if name in OF_THE_TRACKER:
            return _nothing
        found = self._found()
        if found is None and name not in BEFORE_ITS_RUN:
            raise AttributeError(f"{name!r}: the run of {self._tracker.shown_name} has not started")
        return BEFORE_ITS_RUN[name] if found is None else getattr(found, name)

    def _guarded(self, method: str, *args: Any, **kwargs: Any) -> None:
        found = self._found()
        if found is None:
            return
        try:
            getattr(found, method, _nothing)(*args, **kwargs)
        except Exception as error:
            self._tracker.give_up(error)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _for_each_tracker(name: str) -> Any:
    def event(self: LightningLoggersCallback, *given: Any, **keywords: Any) -> None:
        for tracker in self.trackers:
            getattr(tracker, name)(*given, **keywords)

    return event


class LightningLoggersCallback(TrackerCallback):
    """Reports to the Lightning loggers in `report_to`: hyperparameters once, and each logged value.

    Parameters:
        loggers: the loggers.
    """

    service = "lightning"

    def __init__(self, loggers: Iterable[Any]):
        self.trackers = [_OneLogger(logger) for logger in loggers]

    @property
    def loggers(self) -> list[Any]:
        """Return the loggers that were given."""
        return [tracker.lightning_logger for tracker in self.trackers]

    on_train_begin, on_log, on_train_end, on_training_failed = map(
        _for_each_tracker, ("on_train_begin", "on_log", "on_train_end", "on_training_failed")
    )

    def lightning_loggers(self) -> list[Any]:
        """Return the loggers for a `lightning.Trainer`."""
        return [shared for tracker in self.trackers for shared in tracker.lightning_loggers()]


class _OneLogger(TrackerCallback):
    """One of several loggers; if it fails, the others go on."""

    def __init__(self, lightning_logger: Any):
        self.lightning_logger = lightning_logger
        self._is_over = False

    @property
    def shown_name(self) -> str:
        return type(self.lightning_logger).__name__

    def begin_training(self, args: Any, state: Any) -> None:
        # All trials are one run.
        self._is_over = False

    def start_run(self, args: Any, state: Any, model: Any) -> None:
        self.lightning_logger.log_hyperparams(hyperparameters(args, model))

    def write_logs(self, logs: dict[str, Any], args: Any, state: Any, model: Any = None) -> None:
        self.lightning_logger.log_metrics(with_tracked_names(only_numbers(logs, self.shown_name)), state.global_step)
        if self._is_over:
            # Some loggers keep values back, and no end of a training follows.
            getattr(self.lightning_logger, "save", _nothing)()

    def end_run(self, args: Any, state: Any, model: Any, processing_class: Any) -> None:
        self._finalize("success")

    def end_failed_run(self, args: Any, state: Any, error: BaseException) -> None:
        self._finalize("success" if is_a(error, "pruned trial") else "failed")

    def release(self) -> None:
        self._finalize("failed")

    def _finalize(self, status: str) -> None:
        if not self._is_over:
            self._is_over = True
            self.lightning_logger.finalize(status)

    def lightning_loggers(self) -> list[Any]:
        return [SharedLogger(self, lambda: self.lightning_logger)]


def loggers_of(callbacks: Iterable[Any]) -> list[Any]:
    """Return loggers for a `lightning.Trainer` that write to the runs of a Trainer's trackers.

    Lightning's callbacks write to them. A run that starts with the training is found when it is used first.
    """
    trackers = [callback for callback in callbacks if isinstance(callback, TrackerCallback)]
    return [shared for tracker in trackers for shared in tracker.lightning_loggers()]


def adopt_loggers(source: HasKeywords, handler: CallbackHandler) -> None:
    """Add trackers for the loggers in `lightning={"logger": ...}`, as for loggers in `report_to`.

    Parameters:
        source: holds the keywords for `lightning.Trainer`.
        handler: gets the trackers.
    """
    given = further_keywords(source).get("logger")
    if development_batches(source):
        return
    if given is True:
        given = source.lightning_keywords["logger"] = [_lightnings_choice_of_logger(source.args.output_dir)]
    callbacks = (one for one in handler.callbacks if isinstance(one, LightningLoggersCallback))
    known = {id(logger) for callback in callbacks for logger in callback.loggers}
    several = given if isinstance(given, (list, tuple)) else [given] if given else []
    new = [logger for logger in several if id(logger) not in known]
    if new:
        handler.add_callback(LightningLoggersCallback(new))


def _lightnings_choice_of_logger(folder: str) -> Any:
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    try:
        return TensorBoardLogger(folder)
    except ImportError:
        return CSVLogger(folder)
