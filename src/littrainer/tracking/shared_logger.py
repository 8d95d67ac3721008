"""The logger of a `lightning.Trainer` that writes to the run of a tracker."""

from __future__ import annotations

from typing import Any, Protocol

from lightning.pytorch.loggers import Logger


class SharesRun(Protocol):
    """The members of a `TrackerCallback` that a shared logger uses."""

    has_failed: bool

    @property
    def step_metric(self) -> str | None: ...

    def find_lightning_logger(self) -> Any: ...

    def give_up(self, error: BaseException) -> None: ...


class SharedLogger(Logger):
    """Writes to the Lightning logger of a tracker, without ending the run or failing the training.

    Attributes that it does not have are those of the tracker's logger, such as `experiment`. A run that starts with the
    training is found when it is used first.
    """

    def __init__(self, tracker: SharesRun):
        super().__init__()
        self._tracker = tracker

    def _find(self) -> Any:
        """Return the tracker's logger; None before its run has started, and after its service has failed."""
        if self._tracker.has_failed:
            return None
        try:
            return self._tracker.find_lightning_logger()
        except Exception as error:
            self._tracker.give_up(error)
            return None

    def _call(self, method: str, *args: Any, **kwargs: Any) -> None:
        found = self._find()
        try:
            if hasattr(found, method):
                getattr(found, method)(*args, **kwargs)
        except Exception as error:
            self._tracker.give_up(error)

    @property
    def name(self) -> str:
        """Return the name of the run."""
        return getattr(self._find(), "name", None) or ""

    @property
    def version(self) -> int | str:
        """Return the version of the run."""
        version = getattr(self._find(), "version", None)
        return "" if version is None else version

    @property
    def save_dir(self) -> str | None:
        """Return the folder of the logger's files."""
        return getattr(self._find(), "save_dir", None)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Write metrics of Lightning's callbacks."""
        step_metric = self._tracker.step_metric
        if step_metric is None or step is None:
            self._call("log_metrics", metrics, step)
        else:
            self._call("log_metrics", {**metrics, step_metric: step})

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Write hyperparameters of Lightning's callbacks."""
        self._call("log_hyperparams", params, *args, **kwargs)

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Pass on that a checkpoint callback has saved."""
        self._call("after_save_checkpoint", checkpoint_callback)

    def __getattr__(self, name: str) -> Any:
        found = None if name.startswith("_") else self._find()
        if found is None:
            raise AttributeError(f"{name!r}: this logger has no run")
        return getattr(found, name)
