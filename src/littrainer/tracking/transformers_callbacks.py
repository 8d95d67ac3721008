"""Trackers that transformers' callbacks implement, with masked secrets, and failures reported as a single warning.

`CometCallback` and similar attributes are created at their first use. Each is a subclass of transformers' class of the
same name, so that scripts can override its `setup`.
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

TRANSFORMERS_MODULE = "transformers.integrations.integration_utils"
EVENTS_OF_STEPS = ("on_step_begin", "on_step_end", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step")
EVENTS = [name for name in vars(TrainerCallback) if name.startswith("on_")]
# Service whose run ends after a failure -> its client's attribute and method; other clients mark open runs as failed.
ENDED_BY_FAILURES = {"codecarbon": ("tracker", "stop"), "dvclive": ("live", "end")}


class TransformersTracker(TrackerCallback):
    """Base class of trackers that use a callback of transformers."""

    def release(self) -> None:
        attribute, method = ENDED_BY_FAILURES.get(self.service, ("", ""))
        client = getattr(self, attribute, None)
        if client is not None:
            getattr(client, method)()

    def on_training_failed(self, args: Any, state: Any, error: BaseException) -> None:
        """End the run of a trial, and of services in `ENDED_BY_FAILURES`."""
        if state.is_hyper_param_search or self.service in ENDED_BY_FAILURES:
            self.on_train_end(args, state, None)


class _ClearML(TransformersTracker):
    """ClearML tracker that starts a new task after a closed task: transformers' callback would lose all values."""

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


class _DVCLive(TransformersTracker):
    """DVCLive tracker that saves the model itself: transformers' callback would create a Trainer of transformers."""

    live: Any
    _log_model: Any

    @survives_failure
    def on_train_end(
        self, args: Any, state: Any, control: Any, model: Any = None, processing_class: Any = None, **kwargs: Any
    ) -> None:
        if not self._initialized or not state.is_world_process_zero:
            return
        # `model` is None after a failure.
        if self._log_model is True and model is not None:
            name = "best" if args.load_best_model_at_end else "last"
            folder = os.path.join(args.output_dir, name)
            os.makedirs(folder, exist_ok=True)
            write_final_model(folder, args, model, processing_class)
            self.live.log_artifact(folder, name=name, type="model", copy=True)
        self.live.end()


class _SwanLab(TransformersTracker):
    """SwanLab tracker that supports releases from 0.10 on too."""

    _swanlab: Any

    def __init__(self) -> None:
        super().__init__()
        self._swanlab = _SwanLabClient(self._swanlab)
        # With SWANLAB_LOG_MODEL, transformers' callback fails outside of SwanLab's cloud; SwanLab stores no models.
        self._log_model = None


class _SwanLabClient:
    """Proxy of the module swanlab: `get_run` returns None without a run, as transformers' callback expects."""

    def __init__(self, module: Any):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name == "_module":
            # Unpickling reads this attribute before it exists.
            raise AttributeError(name)
        return getattr(self._module, name)

    def get_run(self) -> Any:
        try:
            return self._module.get_run()
        except RuntimeError:
            return None


BASE_CLASSES: dict[str, type] = {"clearml": _ClearML, "dvclive": _DVCLive, "swanlab": _SwanLab}


def _mask_model(model: Any) -> Any:
    config: Any = getattr(model, "config", None)
    values = config.to_dict() if hasattr(config, "to_dict") else config
    masked_values = redact_secrets(values)
    if masked_values is values:
        return model
    if isinstance(config, dict):
        masked = masked_values
    else:
        masked = copy.copy(config)
        vars(masked)["to_dict"] = lambda: masked_values
    # Trackers read the config only.
    return SimpleNamespace(config=masked)


def _wrap_event(event: Callable[..., Any]) -> Any:
    """Wrap an event of transformers' callback, to mask secrets and survive failures."""

    @survives_failure
    @functools.wraps(event)
    def call(self: TrackerCallback, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if event.__name__ in EVENTS_OF_STEPS:
            # Copying the arguments would take longer than these events, which only report progress.
            event(self, args, state, control, **kwargs)
            return
        if event.__name__ == "on_init_end" and args.should_save:
            # CodeCarbon needs the folder, which transformers' Trainer creates earlier.
            os.makedirs(args.output_dir, exist_ok=True)
        masked = copy.copy(args)
        vars(masked).update(redact_secrets(vars(args)), to_dict=lambda: mask_arguments(args))
        if self.trial_folder is not None:
            masked.output_dir = str(self.trial_folder)
        before = dict(vars(masked))
        if "model" in kwargs:
            kwargs["model"] = _mask_model(kwargs["model"])
        for name in kwargs.keys() & {"logs", "metrics"}:
            kwargs[name] = drop_non_numbers(kwargs[name], self.service)
        event(self, masked, state, control, **kwargs)
        for name, value in vars(masked).items():
            # ClearML's server may override arguments of a task that its agent runs.
            if name in before and value is not before[name]:
                setattr(args, name, value)

    return call


@functools.cache
def _tracker_class(name: str, service: str) -> type:
    try:
        original = getattr(import_original(TRANSFORMERS_MODULE), name, None)
    except ImportError:
        require_installed(service)
        raise
    if original is None:
        raise ImportError(f"report_to={service!r} needs a release of transformers that has {name}: install another.")

    # transformers' TrainerCallback, whose events do nothing, is the base class before object.
    base = original.__mro__[-2]
    overridden = [event for event in EVENTS if getattr(original, event, None) is not getattr(base, event, None)]
    members: dict[str, Any] = {event: _wrap_event(getattr(original, event)) for event in overridden}
    members.update(service=service, __module__=__name__, __doc__=original.__doc__)
    tracker = type(name, (original, TransformersTracker), members)
    if service in BASE_CLASSES:
        tracker = type(name, (BASE_CLASSES[service], tracker), {"__module__": __name__, "__doc__": original.__doc__})
    return tracker


def __getattr__(name: str) -> Any:
    for service, row in SERVICES.items():
        if row.callback == f"transformers_callbacks:{name}":
            return _tracker_class(name, service)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
