"""Experiment trackers: a callback for each service in `report_to`."""

from __future__ import annotations

import importlib
from typing import Any

from littrainer.arguments.report_to import SERVICES

_LOCATIONS = {
    **{service.callback.partition(":")[2]: service.callback for service in SERVICES.values()},
    "LightningLoggersCallback": "lightning_loggers:LightningLoggersCallback",
    "TrackerCallback": "base:TrackerCallback",
}
__all__ = sorted(_LOCATIONS)


def __getattr__(name: str) -> Any:
    if name not in _LOCATIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _LOCATIONS[name].partition(":")
    return getattr(importlib.import_module(f"littrainer.tracking.{module}"), attribute)


def __dir__() -> list[str]:
    return __all__
