"""A logger for `lightning.Trainer` that writes to a tracker's run."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.loggers import Logger


class SharedLogger(Logger):
    """Proxy of a tracker's Lightning logger that neither ends the run nor fails the training.

    Other attributes, such as `experiment`, are read from the tracker's logger. The run may start after this logger.

    Parameters:
        tracker: a `TrackerCallback`.
    """

    def __init__(self, tracker: Any):
        super().__init__()
        self._tracker = tracker

    def _find(self) -> Any:
        """Return None before the run's start, and after a failure of the service."""
        if self._tracker.has_failed:
            return None
        try:
            return self._tracker.find_lightning_logger()
        except Exception as error:
            self._tracker.give_up(error)
            return None

    def _call(self, method: str, *args: Any, **kwargs: Any) -> None:
        logger = self._find()
        try:
            if hasattr(logger, method):
                getattr(logger, method)(*args, **kwargs)
        except Exception as error:
            self._tracker.give_up(error)

    @property
    def name(self) -> str:
        return getattr(self._find(), "name", None) or ""

    @property
    def version(self) -> int | str:
        version = getattr(self._find(), "version", None)
        return "" if version is None else version

    @property
    def save_dir(self) -> str | None:
        return getattr(self._find(), "save_dir", None)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        step_metric = self._tracker.step_metric
        if step_metric is None or step is None:
            self._call("log_metrics", metrics, step)
        else:
            self._call("log_metrics", {**metrics, step_metric: step})

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self._call("log_hyperparams", params, *args, **kwargs)

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        self._call("after_save_checkpoint", checkpoint_callback)

    def __getattr__(self, name: str) -> Any:
        logger = None if name.startswith("_") else self._find()
        if logger is None:
            raise AttributeError(f"{name!r}: this logger has no run")
        return getattr(logger, name)
