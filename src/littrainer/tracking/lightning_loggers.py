"""Lightning's loggers as trackers, and trackers as Lightning's loggers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from littrainer.callbacks.handler import CallbackHandler
from littrainer.data.limits import KeywordSource, count_development_batches, get_lightning_keywords
from littrainer.runtime.lazy_isinstance import is_a
from littrainer.tracking.base import TrackerCallback, collect_hyperparameters, drop_non_numbers, rename_for_trackers


def _make_event(name: str) -> Callable[..., None]:
    def event(self: LightningLoggersCallback, *args: Any, **kwargs: Any) -> None:
        for tracker in self.trackers:
            getattr(tracker, name)(*args, **kwargs)

    return event


class LightningLoggersCallback(TrackerCallback):
    """Callback for the Lightning loggers in `report_to`, which get the hyperparameters and all logged values.

    Parameters:
        loggers: the loggers.
    """

    service = "lightning"

    def __init__(self, loggers: Iterable[Any]):
        self.trackers = [_LoggerTracker(logger) for logger in loggers]

    on_train_begin, on_log, on_train_end, on_training_failed = map(
        _make_event, ("on_train_begin", "on_log", "on_train_end", "on_training_failed")
    )

    def lightning_loggers(self) -> list[Any]:
        """Return the loggers for a `lightning.Trainer`."""
        return [shared for tracker in self.trackers for shared in tracker.lightning_loggers()]


class _LoggerTracker(TrackerCallback):
    """Tracker of a single Lightning logger, so that others continue if it fails."""

    shares_run = True

    def __init__(self, lightning_logger: Any):
        self.lightning_logger = lightning_logger
        self._is_finalized = False

    @property
    def display_name(self) -> str:
        return type(self.lightning_logger).__name__

    def begin_training(self, args: Any, state: Any) -> None:
        # All trials share the run.
        self._is_finalized = False

    def start_run(self, args: Any, state: Any, model: Any) -> None:
        self.lightning_logger.log_hyperparams(collect_hyperparameters(args, model))

    def write_logs(self, logs: dict[str, Any], args: Any, state: Any, model: Any = None) -> None:
        self.lightning_logger.log_metrics(
            rename_for_trackers(drop_non_numbers(logs, self.display_name)), state.global_step
        )
        if self._is_finalized:
            # Flush loggers that buffer: the training is over.
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
    trackers = [callback for callback in callbacks if isinstance(callback, TrackerCallback)]
    return [shared for tracker in trackers for shared in tracker.lightning_loggers()]


def add_logger_trackers(source: KeywordSource, handler: CallbackHandler) -> None:
    """Add trackers for the loggers in `lightning={"logger": ...}`, as for loggers in `report_to`."""
    keyword = get_lightning_keywords(source).get("logger")
    if not keyword or count_development_batches(source):
        return
    if keyword is True:
        keyword = source.lightning_keywords["logger"] = [_default_logger(source.args.output_dir)]
    callbacks = [callback for callback in handler.callbacks if isinstance(callback, LightningLoggersCallback)]
    present = {id(tracker.lightning_logger) for callback in callbacks for tracker in callback.trackers}
    loggers = keyword if isinstance(keyword, (list, tuple)) else [keyword]
    new = [logger for logger in loggers if id(logger) not in present]
    if new:
        handler.add_callback(LightningLoggersCallback(new))


def _default_logger(folder: str) -> Any:
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    try:
        return TensorBoardLogger(folder)
    except ImportError:
        return CSVLogger(folder)
