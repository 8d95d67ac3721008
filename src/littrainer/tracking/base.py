"""`TrackerCallback`: what the callbacks of all experiment trackers share."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from littrainer.arguments.normalization import tracker_label, trackers_in
from littrainer.arguments.secrets import without_secrets
from littrainer.callbacks.base import TrainerCallback
from littrainer.tracking.services import require_installed

logger = logging.getLogger(__name__)

Event = TypeVar("Event", bound=Callable[..., Any])


def survives_failure(event: Event) -> Event:
    """Let no error of a tracker's event reach the training: it is told once, and the tracker is left alone after it.

    The beginning of the next training tries again. Interruptions (KeyboardInterrupt, SystemExit) pass.
    """

    @functools.wraps(event)
    def guarded(self: TrackerCallback, *args: Any, **kwargs: Any) -> Any:
        if event.__name__ == "on_train_begin":
            self.forget_failure()
        if self.has_failed:
            return None
        try:
            return event(self, *args, **kwargs)
        except Exception as error:
            self.give_up(error)
            return None

    return guarded  # type: ignore[return-value]


class TrackerCallback(TrainerCallback):
    """Reports a training to an experiment tracker. Services derive from it; users override `setup` of theirs.

    A service overrides `setup`, which starts its run, and `write_logs`; further events where it needs them, each
    wrapped in `survives_failure`.

    Raises:
        ImportError: the service's package is not installed.
    """

    service: ClassVar[str] = ""
    """The name of the service in `report_to`."""
    reports_predictions: ClassVar[bool] = False
    """Whether metrics of `predict()` are reported, by `write_prediction_metrics`."""

    # On the class, so that a subclass whose __init__ leaves this one out still has them.
    _initialized: bool = False
    has_failed: bool = False
    """Whether the service has failed; nothing more is reported to it until another training begins."""
    lightning_logger: Any = None
    """The Lightning logger on the service's run, where there is one and `setup` has been called."""
    trial_folder: Path | None = None
    """In a hyperparameter search, the folder of the trial's checkpoints, whose name its run has too."""
    _is_trial: bool = False

    def __init__(self) -> None:
        require_installed(self.service)

    @property
    def shown_name(self) -> str:
        """What warnings call it."""
        return self.service or type(self).__name__

    def setup(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
        """Start a run and write what is known of it; called once, on every process.

        Override it to start the run otherwise; only the process with `state.is_world_process_zero` reports.

        Parameters:
            args: the training arguments.
            state: the Trainer's state.
            model: the model, or None.
            kwargs: what else events are given by keyword, such as `processing_class`; an override names what it needs.
        """

    def write_logs(self, logs: dict[str, Any], args: Any, state: Any, model: Any = None) -> None:
        """Write logged values; called on the first process only.

        Parameters:
            logs: values by name, as `Trainer.log` got them.
            args: the training arguments.
            state: the Trainer's state, whose `global_step` counts the optimizer steps.
            model: the model, or None.
        """

    def write_prediction_metrics(self, metrics: dict[str, Any], args: Any, state: Any) -> None:
        """Write the metrics of `predict()`; called on the first process only, where `reports_predictions`.

        Parameters:
            metrics: values by name.
            args: the training arguments.
            state: the Trainer's state.
        """

    @survives_failure
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Start the run, unless there is one."""
        self.part_from_trial(state)
        self.set_up_once(args, state, model, **kwargs)

    def part_from_trial(self, state: Any) -> None:
        """A training begins: where it is a trial, or follows one, let it have a run of its own."""
        follows_trial, self._is_trial = self._is_trial, state.is_hyper_param_search
        if self._is_trial or follows_trial:
            if follows_trial and self._initialized and state.is_world_process_zero:
                self.end_trial()
            self._initialized = False

    def end_trial(self) -> None:
        """End the run of a trial, if it is open; called on the first process only."""

    def run_name(self, args: Any, state: Any) -> str | None:
        """What a run is called: `args.run_name`, and after it the name of the trial, in a search.

        Parameters:
            args: the training arguments.
            state: the Trainer's state.
        """
        return "-".join(part for part in (args.run_name, self.trial_name(state)) if part) or None

    def trial_name(self, state: Any) -> str | None:
        """What a trial is called, by `hp_name` or else by its folder; None outside of a search."""
        if not state.is_hyper_param_search:
            return None
        return state.trial_name or (None if self.trial_folder is None else self.trial_folder.name)

    @survives_failure
    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Report logged values."""
        self.set_up_once(args, state, model, **kwargs)
        if state.is_world_process_zero:
            self.write_logs(dict(logs or {}), args, state, model)

    @survives_failure
    def on_predict(
        self,
        args: Any,
        state: Any,
        control: Any,
        metrics: dict[str, Any] | None = None,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        """Report the metrics of a prediction, where the service takes them."""
        if not self.reports_predictions:
            return
        self.set_up_once(args, state, model, **kwargs)
        if state.is_world_process_zero:
            self.write_prediction_metrics(dict(metrics or {}), args, state)

    @survives_failure
    def on_training_failed(self, args: Any, state: Any, error: BaseException) -> None:
        """Training has ended with an error or an interruption, and no `on_train_end` will come."""
        if self._initialized and state.is_world_process_zero:
            self.end_failed_run(args, state, error)

    def end_failed_run(self, args: Any, state: Any, error: BaseException) -> None:
        """Mark the run as failed; called on the first process only. By default a trial's run ends as it always does.

        Parameters:
            args: the training arguments.
            state: the Trainer's state.
            error: what ended the training.
        """
        if self._is_trial:
            self.end_trial()

    def set_up_once(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
        """Call `setup`, with the keywords that it takes, unless it has been called."""
        if not self._initialized:
            self.setup(args, state, model, **_accepted(self.setup, kwargs))
            self._initialized = True

    def give_up(self, error: BaseException) -> None:
        """Report nothing more in this training, say why, and let go of the run."""
        self.has_failed = True
        logger.warning(
            "Reporting to %s failed (%s: %.300s). Training goes on, and nothing more is reported there.",
            self.shown_name,
            type(error).__name__,
            next(iter(str(error).splitlines()), ""),
        )
        logger.info("Where reporting to %s failed:", self.shown_name, exc_info=error)
        # What failed once may well fail again.
        with contextlib.suppress(Exception):
            self.release()

    def release(self) -> None:
        """Close the file or end the run that is open, since the service has failed; an error of it is not told."""

    def forget_failure(self) -> None:
        """Be ready to set up again, if the service has failed."""
        if self.has_failed:
            self.has_failed = self._initialized = False

    def card_badge(self) -> str | None:
        """What leads readers of the model card to the run, in Markdown; None where nothing is to be shown."""
        return None

    def lightning_loggers(self) -> list[Any]:
        """Loggers for a `lightning.Trainer`, by which Lightning's callbacks write to the same run."""
        return []


def _accepted(function: Callable[..., Any], keywords: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return keywords
    return {name: value for name, value in keywords.items() if name in parameters}


def model_config_of(model: Any) -> dict[str, Any]:
    """A model's configuration as a dict without secrets; an empty one where it has none."""
    config = getattr(model, "config", None)
    if config is None:
        return {}
    return without_secrets(dict(config) if isinstance(config, dict) else config.to_dict())


def shown_arguments(args: Any) -> dict[str, Any]:
    """The training arguments as plain values, with secrets masked wherever they stand."""
    shown = {**args.to_dict(), "report_to": [tracker_label(tracker) for tracker in trackers_in(args.report_to)]}
    if "lightning" in shown:
        # Loggers and plugins among its values have attributes that tell secrets.
        shown["lightning"] = _plain_or_class_name(args.lightning)
    return without_secrets(shown)


def _plain_or_class_name(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, dict):
        return {name: _plain_or_class_name(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_or_class_name(item) for item in value]
    return getattr(value, "__name__", type(value).__name__)


def hyperparameters(args: Any, model: Any) -> dict[str, Any]:
    """What most services show as the parameters of a run: the model's configuration, and the arguments over it."""
    found = {**model_config_of(model), **shown_arguments(args)}
    peft_config = getattr(model, "peft_config", None)
    return found if peft_config is None else {"peft_config": peft_config, **found}
