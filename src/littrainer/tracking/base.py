"""Base class of callbacks for experiment trackers, and conversions of metrics and arguments."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import logging
import numbers
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from littrainer.arguments.report_to import format_tracker, list_trackers, require_installed
from littrainer.arguments.secrets import redact_secrets
from littrainer.callbacks.base import TrainerCallback
from littrainer.checkpoint.layout import PREFIX_CHECKPOINT_DIR

logger = logging.getLogger(__name__)

Event = TypeVar("Event", bound=Callable[..., Any])


def survives_failure(event: Event) -> Event:
    """Convert an error of a tracker's event to a warning, and disable the tracker until the next training.

    Interruptions (KeyboardInterrupt, SystemExit) pass.
    """

    @functools.wraps(event)
    def guarded(self: TrackerCallback, *args: Any, **kwargs: Any) -> Any:
        if event.__name__ == "on_train_begin" and self.has_failed:
            self.has_failed = self._initialized = False
        if self.has_failed:
            return None
        try:
            return event(self, *args, **kwargs)
        except Exception as error:
            self.give_up(error)
            return None

    return guarded  # type: ignore[return-value]


class TrackerCallback(TrainerCallback):
    """Base class of the callbacks for experiment trackers; users may override `setup` of a service's callback.

    A service overrides `start_run` and `write_logs`, and wraps further events in `survives_failure`. All methods except
    `setup` are called on the first process only. They get the training arguments, the Trainer's state (its
    `global_step` counts optimizer steps), and the model, or None.

    Raises:
        ImportError: the service's package is not installed.
    """

    service: ClassVar[str] = ""
    """The name of the service in `report_to`."""
    reports_predictions: ClassVar[bool] = False
    """Whether metrics of `predict()` are reported, by `write_prediction_metrics`."""
    shares_run: ClassVar[bool] = False
    """Whether Lightning's callbacks write to the same run, with the logger of `find_lightning_logger`."""
    step_metric: ClassVar[str | None] = None
    """The metric on the horizontal axis of the service's curves; None: the service counts steps."""
    uploads_checkpoints: bool = False
    """Whether checkpoints are uploaded, by `write_checkpoint`."""

    # On the class, for subclasses that do not call __init__.
    _initialized: bool = False
    has_failed: bool = False
    """Whether the service has failed; it is disabled until the next training."""
    lightning_logger: Any = None
    """The Lightning logger on the service's run, after `setup`."""
    trial_folder: Path | None = None
    """The folder of a trial's checkpoints, whose name the trial's run has."""
    _is_trial: bool = False

    def __init__(self) -> None:
        require_installed(self.service)

    @property
    def display_name(self) -> str:
        return self.service or type(self).__name__

    # ---- Overridden by services --------------------------------------------------------------------------------------

    def setup(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
        """Start reporting; called once, on every process. Override it to start the run in another way.

        Parameters:
            args, state, model: the training arguments, the Trainer's state, and the model, or None.
            kwargs: the other keywords of events, such as `processing_class`; an override names the keywords it needs.
        """
        self._initialized = True
        if state.is_world_process_zero:
            self.start_run(args, state, model)

    def start_run(self, args: Any, state: Any, model: Any) -> None:
        """Start a run and write its parameters.

        Parameters:
            args, state, model: as in `setup`.
        """

    def write_logs(self, logs: dict[str, Any], args: Any, state: Any, model: Any = None) -> None:
        """Write values by name, as passed to `Trainer.log`.

        Parameters:
            logs: the values.
            args, state, model: as in `setup`; `state.global_step` counts optimizer steps.
        """

    def write_prediction_metrics(self, metrics: dict[str, Any], args: Any, state: Any) -> None:
        """Write the metrics of `predict()`, if `reports_predictions`.

        Parameters:
            metrics: values by name.
            args, state: as in `setup`.
        """

    def write_checkpoint(self, folder: Path, args: Any, state: Any) -> None:
        """Upload a checkpoint from its folder, if `uploads_checkpoints`.

        Parameters:
            folder: the checkpoint's.
            args, state: as in `setup`.
        """

    def end_run(self, args: Any, state: Any, model: Any, processing_class: Any) -> None:
        """Write the results of a training, and end its run.

        Parameters:
            args, state, model: as in `setup`.
            processing_class: the tokenizer or processor, or None.
        """

    def end_failed_run(self, args: Any, state: Any, error: BaseException) -> None:
        """Mark the run as failed by an error or interruption. By default it calls `release`, or `end_trial`.

        Parameters:
            args, state: as in `setup`.
            error: the error that ended the training.
        """
        (self.end_trial if self._is_trial else self.release)()

    def end_trial(self) -> None:
        """End the run of a trial, if it is open. By default it calls `release`."""
        self.release()

    def release(self) -> None:
        """Close the open file or run after a failure."""

    def card_badge(self) -> str | None:
        """Return a link to the run for the model card, in Markdown, or None."""
        return None

    def find_lightning_logger(self) -> Any:
        """Return the Lightning logger on the run, or None before there is a run."""
        return self.lightning_logger

    def lightning_loggers(self) -> list[Any]:
        """Return loggers for a `lightning.Trainer`, so that Lightning's callbacks write to the same run."""
        if not self.shares_run:
            return []
        from littrainer.tracking.shared_logger import SharedLogger

        return [SharedLogger(self)]

    # ---- Names -------------------------------------------------------------------------------------------------------

    def run_name(self, args: Any, state: Any) -> str | None:
        """Return the name of the run: `args.run_name`, followed by the name of the trial in a search.

        Parameters:
            args, state: as in `setup`.
        """
        return "-".join(part for part in (args.run_name, self.trial_name(state)) if part) or None

    def trial_name(self, state: Any) -> str | None:
        """Return the trial's name from `hp_name`, or else of its folder; None outside of a search."""
        if not state.is_hyper_param_search:
            return None
        return state.trial_name or (None if self.trial_folder is None else self.trial_folder.name)

    # ---- Events ------------------------------------------------------------------------------------------------------

    @survives_failure
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.begin_training(args, state)
        self.set_up_once(args, state, model, **kwargs)

    def begin_training(self, args: Any, state: Any) -> None:
        """Start a new run for each trial, and for a training after trials."""
        follows_trial, self._is_trial = self._is_trial, state.is_hyper_param_search
        if self._is_trial or follows_trial:
            if follows_trial and self._initialized and state.is_world_process_zero:
                self.end_trial()
            self._initialized = False

    def set_up_once(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
        """Call `setup` once, with the keywords that it accepts."""
        if not self._initialized:
            parameters = inspect.signature(self.setup).parameters
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
                kwargs = {name: value for name, value in kwargs.items() if name in parameters}
            self.setup(args, state, model, **kwargs)
            self._initialized = True

    @survives_failure
    def on_log(self, args: Any, state: Any, control: Any, model: Any = None, logs: Any = None, **kwargs: Any) -> None:
        self.set_up_once(args, state, model, **kwargs)
        if state.is_world_process_zero:
            self.write_logs(dict(logs or {}), args, state, model)

    @survives_failure
    def on_predict(
        self, args: Any, state: Any, control: Any, metrics: Any = None, model: Any = None, **kwargs: Any
    ) -> None:
        if self.reports_predictions:
            self.set_up_once(args, state, model, **kwargs)
            if state.is_world_process_zero:
                self.write_prediction_metrics(dict(metrics or {}), args, state)

    @survives_failure
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.uploads_checkpoints and self._initialized and state.is_world_process_zero:
            folder = Path(self.trial_folder or args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
            if folder.is_dir():
                self.write_checkpoint(folder, args, state)
            else:
                logger.warning("The checkpoint %s is not uploaded, since there is no such folder.", folder)

    @survives_failure
    def on_train_end(
        self, args: Any, state: Any, control: Any, model: Any = None, processing_class: Any = None, **kwargs: Any
    ) -> None:
        if self._initialized and state.is_world_process_zero:
            self.end_run(args, state, model, processing_class)

    @survives_failure
    def on_training_failed(self, args: Any, state: Any, error: BaseException) -> None:
        if self._initialized and state.is_world_process_zero:
            self.end_failed_run(args, state, error)

    def give_up(self, error: BaseException) -> None:
        """Disable the tracker for this training, log the reason, and release the run."""
        self.has_failed = True
        logger.warning(
            "Reporting to %s failed (%s: %.300s). Training continues, and nothing more is reported there.",
            self.display_name,
            type(error).__name__,
            next(iter(str(error).splitlines()), ""),
        )
        logger.info("Traceback of the failure of %s:", self.display_name, exc_info=error)
        # The service may fail again.
        with contextlib.suppress(Exception):
            self.release()


def get_model_config(model: Any) -> dict[str, Any]:
    config = getattr(model, "config", None)
    if config is None:
        return {}
    return redact_secrets(dict(config) if isinstance(config, dict) else config.to_dict())


def mask_arguments(args: Any) -> dict[str, Any]:
    values = {**args.to_dict(), "report_to": [format_tracker(tracker) for tracker in list_trackers(args.report_to)]}
    if "lightning" in values:
        # Loggers and plugins may have secrets as attributes.
        values["lightning"] = json.loads(json.dumps(args.lightning, default=_path_or_class_name))
    return redact_secrets(values)


def _path_or_class_name(value: Any) -> str:
    return os.fspath(value) if isinstance(value, os.PathLike) else getattr(value, "__name__", type(value).__name__)


def collect_hyperparameters(args: Any, model: Any) -> dict[str, Any]:
    parameters = {**get_model_config(model), **mask_arguments(args)}
    peft_config = getattr(model, "peft_config", None)
    return parameters if peft_config is None else {"peft_config": peft_config, **parameters}


# ---- Names and values of metrics -------------------------------------------------------------------------------------

# Prefixes of metrics; values without such a prefix belong to the training.
PREFIXED_SPLITS = ("eval", "test")

# Results of a training, which some services store in the run's summary and not as curves.
SUMMARY_VALUES = ("train_loss", "total_flos", "train_runtime", "train_samples_per_second", "train_steps_per_second")


def rename_for_trackers(logs: dict[str, Any]) -> dict[str, Any]:
    """Return logged values under the names that trackers show: `train/loss`, `eval/accuracy`."""
    renamed = {}
    for name, value in logs.items():
        split, has_prefix, metric = name.partition("_")
        renamed[f"{split}/{metric}" if has_prefix and split in PREFIXED_SPLITS else f"train/{name}"] = value
    return renamed


def drop_summary_values(logs: dict[str, Any]) -> dict[str, Any]:
    return rename_for_trackers({name: value for name, value in logs.items() if name not in SUMMARY_VALUES})


def convert_to_number(value: Any) -> float | int | None:
    """Return a number, or a tensor or array with a single element, as a Python number; None for other values."""
    if isinstance(value, numbers.Real):
        return value if isinstance(value, (int, float)) else float(value)
    if getattr(value, "size", None) == 1 or (hasattr(value, "numel") and value.numel() == 1):
        number = value.item()
        return number if isinstance(number, (int, float)) else None
    return None


def drop_non_numbers(logs: dict[str, Any], service: str) -> dict[str, float | int]:
    """Return the numeric values; warn once about each other value."""
    values = {name: convert_to_number(value) for name, value in logs.items()}
    for name, number in values.items():
        if number is None:
            warn_not_a_number(service, name, type(logs[name]).__name__)
    return {name: number for name, number in values.items() if number is not None}


@functools.cache
def warn_not_a_number(service: str, name: str, kind: str) -> None:
    logger.warning("%s: the logged value %r is left out, because it is a %s and not a number.", service, name, kind)


def write_final_model(folder: str, args: Any, model: Any, processing_class: Any) -> None:
    from littrainer.checkpoint.weights import write_weights
    from littrainer.checkpoint.writer import write_tokenizer_and_args

    write_weights(model, folder)
    write_tokenizer_and_args(folder, args, processing_class)
