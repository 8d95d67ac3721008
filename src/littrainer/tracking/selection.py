"""Creation of the callbacks for the services in `report_to`."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from littrainer.arguments.report_to import (
    SERVICES,
    check_tracker_name,
    list_available_services,
    list_trackers,
    require_installed,
)
from littrainer.runtime.lazy_isinstance import is_a
from littrainer.tracking.base import TrackerCallback
from littrainer.tracking.lightning_loggers import LightningLoggersCallback

logger = logging.getLogger(__name__)


def create_trackers(report_to: Any) -> list[Any]:
    """Create the callbacks for the services in `report_to`."""
    chosen = list_trackers(report_to)
    if chosen == ["all"]:
        chosen = list_available_services()
    loggers = [item for item in chosen if is_a(item, "lightning logger")]
    callbacks: list[Any] = []
    for name in dict.fromkeys(item for item in chosen if not is_a(item, "lightning logger")):
        if name in SERVICES:
            require_installed(name)
            reason = SERVICES[name].get_disabled_reason()
            if reason is not None:
                logger.warning("Nothing is reported to %s: %s.", name, reason)
                continue
        callbacks.append(get_tracker_class(name)())
    return [*callbacks, LightningLoggersCallback(loggers)] if loggers else callbacks


def get_tracker_classes(report_to: Any) -> list[type]:
    names = list_trackers(report_to)
    return [get_tracker_class(name) for name in (list_available_services() if names == ["all"] else names)]


def get_tracker_class(name: Any) -> type:
    """Return the callback class of a service, or of a name that a script has added to transformers' table."""
    added = getattr(sys.modules.get("transformers.integrations.integration_utils"), "INTEGRATION_TO_CALLBACK", {})
    if name not in SERVICES and name in added:
        return added[name]
    check_tracker_name(name)
    module, _, class_name = SERVICES[name].callback.partition(":")
    return getattr(importlib.import_module(f"littrainer.tracking.{module}"), class_name)


def set_trial_folder(callbacks: Iterable[Any], folder: str | None) -> None:
    for callback in callbacks:
        if isinstance(callback, TrackerCallback):
            callback.trial_folder = None if folder is None else Path(folder)
