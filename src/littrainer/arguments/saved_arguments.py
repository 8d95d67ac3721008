"""training_args.bin, for other tools: it names transformers' classes, and so opens where littrainer is not installed.

Nothing here reads such a file.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from littrainer.arguments.normalization import trackers_in
from littrainer.arguments.secrets import without_secrets

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments

# The modules of transformers, and what of theirs the fields of arguments hold.
CLASSES_IN_TRANSFORMERS = {
    "debug_utils": ("choices:DebugOption",),
    "trainer_pt_utils": ("accelerator_config:AcceleratorConfig",),
    "trainer_utils": tuple(
        f"choices:{name}"
        for name in (
            "FSDPOption",
            "HPSearchBackend",
            "HubStrategy",
            "IntervalStrategy",
            "SaveStrategy",
            "SchedulerType",
        )
    ),
    "training_args": ("choices:OptimizerNames", "choices:ParallelMode", "training_arguments:TrainingArguments"),
    "training_args_seq2seq": ("seq2seq_arguments:Seq2SeqTrainingArguments",),
}
# Our class, as "module:name" -> the module of transformers that has it, and its name there.
NAMES_IN_TRANSFORMERS: dict[str, tuple[str, str]] = {
    f"littrainer.arguments.{ours}": (f"transformers.{module}", ours.partition(":")[2])
    for module, classes in CLASSES_IN_TRANSFORMERS.items()
    for ours in classes
}


def write_arguments(args: TrainingArguments, path: Path | str) -> None:
    """Write training arguments, without secrets, as transformers would."""
    shared = copy.copy(args)
    # None, as where nothing was given: a mask would be taken for the secret by who reads the file.
    vars(shared).update(without_secrets(vars(args), mask=lambda name: None))
    # It may hold objects of Lightning, a whole model among them, and means nothing to other tools.
    shared.lightning = None
    # What transformers keeps there of accelerate, and asks arguments for that it has read.
    vars(shared)["distributed_state"] = None
    shared.report_to = [tracker for tracker in trackers_in(args.report_to) if isinstance(tracker, str)]
    torch.save(shared, path, pickle_module=_naming_transformers())


def _naming_transformers() -> ModuleType:
    module = ModuleType("naming_transformers")
    module.Pickler = _TransformersPickler  # type: ignore[attr-defined]
    return module


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
