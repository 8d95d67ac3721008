"""The arguments of a run as training_args.bin, for other tools.

It names transformers' classes, and so opens if littrainer is not installed.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from littrainer.arguments.report_to import trackers_in
from littrainer.arguments.secrets import holds_a_secret, without_secrets
from littrainer.arguments.shown_arguments import as_text
from littrainer.checkpoint.safe_loading import load_tensors
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


# The arguments as they were written last, and the file: a training saves the same ones again and again.
_last_written = b"", b""


def write_arguments(args: TrainingArguments, path: Path | str) -> None:
    """Write training arguments, without secrets, as transformers would."""
    written = {
        **args.__getstate__(),
        # It may hold objects of Lightning, a whole model among them, and means nothing to other tools.
        "lightning": None,
        # What transformers keeps there of accelerate, and asks arguments for that it has read.
        "distributed_state": None,
        "report_to": [tracker for tracker in trackers_in(args.report_to) if isinstance(tracker, str)],
    }
    global _last_written
    pickled = pickle.dumps((type(args), written))
    if pickled == _last_written[0]:
        Path(path).write_bytes(_last_written[1])
    else:
        shared = copy.copy(args)
        # None, as if nothing was given: who reads the file would take a mask for the secret.
        vars(shared).update(without_secrets(written, mask=lambda name: None))
        torch.save(shared, path, pickle_module=_NAMING_TRANSFORMERS)
        _last_written = pickled, Path(path).read_bytes()


class _Inert:
    """Stands for an object of any class in a file that is read: it keeps what it was given and runs nothing."""

    def __init__(self, *given: Any) -> None:
        # Members of enums are written as their class and their value.
        if given:
            self.value = given[0]


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return vars(value).get("value", vars(value)) if isinstance(value, _Inert) else value


def read_arguments(path: Path) -> dict[str, str]:
    """Return the arguments in a training_args.bin as short texts without secrets; no code in it, or it names, is run.

    Raises:
        ValueError: the file is damaged, or does not hold arguments.
    """
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        # Whatever class the file names, an inert object takes the place of its instances.
        stored = load_tensors(path, [(_Inert, name) for name in names])
        given = {name: _plain(value) for name, value in vars(stored).items() if not name.startswith("_")}
    except (TypeError, RuntimeError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} holds no training arguments that can be read ({error})") from error
    shown = without_secrets(given)
    return {name: as_text(value) for name, value in shown.items() if not holds_a_secret(name)}


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
