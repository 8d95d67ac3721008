"""Lightning's loggers as trackers, and trackers as loggers of a `lightning.Trainer`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from littrainer.callbacks.handler import CallbackHandler
from littrainer.data.limits import KeywordSource, count_development_batches, get_lightning_keywords
from littrainer.runtime.lazy_isinstance import is_a
from littrainer.tracking.base import TrackerCallback, drop_non_numbers, hyperparameters, rename_for_trackers


def _for_each_tracker(name: str) -> Callable[..., None]:
    def event(self: LightningLoggersCallback, *args: Any, **kwargs: Any) -> None:
        for tracker in self.trackers:
            getattr(tracker, name)(*args, **kwargs)

    return event


class LightningLoggersCallback(TrackerCallback):
    """Reports to the Lightning loggers in `report_to`: hyperparameters once, and each logged value.

    Parameters:
        loggers: the loggers.
    """

    service = "lightning"

    def __init__(self, loggers: Iterable[Any]):
        self.trackers = [_LoggerTracker(logger) for logger in loggers]

    on_train_begin, on_log, on_train_end, on_training_failed = map(
        _for_each_tracker, ("on_train_begin", "on_log", "on_train_end", "on_training_failed")
    )

    def lightning_loggers(self) -> list[Any]:
        """Return the loggers for a `lightning.Trainer`."""
        return [shared for tracker in self.trackers for shared in tracker.lightning_loggers()]


class _LoggerTracker(TrackerCallback):
    """Reports to a Lightning logger; if it fails, the others continue."""

    shares_run = True

    def __init__(self, lightning_logger: Any):
        self.lightning_logger = lightning_logger
        self._is_finalized = False

    @property
    def display_name(self) -> str:
        return type(self.lightning_logger).__name__

    def begin_training(self, args: Any, state: Any) -> None:
        # All trials are one run.
        self._is_finalized = False

    def start_run(self, args: Any, state: Any, model: Any) -> None:
        self.lightning_logger.log_hyperparams(hyperparameters(args, model))

    def write_logs(self, logs: dict[str, Any], args: Any, state: Any, model: Any = None) -> None:
        self.lightning_logger.log_metrics(
            rename_for_trackers(drop_non_numbers(logs, self.display_name)), state.global_step
        )
        if self._is_finalized:
            # Some loggers buffer values, and no end of a training follows.
            self.lightning_logger.save()

    def end_run(self, args: Any, state: Any, model: Any, processing_class: Any) -> None:
        self._finalize("success")

    def end_failed_run(self, args: Any, state: Any, error: BaseException) -> None:
        self._finalize("success" if is_a(error, "pruned trial") else "failed")

    def release(self) -> None:
        self._finalize("failed")

    def _finalize(self, status: str) -> None:
        if not self._is_finalized:
            self._is_finalized = True
            self.lightning_logger.finalize(status)


def get_shared_loggers(callbacks: Iterable[Any]) -> list[Any]:
    """Return loggers for a `lightning.Trainer` that write to the runs of a Trainer's trackers."""
    trackers = [callback for callback in callbacks if isinstance(callback, TrackerCallback)]
    return [shared for tracker in trackers for shared in tracker.lightning_loggers()]


def add_logger_trackers(source: KeywordSource, handler: CallbackHandler) -> None:
    """Add trackers for the loggers in `lightning={"logger": ...}`, as for loggers in `report_to`.

    Parameters:
        source: holds the keywords for `lightning.Trainer`.
        handler: gets the trackers.
    """
    keyword = get_lightning_keywords(source).get("logger")
    if count_development_batches(source):
        return
    if keyword is True:
        keyword = source.lightning_keywords["logger"] = [_default_logger(source.args.output_dir)]
    callbacks = [callback for callback in handler.callbacks if isinstance(callback, LightningLoggersCallback)]
    present = {id(tracker.lightning_logger) for callback in callbacks for tracker in callback.trackers}
    loggers = keyword if isinstance(keyword, (list, tuple)) else [keyword] if keyword else []
    new = [logger for logger in loggers if id(logger) not in present]
    if new:
        handler.add_callback(LightningLoggersCallback(new))


def _default_logger(folder: str) -> Any:
    """Return the logger that Lightning makes for `logger=True`."""
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    try:
        return TensorBoardLogger(folder)
    except ImportError:
        return CSVLogger(folder)
