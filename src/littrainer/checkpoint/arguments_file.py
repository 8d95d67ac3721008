"""The arguments of a run as files: training_args.bin for other tools, littrainer_run.json for `littrainer report`.

The first names transformers' classes, and so opens if littrainer is not installed. Nothing here reads either.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import platform
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from littrainer.arguments.report_to import trackers_in
from littrainer.arguments.secrets import holds_a_secret, without_secrets
from littrainer.arguments.shown_arguments import as_text
from littrainer.checkpoint.layout import RUN_RECORD_NAME
from littrainer.errors.version import __version__
from littrainer.redirection.names import REPLACED

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments


# Our class, as "module:name" -> the module of transformers that has it, and its name there.
NAMES_IN_TRANSFORMERS: dict[str, tuple[str, str]] = {
    ours: (module, name)
    for module, names in REPLACED.items()
    for name, ours in names.items()
    if ours.startswith("littrainer.arguments.")
}


def write_arguments(args: TrainingArguments, path: Path | str) -> None:
    """Write training arguments, without secrets, as transformers would."""
    shared = copy.copy(args)
    # None, as if nothing was given: who reads the file would take a mask for the secret.
    vars(shared).update(without_secrets(vars(args), mask=lambda name: None))
    # It may hold objects of Lightning, a whole model among them, and means nothing to other tools.
    shared.lightning = None
    # What transformers keeps there of accelerate, and asks arguments for that it has read.
    vars(shared)["distributed_state"] = None
    shared.report_to = [tracker for tracker in trackers_in(args.report_to) if isinstance(tracker, str)]
    torch.save(shared, path, pickle_module=_NAMING_TRANSFORMERS)


def write_run_record(args: TrainingArguments, run_dir: Path | str) -> None:
    """Write littrainer_run.json: the arguments of a run without secrets, the versions and the device that it runs on.

    Raises:
        OSError: it cannot be written.
    """
    names = [field.name for field in dataclasses.fields(args) if field.init and not holds_a_secret(field.name)]
    # `lightning` may hold objects of any size.
    shown = {name: getattr(args, name) for name in names if name != "lightning"}
    versions = {
        name: getattr(sys.modules.get(name), "__version__", None) for name in ("torch", "lightning", "transformers")
    }
    device = args.device
    environment = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "processes": args.world_size,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    record = {
        "versions": {"littrainer": __version__, **versions},
        "environment": environment,
        "arguments": without_secrets(shown),
    }
    text = json.dumps(record, indent=2, default=_as_json, skipkeys=True)
    # Not by another file, which a killed run would leave: half a record is written again by the next run.
    Path(run_dir, RUN_RECORD_NAME).write_text(f"{text}\n", "utf-8")


def _as_json(value: Any) -> Any:
    is_configuration = hasattr(value, "to_dict") and not isinstance(value, type)
    return without_secrets(value.to_dict()) if is_configuration else as_text(value)


# The pickler that is written in Python, since the one in C lets nobody choose the name of a class.
_PythonPickler: Any = pickle._Pickler


class _TransformersPickler(_PythonPickler):
    def save_global(self, obj: Any, name: str | None = None) -> None:
        ours = f"{getattr(obj, '__module__', None)}:{getattr(obj, '__qualname__', None)}"
        if ours not in NAMES_IN_TRANSFORMERS:
            super().save_global(obj, name)
            return
        self.write(pickle.GLOBAL + "{}\n{}\n".format(*NAMES_IN_TRANSFORMERS[ours]).encode("ascii"))
        self.memoize(obj)


_NAMING_TRANSFORMERS = ModuleType("naming_transformers")
_NAMING_TRANSFORMERS.Pickler = _TransformersPickler  # type: ignore[attr-defined]
