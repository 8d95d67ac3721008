"""Training arguments in a program in which a `lightning.Trainer` says where, how long and how training runs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from littrainer.arguments.accelerator_config import AcceleratorConfig
from littrainer.arguments.earlier_names import EARLIER_NAMES, unknown_names_message
from littrainer.arguments.secrets import holds_a_secret
from littrainer.arguments.training_arguments import Seq2SeqTrainingArguments, TrainingArguments
from littrainer.errors.notes import kind_of

if TYPE_CHECKING:
    import lightning.pytorch as pl
    import torch


@dataclass
class ModuleArguments(Seq2SeqTrainingArguments):
    """Training arguments that leave processes, devices, and when to evaluate and to save, to Lightning.

    TrainingArguments connect with the processes that a launcher has started.

    Raises:
        TypeError, ValueError, NotImplementedError: as TrainingArguments.
    """

    decides_the_run: ClassVar[bool] = False


def arguments_from(given: TrainingArguments | Mapping[str, Any] | None) -> TrainingArguments:
    """Training arguments from what a user gives in their place.

    Parameters:
        given: training arguments, which are taken as they are; their names and values; or None for the defaults.

    Raises:
        TypeError: it is none of these, or a name is unknown.
        ValueError: a value, or a combination of values, cannot be carried out.
    """
    if given is None:
        return ModuleArguments()
    if isinstance(given, TrainingArguments):
        return given
    if isinstance(given, Mapping):
        known = names_of_arguments()
        unknown = [name for name in given if name not in known and name not in EARLIER_NAMES]
        if unknown:
            raise TypeError(unknown_names_message("args", unknown, known))
        made = ModuleArguments(**given)
        earlier = [EARLIER_NAMES[name].replaced_by for name in given if name in EARLIER_NAMES]
        vars(made)["given_names"] = [*given, *earlier]
        return made
    raise TypeError(
        f"args is {kind_of(given)}; give TrainingArguments, a dict with names and values of theirs such as "
        '{"learning_rate": 3e-5}, or None for the defaults.'
    )


def for_a_trainer(args: TrainingArguments) -> TrainingArguments:
    """Copy a module's arguments for a Trainer, as the class that other tools know."""
    found = copy.copy(args)
    if isinstance(found, ModuleArguments):
        found.__class__ = Seq2SeqTrainingArguments  # type: ignore[assignment]
    return found


def changed_arguments(args: TrainingArguments) -> dict[str, Any]:
    """The arguments that are not at their default, as plain values; without secrets, and without objects."""
    default = _defaults()
    changed: dict[str, Any] = {}
    for name, value in args.to_dict().items():
        is_object = isinstance(value, dict) and name == "generation_config"
        if name not in default or holds_a_secret(name) or is_object:
            continue
        if value != default[name] and is_plain(value):
            changed[name] = value
    return changed


@functools.cache
def _defaults() -> dict[str, Any]:
    return ModuleArguments().to_dict()


def names_of_arguments() -> list[str]:
    """The names of all training arguments."""
    return [field.name for field in fields(ModuleArguments)]


def is_plain(value: Any) -> bool:
    """Whether `repr` gives the code of a value."""
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and is_plain(entry) for name, entry in value.items())
    if type(value) in (list, tuple):
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


class ArgumentsUnderLightning:
    """Training arguments as they are read under a lightning.Trainer; whatever it decides is asked from it.

    Parameters:
        args: the arguments.
        pl_trainer: says how many processes there are, which of them this one is, on which device it works, how
            they share the data and how many micro-batches an optimizer step has.
    """

    def __init__(self, args: TrainingArguments, pl_trainer: pl.Trainer):
        self._args = args
        self._pl_trainer = pl_trainer

    def __getattr__(self, name: str) -> Any:
        # A copy is asked for attributes before it has any.
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
        parts = self.world_size
        shared: Any = getattr(self._pl_trainer.strategy, "distributed_sampler_kwargs", None)
        if shared:
            parts = int(shared["num_replicas"])
        return {"dp_replicate_size": parts, "tp_size": self.world_size // parts}

    @property
    def accelerator_config(self) -> AcceleratorConfig:
        """How processes share the data."""
        return AcceleratorConfig.from_argument(self._args.accelerator_config)
