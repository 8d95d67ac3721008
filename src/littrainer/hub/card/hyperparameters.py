"""Hyperparameters for the model card: those that every card names, and further ones away from their defaults."""

from __future__ import annotations

import dataclasses
import re
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING, Any

from littrainer.arguments.destinations import DESTINATIONS, Place
from littrainer.arguments.secrets import holds_a_secret
from littrainer.arguments.shown_arguments import as_text, default_texts, is_same
from littrainer.distributed.layout import data_parallel_size

if TYPE_CHECKING:
    from littrainer.trainer import Trainer


# What says how a model was trained. The others say where files lie, what is logged, saved and shown.
PLACES = frozenset(
    {
        *(Place.KEYWORD, Place.STEP, Place.OPTIMIZER, Place.SCHEDULE, Place.PLAN, Place.LOADER, Place.SAMPLER),
        *(Place.MODEL, Place.PRECISION, Place.SEED, Place.PROCESSES),
    }
)
# Among them: part of the lines that every card has, or of no consequence for the model.
NOT_SHOWN = frozenset(
    {
        *("per_device_train_batch_size", "per_device_eval_batch_size", "learning_rate", "seed", "num_train_epochs"),
        *("gradient_accumulation_steps", "optim", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon"),
        *("lr_scheduler_type", "warmup_steps", "warmup_ratio", "bf16", "fp16", "use_cpu", "lightning", "debug"),
        *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
        *("dataloader_prefetch_factor", "dataloader_multiprocessing_context", "log_on_each_node"),
        *("save_on_each_node", "ddp_backend", "ddp_timeout", "eval_use_gather_object", "use_cache"),
    }
)
# A folder on somebody's machine is nobody else's business; what it ends in may say something.
FOLDERS = re.compile(r"(?<![\w/:.])(?:~|[A-Za-z]:)?[\\/](?:[^\\/\s,;:'\"{}\[\]]+[\\/])+")


def hyperparameters(trainer: Trainer) -> dict[str, str]:
    """Name -> value of what decided over the training, without secrets and without folders."""
    shown = {**_always(trainer), **_away_from_defaults(trainer.args)}
    return {name: FOLDERS.sub("", value) for name, value in shown.items()}


def _always(trainer: Trainer) -> dict[str, str]:
    args = trainer.args
    train_batch_size = trainer.state.train_batch_size or args.train_batch_size
    parts = data_parallel_size(args)
    accumulation = args.gradient_accumulation_steps
    total, total_eval = train_batch_size * parts * accumulation, args.eval_batch_size * parts
    found: dict[str, Any] = {
        "learning_rate": args.learning_rate,
        "train_batch_size": train_batch_size,
        "eval_batch_size": args.eval_batch_size,
        "seed": args.seed,
        "num_devices": args.world_size if args.world_size > 1 else None,
        "gradient_accumulation_steps": accumulation if accumulation > 1 else None,
        "total_train_batch_size": total if total != train_batch_size else None,
        "total_eval_batch_size": total_eval if total_eval != args.eval_batch_size else None,
        "optimizer": _optimizer(trainer),
        "lr_scheduler_type": _schedule(trainer),
        "lr_scheduler_warmup_steps": args.warmup_steps or None,
        "training_steps": args.max_steps if args.max_steps > 0 else None,
        "num_epochs": args.num_train_epochs if args.max_steps <= 0 else None,
        "mixed_precision_training": args.mixed_precision if args.mixed_precision in ("bf16", "fp16") else None,
    }
    return {name: as_text(value) for name, value in found.items() if value is not None}


def _optimizer(trainer: Trainer) -> str:
    args, given = trainer.args, trainer.optimizer
    if given is not None and not trainer.is_deepspeed_enabled:
        with suppress(Exception):
            asked_for, _ = trainer.get_optimizer_cls_and_kwargs(args, trainer.model)
            if type(given).__name__ != asked_for.__name__:
                return f"{type(given).__name__}, made by the script"
    name = as_text(args.optim)
    settings = f", optim_args={as_text(args.optim_args)}" if args.optim_args else ""
    if "adam" not in name.lower():
        return f"{name}{settings}"
    return f"{name} with betas=({args.adam_beta1}, {args.adam_beta2}), epsilon={args.adam_epsilon}{settings}"


def _schedule(trainer: Trainer) -> Any:
    given = trainer.lr_scheduler
    if given is None or trainer._created_lr_scheduler or trainer.is_deepspeed_enabled:
        return trainer.args.lr_scheduler_type
    return f"{type(given).__name__}, made by the script"


def _away_from_defaults(args: Any) -> dict[str, str]:
    usual = default_texts()
    documented = {
        name: getattr(args, name)
        for name in usual
        if hasattr(args, name) and name in DESTINATIONS and DESTINATIONS[name].place in PLACES and name not in NOT_SHOWN
    }
    texts = {name: as_text(value) for name, value in documented.items()}
    changed = {name: text for name, text in texts.items() if not (is_same(text, usual[name]) or holds_a_secret(name))}
    return {**changed, **_of_a_subclass(args, usual)}


def _of_a_subclass(args: Any, documented: dict[str, str]) -> dict[str, str]:
    """Numbers, switches and choices that a subclass adds; text may be anything, so only a single word is shown."""
    found = {}
    for field in dataclasses.fields(args):
        value = getattr(args, field.name, None)
        if field.name in documented or holds_a_secret(field.name) or value is None or value == field.default:
            continue
        is_word = isinstance(value, str) and re.fullmatch(r"[\w.+-]{1,40}", value) is not None
        if isinstance(value, (bool, int, float, Enum)) or is_word:
            found[field.name] = as_text(value)
    return found
