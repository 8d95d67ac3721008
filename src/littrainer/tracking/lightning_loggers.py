"""Lightning's loggers as trackers, and trackers as loggers of a `lightning.Trainer`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from littrainer.callbacks.handler import CallbackHandler
from littrainer.data.limits import HasKeywords, development_batches, further_keywords
from littrainer.errors.lazy_isinstance import is_a
from littrainer.tracking.base import (
    TrackerCallback,
    hyperparameters,
    only_numbers,
    survives_failure,
    with_tracked_names,
)

if TYPE_CHECKING:
    pass


# What Lightning reads of a logger -> its value as long as the run has not started.
BEFORE_ITS_RUN = {"name": "", "version": "", "save_dir": None, "log_dir": None, "group_separator": "/"}


class SharedLogger:
    """A Lightning logger that a `lightning.Trainer` may write to, but neither ends nor brings down the training.

    It stands for the logger, `isinstance` included. Its tracker callback starts and ends the run: Lightning's own
    `finalize`, `save` and `log_graph` do nothing.

    Parameters:
        tracker: the callback that it belongs to, told of failures.
        find: gives the logger, or None as long as there is no run.
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
        found = self._found()
        if found is None and name not in BEFORE_ITS_RUN:
            raise AttributeError(f"{name!r}: the run of {self._tracker.shown_name} has not started")
        return BEFORE_ITS_RUN[name] if found is None else getattr(found, name)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Write metrics at an optimizer step."""
        self._guarded("log_metrics", metrics, step)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Write hyperparameters."""
        self._guarded("log_hyperparams", params, *args, **kwargs)

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Lightning's ModelCheckpoint has saved."""
        self._guarded("after_save_checkpoint", checkpoint_callback)

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Nothing: the module that Lightning trains is a wrapper around the model."""

    def save(self) -> None:
        """Nothing: the tracker callback does."""

    def finalize(self, status: str) -> None:
        """Nothing: the tracker callback does, after Lightning's part of a training."""

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


class LightningLoggersCallback(TrackerCallback):
    """Reports to Lightning loggers, as `report_to` may hold them: hyperparameters once, and each logged value.

    Parameters:
        loggers: the loggers.
    """

    service = "lightning"

    def __init__(self, loggers: Iterable[Any]):
        self.trackers = [_OneLogger(logger) for logger in loggers]

    @property
    def loggers(self) -> list[Any]:
        """The loggers as they were given."""
        return [tracker.lightning_logger for tracker in self.trackers]

    @survives_failure
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Write the hyperparameters to those that have none, and try those again that failed."""
        self._initialized = True
        for tracker in self.trackers:
            tracker.on_train_begin(args, state, control, model)

    def setup(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
        """Write the hyperparameters."""
        for tracker in self.trackers:
            tracker.begin(args, state, model)

    def write_logs(self, logs: dict[str, Any], args: Any, state: Any, model: Any = None) -> None:
        """Write metrics under the names that trackers show."""
        for tracker in self.trackers:
            tracker.write(logs, state)

    def end_run(self, args: Any, state: Any, model: Any, processing_class: Any) -> None:
        """End each logger's run."""
        for tracker in self.trackers:
            tracker.finalize("success", state)

    def end_failed_run(self, args: Any, state: Any, error: BaseException) -> None:
        """End each logger's run as a failed one, unless it was pruned."""
        for tracker in self.trackers:
            tracker.finalize("success" if is_a(error, "pruned trial") else "failed", state)

    def lightning_loggers(self) -> list[Any]:
        """The loggers, for a `lightning.Trainer`."""
        return [shared for tracker in self.trackers for shared in tracker.lightning_loggers()]


class _OneLogger(TrackerCallback):
    """One of several loggers: when it fails, the others go on."""

    def __init__(self, lightning_logger: Any):
        self.lightning_logger = lightning_logger
        self._is_over = False

    @property
    def shown_name(self) -> str:
        return type(self.lightning_logger).__name__

    @survives_failure
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._is_over = False
        self.set_up_once(args, state, model)

    @survives_failure
    def begin(self, args: Any, state: Any, model: Any) -> None:
        self.set_up_once(args, state, model)

    def setup(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.lightning_logger.log_hyperparams(hyperparameters(args, model))

    @survives_failure
    def write(self, logs: dict[str, Any], state: Any) -> None:
        self.lightning_logger.log_metrics(with_tracked_names(only_numbers(logs, self.shown_name)), state.global_step)
        if self._is_over:
            # Some loggers keep values back, and no end of a training follows.
            getattr(self.lightning_logger, "save", _nothing)()

    @survives_failure
    def finalize(self, status: str, state: Any) -> None:
        was_over, self._is_over = self._is_over, True
        if state.is_world_process_zero and not was_over:
            self.lightning_logger.finalize(status)

    def release(self) -> None:
        if not self._is_over:
            self._is_over = True
            self.lightning_logger.finalize("failed")

    def lightning_loggers(self) -> list[Any]:
        return [SharedLogger(self, lambda: self.lightning_logger)]


def loggers_of(callbacks: Iterable[Any]) -> list[Any]:
    """Return loggers for a `lightning.Trainer`, on the runs of the trackers among a Trainer's callbacks.

    Lightning's callbacks write to them. What a tracker callback starts only when training begins is found when it is
    used first.
    """
    trackers = [callback for callback in callbacks if isinstance(callback, TrackerCallback)]
    return [shared for tracker in trackers for shared in tracker.lightning_loggers()]


def adopt_loggers(source: HasKeywords, handler: CallbackHandler) -> None:
    """Make trackers of the loggers that were given by `lightning={"logger": ...}`, as `report_to` has them.

    Parameters:
        source: what the keywords for `lightning.Trainer` were given to.
        handler: takes the trackers.
    """
    given = further_keywords(source).get("logger")
    if development_batches(source):
        return
    if given is True:
        given = source.lightning_keywords["logger"] = [_lightnings_choice_of_logger(source.args.output_dir)]
    known = [
        logger
        for callback in handler.callbacks
        if isinstance(callback, LightningLoggersCallback)
        for logger in callback.loggers
    ]
    several = given if isinstance(given, (list, tuple)) else [given] if given else []
    new = [logger for logger in several if all(logger is not one for one in known)]
    if new:
        handler.add_callback(LightningLoggersCallback(new))


def _lightnings_choice_of_logger(folder: str) -> Any:
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    try:
        return TensorBoardLogger(folder)
    except ImportError:
        return CSVLogger(folder)
