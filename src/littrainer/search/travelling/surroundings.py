"""What a script has set in its process and a trial in another one counts on: paths, numbers' formats, log levels."""

from __future__ import annotations

import logging
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def surroundings() -> dict[str, Any]:
    """Those of this process, as plain values."""
    import torch

    script = sys.modules["__main__"]
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    return {
        "path": list(sys.path),
        "argv": list(sys.argv),
        "folder": os.getcwd(),
        "script": getattr(script, "__file__", None),
        "module": getattr(script.__spec__, "name", None),
        "levels": _log_levels(),
        "log_lines": _log_lines(),
        "dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "matmul": torch.get_float32_matmul_precision(),
        "cudnn": {name: getattr(torch.backends.cudnn, name) for name in CUDNN},
        "deterministic": deterministic,
    }


CUDNN = ("benchmark", "deterministic", "enabled", "allow_tf32")


def enter(found: dict[str, Any], threads: int) -> None:
    """Be in another process's surroundings; before anything of its script is read.

    Parameters:
        found: what `surroundings` gave there.
        threads: CPU threads that torch may use here.
    """
    import torch

    sys.path[:] = found["path"]
    sys.argv[:] = found["argv"]
    os.chdir(found["folder"])
    # As in the script's process: what starts further processes (DataLoader workers, by `spawn`) goes by it.
    script = ModuleType("__main__")
    if found["script"] is not None:
        script.__file__ = found["script"]
    script.__spec__ = None if found["module"] is None else ModuleSpec(found["module"], None, origin=found["script"])
    sys.modules["__main__"] = script
    set_number_formats(found)
    torch.set_num_threads(threads)
    if found["log_lines"] is not None:
        style, dates = found["log_lines"]
        logging.basicConfig(format=style, datefmt=dates)


def set_number_formats(found: dict[str, Any]) -> None:
    """Let torch compute as in another process."""
    import torch

    torch.set_default_dtype(getattr(torch, found["dtype"]))
    torch.set_float32_matmul_precision(found["matmul"])
    for name, value in found["cudnn"].items():
        setattr(torch.backends.cudnn, name, value)
    enabled, warns_only = found["deterministic"]
    torch.use_deterministic_algorithms(enabled, warn_only=warns_only)


def set_log_levels(found: dict[str, Any]) -> None:
    """Set log levels as in another process; once the libraries are loaded, for some set their own."""
    for name, level in found["levels"].items():
        logging.getLogger(name).setLevel(level)


def _log_levels() -> dict[str, int]:
    known = {"": logging.getLogger(), **logging.Logger.manager.loggerDict}
    return {
        name: logger.level for name, logger in known.items() if isinstance(logger, logging.Logger) and logger.level > 0
    }


def _log_lines() -> tuple[str | None, str | None] | None:
    """How the script has log lines written to the terminal; None where it has not asked for any."""
    for handler in logging.getLogger().handlers:
        if type(handler) is logging.StreamHandler:
            formatter = handler.formatter
            return (None, None) if formatter is None else (formatter._fmt, formatter.datefmt)
    return None
