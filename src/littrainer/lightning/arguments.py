"""Training arguments under a `lightning.Trainer`."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, get_args, get_type_hints

from littrainer.arguments.accelerator_config import AcceleratorConfig
from littrainer.arguments.earlier_names import EARLIER_NAMES, format_unknown_names
from littrainer.arguments.json_values import truth
from littrainer.arguments.secrets import is_secret_name
from littrainer.arguments.training_arguments import Seq2SeqTrainingArguments, TrainingArguments
from littrainer.distributed.layout import get_requested_sizes
from littrainer.runtime.notes import kind_of

if TYPE_CHECKING:
    import lightning.pytorch as pl
    import torch


@dataclass
class ModuleArguments(Seq2SeqTrainingArguments):
    """Training arguments that leave processes, devices, evaluations and saves to Lightning."""

    is_for_trainer: ClassVar[bool] = False


def resolve_arguments(source: TrainingArguments | Mapping[str, Any] | None) -> TrainingArguments:
    """Return or build training arguments.

    Raises:
        TypeError: the source has another type, or a name is unknown.
        ValueError, NotImplementedError: a value is refused.
    """
    if isinstance(source, TrainingArguments):
        _refuse_shared_rows(source)
        return source
    if source is None:
        return ModuleArguments()
    if not isinstance(source, Mapping):
        raise TypeError(
            f"args is {kind_of(source)}; give TrainingArguments, a dict with names and values of theirs such as "
            '{"learning_rate": 3e-5}, or None for the defaults.'
        )
    names = list_argument_names()
    unknown = [name for name in source if name not in names and name not in EARLIER_NAMES]
    if unknown:
        raise TypeError(format_unknown_names("args", unknown, names))
    args = ModuleArguments(**{name: _parse_number(name, value) for name, value in source.items()})
    replacements = [EARLIER_NAMES[name].replaced_by for name in source if name in EARLIER_NAMES]
    vars(args)["explicit_names"] = [*source, *replacements]
    _refuse_shared_rows(args)
    return args


def _refuse_shared_rows(args: TrainingArguments) -> None:
    sizes = get_requested_sizes(args)[1]
    for name in ("cp_size", "sp_size"):
        if sizes[name] > 1:
            raise NotImplementedError(
                f"A lightning.Trainer does not divide rows between processes: leave {name} of parallelism_config at 1, "
                "or train with littrainer.Trainer."
            )


def _parse_number(name: str, value: Any) -> Any:
    """Return the number of a text, as YAML reads 5e-5 and LightningCLI the values of a plain dict."""
    hint = get_argument_types().get(name)
    kinds = {*get_args(hint)} or {hint}
    if not isinstance(value, str) or str in kinds:
        return value
    for kind in kinds & {int, float}:
        with suppress(ValueError):
            return kind(value)
    with suppress(ValueError):
        return truth(value) if bool in kinds else value
    return value


@functools.cache
def get_argument_types() -> dict[str, Any]:
    return get_type_hints(ModuleArguments)


def to_trainer_arguments(args: TrainingArguments) -> TrainingArguments:
    copied = copy.copy(args)
    if isinstance(copied, ModuleArguments):
        copied.__class__ = Seq2SeqTrainingArguments  # type: ignore[assignment]
    return copied


def get_changed_arguments(args: TrainingArguments) -> dict[str, Any]:
    """Return non-default arguments, without secrets and objects."""
    default = _defaults()
    return {
        name: value
        for name, value in args.to_dict().items()
        if name in default and value != default[name] and is_plain(value) and not is_secret_name(name)
        # An object before `to_dict`.
        if not (name == "generation_config" and isinstance(value, dict))
    }


@functools.cache
def _defaults() -> dict[str, Any]:
    return ModuleArguments().to_dict()


def list_argument_names() -> list[str]:
    return [field.name for field in fields(ModuleArguments)]


def is_plain(value: Any) -> bool:
    """Return whether `repr` is code that creates the value."""
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and is_plain(entry) for name, entry in value.items())
    if type(value) in (list, tuple):
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


class ArgumentsUnderLightning:
    """Training arguments with the processes, device and accumulation of a lightning.Trainer."""

    def __init__(self, args: TrainingArguments, pl_trainer: pl.Trainer):
        self._args = args
        self._pl_trainer = pl_trainer

    def __getattr__(self, name: str) -> Any:
        # `copy` reads attributes before `__init__`.
        if name in ("_args", "_pl_trainer"):
            raise AttributeError(name)
        return getattr(self._args, name)

    @property
    def world_size(self) -> int:
        return self._pl_trainer.world_size

    @property
    def process_index(self) -> int:
        return self._pl_trainer.global_rank

    @property
    def device(self) -> torch.device:
        return self._pl_trainer.strategy.root_device

    @property
    def gradient_accumulation_steps(self) -> int:
        return self._pl_trainer.accumulate_grad_batches

    @property
    def parallelism_config(self) -> dict[str, int]:
        sampler_kwargs: Any = getattr(self._pl_trainer.strategy, "distributed_sampler_kwargs", None)
        replicas = int(sampler_kwargs["num_replicas"]) if sampler_kwargs else self.world_size
        return {"dp_replicate_size": replicas, "tp_size": self.world_size // replicas}

    @property
    def accelerator_config(self) -> AcceleratorConfig:
        return AcceleratorConfig.from_argument(self._args.accelerator_config)
