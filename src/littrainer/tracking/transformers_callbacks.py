"""Services that transformers' own callbacks report to, with secrets masked and failures turned into one warning.

`CometCallback` and the others are attributes of this module, which are made when they are first used: each is a
subclass of transformers' class of the same name, so that scripts can override its `setup`.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from littrainer.arguments.report_to import SERVICES, require_installed
from littrainer.arguments.secrets import redact_secrets
from littrainer.callbacks.base import TrainerCallback
from littrainer.redirection.shim import import_original
from littrainer.tracking.base import (
    TrackerCallback,
    drop_non_numbers,
    mask_arguments,
    survives_failure,
    write_final_model,
)

THEIR_MODULE = "transformers.integrations.integration_utils"
EVENTS_OF_STEPS = ("on_step_begin", "on_step_end", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step")
EVENTS = [name for name in vars(TrainerCallback) if name.startswith("on_")]
# Services whose runs end with a failed training; other runs stay open, so that their clients mark them as failed.
ENDED_BY_FAILURES = ("codecarbon", "dvclive")


class TransformersTracker(TrackerCallback):
    """A callback of transformers that reports to an experiment tracker."""

    def on_training_failed(self, args: Any, state: Any, error: BaseException) -> None:
        """End the run of a trial, and of a service that measures or writes until its end."""
        if state.is_hyper_param_search or self.service in ENDED_BY_FAILURES:
            self.on_train_end(args, state, None)


class _ClearML(TransformersTracker):
    """Starts another task if the one of the last training was closed: transformers' callback would lose all values."""

    _clearml: Any
    _clearml_task: Any = None
    _should_close_on_train_end: bool | None

    @survives_failure
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self._clearml_task is not None and self._clearml.Task.current_task() is None:
            self._clearml_task = None
            self._initialized = False
        super().on_train_begin(args, state, control, model=model, **kwargs)

    def release(self) -> None:
        if self._clearml_task is not None and self._should_close_on_train_end:
            self._clearml_task.close()


class _CodeCarbon(TransformersTracker):
    """Ends its measurement after a failure of the service too, since a measurement writes its file at its end."""

    tracker: Any = None

    def release(self) -> None:
        if self.tracker is not None:
            self.tracker.stop()


class _DagsHub(TransformersTracker):
    """Raises an error that says how to name the repository; transformers' callback raises an AttributeError."""

    def setup(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            raise RuntimeError("MLFLOW_TRACKING_URI is not set; call dagshub.init(repo_owner=..., repo_name=...)")
        super().setup(args, state, model, **kwargs)


class _DVCLive(TransformersTracker):
    """Saves the trained model itself: transformers' callback would make another Trainer, of transformers, to do so."""

    live: Any
    _log_model: Any

    @survives_failure
    def on_train_end(
        self, args: Any, state: Any, control: Any, model: Any = None, processing_class: Any = None, **kwargs: Any
    ) -> None:
        if not self._initialized or not state.is_world_process_zero:
            return
        # After a failure there is no model.
        if self._log_model is True and model is not None:
            name = "best" if args.load_best_model_at_end else "last"
            folder = os.path.join(args.output_dir, name)
            os.makedirs(folder, exist_ok=True)
            write_final_model(folder, args, model, processing_class)
            self.live.log_artifact(folder, name=name, type="model", copy=True)
        self.live.end()

    def release(self) -> None:
        if self.live is not None:
            self.live.end()


class _SwanLab(TransformersTracker):
    """Reports to releases of SwanLab from 0.10 on too."""

    _swanlab: Any

    def __init__(self) -> None:
        super().__init__()
        self._swanlab = _SwanLabClient(self._swanlab)
        # With SWANLAB_LOG_MODEL transformers' callback fails outside of SwanLab's cloud, and SwanLab keeps no models.
        self._log_model = None


class _SwanLabClient:
    """The module swanlab, of which `get_run` returns None if there is no run, as transformers' callback expects."""

    def __init__(self, module: Any):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name == "_module":
            # It is looked up while a pickled client is read.
            raise AttributeError(name)
        return getattr(self._module, name)

    def get_run(self) -> Any:
        try:
            return self._module.get_run()
        except RuntimeError:
            return None


ADDITIONS: dict[str, type] = {
    "clearml": _ClearML,
    "codecarbon": _CodeCarbon,
    "dagshub": _DagsHub,
    "dvclive": _DVCLive,
    "swanlab": _SwanLab,
}


def _mask_model(model: Any) -> Any:
    config: Any = getattr(model, "config", None)
    values = config.to_dict() if hasattr(config, "to_dict") else config
    shown = redact_secrets(values)
    if shown is values:
        return model
    if isinstance(config, dict):
        masked = shown
    else:
        masked = copy.copy(config)
        vars(masked)["to_dict"] = lambda: shown
    # Nothing else of such a model is shown.
    return SimpleNamespace(config=masked)


def _guard(event: Callable[..., Any]) -> Any:
    """Make an event of a tracker from an event of transformers' callback."""

    @survives_failure
    @functools.wraps(event)
    def call(self: TrackerCallback, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if event.__name__ in EVENTS_OF_STEPS:
            # Copying the arguments at each step would take longer than the event, which reports progress.
            event(self, args, state, control, **kwargs)
            return
        if event.__name__ == "on_init_end" and args.should_save:
            # transformers' Trainer has made the folder by then, which CodeCarbon needs.
            os.makedirs(args.output_dir, exist_ok=True)
        shown = copy.copy(args)
        vars(shown).update(redact_secrets(vars(args)), to_dict=lambda: mask_arguments(args))
        if self.trial_folder is not None:
            shown.output_dir = str(self.trial_folder)
        before = dict(vars(shown))
        if "model" in kwargs:
            kwargs["model"] = _mask_model(kwargs["model"])
        for name in kwargs.keys() & {"logs", "metrics"}:
            kwargs[name] = drop_non_numbers(kwargs[name], self.service)
        event(self, shown, state, control, **kwargs)
        for name, value in vars(shown).items():
            # ClearML's server may override arguments of a task that one of its agents runs.
            if name in before and value is not before[name]:
                setattr(args, name, value)

    return call


@functools.cache
def _tracker_class(name: str, service: str) -> type:
    try:
        theirs = getattr(import_original(THEIR_MODULE), name, None)
    except ImportError:
        require_installed(service)
        raise
    if theirs is None:
        raise ImportError(f"report_to={service!r} needs a release of transformers that has {name}: install another.")

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        require_installed(service)
        theirs.__init__(self, *args, **kwargs)

    # The last base class but object is the one whose events do nothing.
    nothing = theirs.__mro__[-2]
    overridden = [event for event in EVENTS if getattr(theirs, event, None) is not getattr(nothing, event, None)]
    members: dict[str, Any] = {event: _guard(getattr(theirs, event)) for event in overridden}
    members.update(service=service, __init__=__init__, __module__=__name__, __doc__=theirs.__doc__)
    made = type(name, (theirs, TransformersTracker), members)
    if service in ADDITIONS:
        made = type(name, (ADDITIONS[service], made), {"__module__": __name__, "__doc__": theirs.__doc__})
    return made


def __getattr__(name: str) -> Any:
    for service, row in SERVICES.items():
        if row.callback == f"transformers_callbacks:{name}":
            return _tracker_class(name, service)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
