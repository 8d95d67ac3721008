"""Records of a run's start and end: littrainer_run.json, and training_args.bin for transformers and other tools."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import hashlib
import json
import os
import pickle
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from littrainer.arguments.process import get_matmul_precision
from littrainer.arguments.report_to import list_trackers
from littrainer.arguments.secrets import is_secret_name, redact_command, redact_secrets
from littrainer.arguments.shown_arguments import format_value
from littrainer.checkpoint.layout import RUN_RECORD_NAME
from littrainer.checkpoint.safe_loading import load_tensors
from littrainer.data.fingerprint import fingerprint_dataset, fingerprint_model
from littrainer.distributed.environment import get_command
from littrainer.redirection.names import REPLACED
from littrainer.runtime.atomic_files import write_atomically
from littrainer.runtime.version import __version__
from littrainer.strategies.choice import strategy_name

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments

GIT_TIMEOUT_S = 5
# littrainer's class as "module:name" -> module and name in transformers.
NAMES_IN_TRANSFORMERS: dict[str, tuple[str, str]] = {
    ours: (module, name)
    for module, names in REPLACED.items()
    for name, ours in names.items()
    if ours.startswith("littrainer.arguments.")
}


def describe_run(model: Any, train_dataset: Any, eval_dataset: Any) -> dict[str, Any]:
    """Return facts about command, code, data and model at a run's start."""
    evals = eval_dataset if isinstance(eval_dataset, dict) else {"": eval_dataset}
    datasets = {"train": train_dataset, **{f"eval {name}".rstrip(): dataset for name, dataset in evals.items()}}
    script = getattr(sys.modules["__main__"], "__file__", None)
    return {
        "run": {
            "started": get_timestamp(),
            # A program without a file, such as a notebook, has no command that repeats it.
            "command": None if script is None else shlex.join(redact_command(get_command())),
        },
        "code": _describe_code(str(script or os.getcwd())),
        "data": {name: fingerprint_dataset(dataset) for name, dataset in datasets.items() if dataset is not None},
        "model": {} if model is None else fingerprint_model(model),
    }


def write_run_record(args: TrainingArguments, run_dir: Path | str, facts: Mapping[str, Any] | None = None) -> None:
    """Write arguments without secrets, versions, the device, and the given facts."""
    names = [field.name for field in dataclasses.fields(args) if field.init and not is_secret_name(field.name)]
    packages = ("torch", "lightning", "transformers", "datasets", "peft", "numpy")
    is_cuda = args.device.type == "cuda"
    record = {
        "versions": {
            "littrainer": __version__,
            **{name: getattr(sys.modules.get(name), "__version__", None) for name in packages},
        },
        "environment": {
            "device": torch.cuda.get_device_name(args.device) if is_cuda else args.device.type,
            "processes": args.world_size,
            "strategy": strategy_name(args),
            "threads": torch.get_num_threads(),
            "float32 matmul precision": get_matmul_precision(),
            "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
        },
        **(facts or {}),
        "arguments": redact_secrets({name: getattr(args, name) for name in names if name != "lightning"}),
    }
    text = json.dumps(record, indent=2, default=_to_json, skipkeys=True)
    # Atomic, since other commands may read the file meanwhile.
    write_atomically(Path(run_dir, RUN_RECORD_NAME), f"{text}\n")


def record_end(path: Path, end: Mapping[str, Any]) -> None:
    """Add to a run's record how the training ended; an unreadable record stays as it is."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        record = json.loads(path.read_text("utf-8"))
        record["run"]["end"] = end
        write_atomically(path, f"{json.dumps(record, indent=2)}\n")


def get_timestamp() -> str:
    return datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")


def _to_json(value: Any) -> Any:
    is_configuration = hasattr(value, "to_dict") and not isinstance(value, type)
    return redact_secrets(value.to_dict()) if is_configuration else format_value(value)


@functools.cache
def _describe_code(script: str) -> dict[str, str | None]:
    """Return names and hashes of script, commit and uncommitted changes."""
    is_file = os.path.isfile(script)
    folder = os.path.dirname(os.path.realpath(script)) if is_file else script
    commit, changes = _git(folder, "rev-parse", "HEAD"), _git(folder, "diff", "HEAD", "--no-ext-diff", "--no-color")
    return {
        "script": os.path.basename(script) if is_file else None,
        "script hash": _hash(Path(script).read_bytes()) if is_file else None,
        "commit": commit.decode().strip()[:12] or None,
        "uncommitted changes": _hash(changes),
    }


def _git(folder: str, *arguments: str) -> bytes:
    command = ["git", "--no-optional-locks", "-C", folder, *arguments]
    try:
        return subprocess.check_output(
            command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=GIT_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return b""


def _hash(content: bytes) -> str | None:
    return hashlib.blake2b(content, digest_size=6).hexdigest() if content else None


# ---- training_args.bin -----------------------------------------------------------------------------------------------


def write_arguments(args: TrainingArguments, path: Path | str) -> None:
    """Write training arguments, without secrets, as transformers would."""
    written = {
        **args.__getstate__(),
        "lightning": None,
        "distributed_state": None,
        "report_to": [tracker for tracker in list_trackers(args.report_to) if isinstance(tracker, str)],
    }
    shared = copy.copy(args)
    # None, since a reader would take a mask for the secret.
    vars(shared).update(redact_secrets(written, mask=lambda name: None))
    torch.save(shared, path, pickle_module=_PICKLE_MODULE)


class _Inert(dict[str, Any]):
    """Placeholder for objects of any class, which runs no code."""

    # Enum members are pickled as class and value.
    def __new__(cls, *arguments: Any) -> Any:
        return arguments[0] if arguments else super().__new__(cls)

    __setstate__ = dict.update


def read_arguments(path: Path) -> dict[str, str]:
    """Return the arguments in a training_args.bin as texts without secrets, and run no code of the file."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        stored = load_tensors(path, [(_Inert, name) for name in names])
        if not isinstance(stored, _Inert):
            raise TypeError(f"it holds an object of class {type(stored).__name__}")
    except (TypeError, RuntimeError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} holds no training arguments that can be read ({error})") from error
    shown = redact_secrets({name: value for name, value in stored.items() if not name.startswith("_")})
    return {name: format_value(value) for name, value in shown.items() if not is_secret_name(name)}


# The C pickler has no `save_global` to override.
_PythonPickler: Any = pickle._Pickler


class _TransformersPickler(_PythonPickler):
    def save_global(self, obj: Any, name: str | None = None) -> None:
        ours = f"{getattr(obj, '__module__', None)}:{getattr(obj, '__qualname__', None)}"
        if ours not in NAMES_IN_TRANSFORMERS:
            super().save_global(obj, name)
            return
        self.write(pickle.GLOBAL + "{}\n{}\n".format(*NAMES_IN_TRANSFORMERS[ours]).encode("ascii"))
        self.memoize(obj)


_PICKLE_MODULE = ModuleType("naming_transformers")
_PICKLE_MODULE.Pickler = _TransformersPickler  # type: ignore[attr-defined]
