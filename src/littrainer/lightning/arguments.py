"""Training arguments in a program in which a `lightning.Trainer` says where, how long and how training runs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from littrainer.arguments.accelerator_config import AcceleratorConfig
from littrainer.arguments.earlier_names import EARLIER_NAMES, format_unknown_names
from littrainer.arguments.secrets import is_secret_name
from littrainer.arguments.training_arguments import Seq2SeqTrainingArguments, TrainingArguments
from littrainer.runtime.notes import kind_of

if TYPE_CHECKING:
    import lightning.pytorch as pl
    import torch


@dataclass
class ModuleArguments(Seq2SeqTrainingArguments):
    """Training arguments that leave processes, devices, and when to evaluate and to save, to Lightning."""

    is_for_trainer: ClassVar[bool] = False


def resolve_arguments(given: TrainingArguments | Mapping[str, Any] | None) -> TrainingArguments:
    """Return training arguments, or make them of their names and values; None means the defaults.

    Raises:
        TypeError: it is none of these, or a name is unknown.
        ValueError: a value, or a combination of values, is refused.
    """
    if isinstance(given, TrainingArguments):
        return given
    if given is None:
        return ModuleArguments()
    if not isinstance(given, Mapping):
        raise TypeError(
            f"args is {kind_of(given)}; give TrainingArguments, a dict with names and values of theirs such as "
            '{"learning_rate": 3e-5}, or None for the defaults.'
        )
    known = list_argument_names()
    unknown = [name for name in given if name not in known and name not in EARLIER_NAMES]
    if unknown:
        raise TypeError(format_unknown_names("args", unknown, known))
    args = ModuleArguments(**given)
    earlier = [EARLIER_NAMES[name].replaced_by for name in given if name in EARLIER_NAMES]
    vars(args)["explicit_names"] = [*given, *earlier]
    return args


def to_trainer_arguments(args: TrainingArguments) -> TrainingArguments:
    """Copy a module's arguments for a Trainer, as the class that other tools can read."""
    copied = copy.copy(args)
    if isinstance(copied, ModuleArguments):
        copied.__class__ = Seq2SeqTrainingArguments  # type: ignore[assignment]
    return copied


def get_changed_arguments(args: TrainingArguments) -> dict[str, Any]:
    """Return the arguments that are not at their default, as plain values; without secrets, and without objects."""
    default = _defaults()
    return {
        name: value
        for name, value in args.to_dict().items()
        if name in default and value != default[name] and is_plain(value) and not is_secret_name(name)
        # `to_dict` returns the settings of an object.
        if not (name == "generation_config" and isinstance(value, dict))
    }


@functools.cache
def _defaults() -> dict[str, Any]:
    return ModuleArguments().to_dict()


def list_argument_names() -> list[str]:
    """Return the names of all training arguments."""
    return [field.name for field in fields(ModuleArguments)]


def is_plain(value: Any) -> bool:
    """Return whether `repr` gives the code of a value."""
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and is_plain(entry) for name, entry in value.items())
    if type(value) in (list, tuple):
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


class ArgumentsUnderLightning:
    """Training arguments under a lightning.Trainer, which decides on processes, device and micro-batches of a step."""

    def __init__(self, args: TrainingArguments, pl_trainer: pl.Trainer):
        self._args = args
        self._pl_trainer = pl_trainer

    def __getattr__(self, name: str) -> Any:
        # Copying reads attributes before there are any.
        if name in ("_args", "_pl_trainer"):
            raise AttributeError(name)
        return getattr(self._args, name)

    @property
    def world_size(self) -> int:
        """Number of processes that train together."""
        return self._pl_trainer.world_size

    @property
    def process_index(self) -> int:
        """Rank of this process among all processes."""
        return self._pl_trainer.global_rank

    @property
    def device(self) -> torch.device:
        """Device of this process."""
        return self._pl_trainer.strategy.root_device

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of an optimizer step."""
        return self._pl_trainer.accumulate_grad_batches

    @property
    def parallelism_config(self) -> dict[str, int]:
        """How many processes have different data, and how many compute each layer together."""
        sampler_kwargs: Any = getattr(self._pl_trainer.strategy, "distributed_sampler_kwargs", None)
        replicas = int(sampler_kwargs["num_replicas"]) if sampler_kwargs else self.world_size
        return {"dp_replicate_size": replicas, "tp_size": self.world_size // replicas}

    @property
    def accelerator_config(self) -> AcceleratorConfig:
        """How processes share the data."""
        return AcceleratorConfig.from_argument(self._args.accelerator_config)
