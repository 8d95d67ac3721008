"""Records of how a run was started: littrainer_run.json, for our commands, and training_args.bin, for other tools too.

The second names transformers' classes, and so opens if littrainer is not installed.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import json
import os
import pickle
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from littrainer.arguments.process import get_matmul_precision
from littrainer.arguments.report_to import list_trackers
from littrainer.arguments.secrets import is_secret_name, redact_secrets
from littrainer.arguments.shown_arguments import format_value
from littrainer.checkpoint.layout import RUN_RECORD_NAME
from littrainer.checkpoint.safe_loading import load_tensors
from littrainer.data.fingerprint import fingerprint_dataset, fingerprint_model
from littrainer.redirection.names import REPLACED
from littrainer.runtime.atomic_files import write_atomically
from littrainer.runtime.version import __version__
from littrainer.strategies.choice import strategy_name

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments

GIT_TIMEOUT_S = 5
# Our class, as "module:name" -> the module of transformers that has it, and its name there.
NAMES_IN_TRANSFORMERS: dict[str, tuple[str, str]] = {
    ours: (module, name)
    for module, names in REPLACED.items()
    for name, ours in names.items()
    if ours.startswith("littrainer.arguments.")
}


def describe_run(model: Any, train_dataset: Any, eval_dataset: Any) -> dict[str, Any]:
    """Describe the code, the data and the model of a run that begins.

    Parameters:
        model: its weights are those that the run begins with; None leaves them out.
        train_dataset: rows, a stream, or None.
        eval_dataset: as `train_dataset`, or a dict of several.
    """
    evals = eval_dataset if isinstance(eval_dataset, dict) else {"": eval_dataset}
    named = {"train": train_dataset, **{f"eval {name}".rstrip(): one for name, one in evals.items()}}
    return {
        "code": _describe_code(str(getattr(sys.modules["__main__"], "__file__", None) or os.getcwd())),
        "data": {name: fingerprint_dataset(dataset) for name, dataset in named.items() if dataset is not None},
        "model": {} if model is None else fingerprint_model(model),
    }


def write_run_record(args: TrainingArguments, run_dir: Path | str, facts: Mapping[str, Any] | None = None) -> None:
    """Write littrainer_run.json: arguments without secrets, versions, the device, and what `describe_run` returned."""
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
        # `lightning` may hold objects of any size.
        "arguments": redact_secrets({name: getattr(args, name) for name in names if name != "lightning"}),
    }
    text = json.dumps(record, indent=2, default=_as_json, skipkeys=True)
    # `compare` and `report` may read it meanwhile.
    write_atomically(Path(run_dir, RUN_RECORD_NAME), f"{text}\n")


def _as_json(value: Any) -> Any:
    is_configuration = hasattr(value, "to_dict") and not isinstance(value, type)
    return redact_secrets(value.to_dict()) if is_configuration else format_value(value)


@functools.cache
def _describe_code(script: str) -> dict[str, str | None]:
    """Return the script's name and hash, the commit of its repository, and a hash of what is not committed there.

    It is asked for once in a process, since later changes do not reach code that is loaded.
    """
    is_file = os.path.isfile(script)
    folder = os.path.dirname(os.path.realpath(script)) if is_file else script
    commit, changes = _git(folder, "rev-parse", "HEAD"), _git(folder, "diff", "HEAD", "--no-ext-diff", "--no-color")
    return {
        "script": os.path.basename(script) if is_file else None,
        "script hash": _hash(Path(script).read_bytes()) if is_file else None,
        "commit": commit.decode().strip()[:12] or None,
        "uncommitted changes": _hash(changes),
    }


def _git(folder: str, *words: str) -> bytes:
    """Return what git prints; nothing if it fails, or takes long."""
    command = ["git", "--no-optional-locks", "-C", folder, *words]
    try:
        return subprocess.check_output(
            command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=GIT_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return b""


def _hash(content: bytes) -> str | None:
    return hashlib.blake2b(content, digest_size=6).hexdigest() if content else None


# ---- training_args.bin -----------------------------------------------------------------------------------------------


# The arguments as they were written last, and the file: a training saves the same ones again and again.
_last_written = b"", b""


def write_arguments(args: TrainingArguments, path: Path | str) -> None:
    """Write training arguments, without secrets, as transformers would."""
    written = {
        **args.__getstate__(),
        # The value may hold objects of Lightning, a whole model among them, and means nothing to other tools.
        "lightning": None,
        # transformers keeps a state of accelerate there, and reads it from arguments that it has loaded.
        "distributed_state": None,
        "report_to": [tracker for tracker in list_trackers(args.report_to) if isinstance(tracker, str)],
    }
    global _last_written
    pickled = pickle.dumps((type(args), written))
    if pickled == _last_written[0]:
        Path(path).write_bytes(_last_written[1])
    else:
        shared = copy.copy(args)
        # None, as if nothing was given: who reads the file would take a mask for the secret.
        vars(shared).update(redact_secrets(written, mask=lambda name: None))
        torch.save(shared, path, pickle_module=_PICKLE_MODULE)
        _last_written = pickled, Path(path).read_bytes()


class _Inert(dict[str, Any]):
    """Stands for an object of any class in a file that is read: it keeps what it was given and runs nothing."""

    # Members of enums are written as their class and their value.
    def __new__(cls, *given: Any) -> Any:
        return given[0] if given else super().__new__(cls)

    __setstate__ = dict.update


def read_arguments(path: Path) -> dict[str, str]:
    """Return the arguments in a training_args.bin as short texts without secrets, and run no code that it names."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        # Whatever class the file names, an inert object takes the place of its instances.
        stored = load_tensors(path, [(_Inert, name) for name in names])
        if not isinstance(stored, _Inert):
            raise TypeError(f"it holds an object of class {type(stored).__name__}")
    except (TypeError, RuntimeError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} holds no training arguments that can be read ({error})") from error
    shown = redact_secrets({name: value for name, value in stored.items() if not name.startswith("_")})
    return {name: format_value(value) for name, value in shown.items() if not is_secret_name(name)}


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


_PICKLE_MODULE = ModuleType("naming_transformers")
_PICKLE_MODULE.Pickler = _TransformersPickler  # type: ignore[attr-defined]
