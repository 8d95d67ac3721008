"""Validation of arguments and of their combinations."""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
import types
import typing
from collections.abc import Iterable
from enum import Enum
from functools import cache
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union

from littrainer.arguments.accelerator_config import get_configured_device
from littrainer.arguments.choices import IntervalStrategy, SaveStrategy
from littrainer.arguments.did_you_mean import suggest_name
from littrainer.arguments.fields import ANNOUNCING_SIGNALS, COMPILE_MODES, ArgumentFields, list_topics
from littrainer.arguments.normalization import CHOICE_FIELDS, METRIC_DRIVEN_SCHEDULES
from littrainer.distributed.environment import get_refused_variables
from littrainer.distributed.layout import data_parallel_size

MAX_INTEGER = 2**63 - 1

CHECKED_ELSEWHERE = ("accelerator_config", "parallelism_config", "report_to", *CHOICE_FIELDS)

# A value may be a list of them.
TEXT_CHOICES: dict[str, tuple[str, ...]] = {
    **{
        field.name: tuple(field.metadata["choices"])
        for field in dataclasses.fields(ArgumentFields)
        if "choices" in field.metadata
    },
    "torch_compile_mode": COMPILE_MODES,
    "include_num_input_tokens_seen": ("all", "non_padding", "no"),
    "include_for_metrics": ("inputs", "loss"),
    "jit_checkpoint_signals": ANNOUNCING_SIGNALS,
}

# Types and values that annotations omit because command-line parsers read them.
ALSO_ACCEPTED: dict[str, tuple[Any, ...]] = {
    "output_dir": (os.PathLike, None),
    "include_for_metrics": (str,),
    "dataloader_multiprocessing_context": (BaseContext,),
    "fsdp": (bool, list),
    "debug": (None,),
    "resume_from_checkpoint": (os.PathLike, bool),
    **dict.fromkeys(("fsdp_config", "deepspeed", "logging_dir"), (os.PathLike,)),
}


class Range(NamedTuple):
    """Range from `low` to `high`, both included, and less than `below`."""

    low: float = -math.inf
    high: float = math.inf
    below: float = math.inf

    def holds(self, value: float) -> bool:
        return math.isfinite(value) and self.low <= value <= self.high and value < self.below

    def __str__(self) -> str:
        if self.low == -math.inf:
            return ""
        if self.below < math.inf:
            return f" from {self.low:g} to below {self.below:g}"
        return f" from {self.low:g} up" if self.high == math.inf else f" from {self.low:g} to {self.high:.10g}"


ANY_NUMBER = Range()
POSITIVE = (
    *("per_device_train_batch_size", "per_device_eval_batch_size", "max_tokens_per_batch", "global_batch_size"),
    *("gradient_accumulation_steps", "torch_empty_cache_steps", "eval_accumulation_steps", "spike_factor"),
    *("dataloader_prefetch_factor", "ddp_bucket_cap_mb", "hang_timeout", "save_total_limit_best"),
    *("keep_optimizer_states", "generation_max_length", "generation_num_beams"),
)
NOT_NEGATIVE = (
    *("num_train_epochs", "learning_rate", "warmup_steps", "weight_decay", "adam_epsilon", "neftune_noise_alpha"),
    *("logging_steps", "eval_steps", "eval_delay", "data_seed", "dataloader_num_workers"),
    *("save_minutes", "eval_minutes", "max_minutes"),
)
RANGES: dict[str, Range] = {
    **dict.fromkeys(POSITIVE, Range(low=1)),
    **dict.fromkeys(NOT_NEGATIVE, Range(low=0)),
    # -1 disables them; local_rank has it outside of a launcher.
    **dict.fromkeys(("max_steps", "save_steps", "save_total_limit", "local_rank"), Range(low=-1)),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "ema_decay"), Range(low=0, below=1)),
    **dict.fromkeys(("label_smoothing_factor", "warmup_ratio"), Range(low=0, high=1)),
    "pack_to_length": Range(low=2),
    # Seeds of NumPy.
    "seed": Range(low=0, high=2**32 - 1),
    # Maximum of a timedelta.
    "ddp_timeout": Range(low=1, high=86_400 * 10**9 - 1),
}
# Infinity disables clipping.
MAY_BE_INFINITE = ("max_grad_norm",)


def check_values(args: Any) -> None:
    """Check types, ranges and names, and convert numbers of other libraries to Python's."""
    for name, accepted in _get_accepted(args.__class__).items():
        value = getattr(args, name)
        # A subclass may have a default of another type.
        if name in CHECKED_ELSEWHERE or value is getattr(type(args), name, dataclasses.MISSING):
            continue
        plain = _convert_number(value, accepted)
        if not any(_is_accepted(plain, member) for member in accepted):
            error = ValueError if isinstance(plain, float) and int in accepted else TypeError
            raise error(f"{_format(name, value)} is not usable; give {_describe(name, accepted)}.{_get_hint(value)}")
        if isinstance(plain, int | float) and not isinstance(plain, bool):
            is_too_large = isinstance(plain, int) and abs(plain) > MAX_INTEGER
            is_infinite = name in MAY_BE_INFINITE and abs(plain) == math.inf
            if is_too_large or not (is_infinite or RANGES.get(name, ANY_NUMBER).holds(plain)):
                raise ValueError(f"{_format(name, plain)} is out of range; give {_describe(name, accepted)}.")
        valid = TEXT_CHOICES.get(name, ())
        for text in plain if isinstance(plain, list | tuple) else [plain]:
            if valid and isinstance(text, str) and text not in valid:
                raise ValueError(
                    f"{_format(name, text)} is not valid ({suggest_name(text, valid)}); choose from {', '.join(valid)}."
                )
        if plain is not value:
            setattr(args, name, plain)


@cache
def _get_accepted(cls: type) -> dict[str, tuple[Any, ...]]:
    accepted: dict[str, tuple[Any, ...]] = {}
    for topic in list_topics(cls):
        hints = typing.get_type_hints(topic)
        accepted.update({name: (*_iterate_members(hint), *ALSO_ACCEPTED.get(name, ())) for name, hint in hints.items()})
        for field in dataclasses.fields(topic):
            if bool in accepted[field.name] and field.default is False:
                # None means False.
                accepted[field.name] += (None,)
    return accepted


def _iterate_members(hint: Any) -> Iterable[Any]:
    if typing.get_origin(hint) in (Union, types.UnionType):
        for member in typing.get_args(hint):
            yield from _iterate_members(member)
    elif typing.get_origin(hint) is Literal:
        yield from typing.get_args(hint)
    else:
        yield None if hint is types.NoneType else hint


def _convert_number(value: Any, accepted: tuple[Any, ...]) -> Any:
    if isinstance(value, bool):
        return value
    if bool in accepted and type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    if not isinstance(value, numbers.Real):
        return value
    if isinstance(value, numbers.Integral):
        integer = int(value)
        return bool(integer) if bool in accepted and int not in accepted and integer in (0, 1) else integer
    real = float(value)
    if int in accepted and float not in accepted and real.is_integer():
        return int(real)
    return real


def _is_accepted(value: Any, member: Any) -> bool:
    if member is Any:
        return True
    if member is None or isinstance(member, bool):
        return value is member
    if member in (int, float):
        return isinstance(value, int | member) and not isinstance(value, bool)
    origin = typing.get_origin(member) or member
    if origin is list:
        kind = (typing.get_args(member) or (object,))[0]
        kind = str if issubclass(kind, Enum) else kind
        return isinstance(value, list | tuple) and all(isinstance(item, kind) for item in value)
    return isinstance(value, origin) and (origin is not dict or all(isinstance(key, str) for key in value))


def _describe(name: str, accepted: tuple[Any, ...]) -> str:
    allowed = RANGES.get(name, ANY_NUMBER)
    descriptions: dict[Any, str] = {
        bool: "true or false",
        int: f"a whole number{allowed}",
        float: f"a number{allowed}",
        str: f"one of {', '.join(TEXT_CHOICES[name])}" if name in TEXT_CHOICES else "text",
        os.PathLike: "a path",
        Path: "a path",
        BaseContext: "a multiprocessing context",
        list: "a list of texts",
        dict: "a dict with texts as keys",
        None: "None",
        False: "false",
    }
    kinds = [typing.get_origin(member) or member for member in accepted]
    return " or ".join(dict.fromkeys(descriptions.get(kind, getattr(kind, "__name__", str(kind))) for kind in kinds))


def _format(name: str, value: Any) -> str:
    if name.endswith("_token"):
        return name
    text = repr(value) if isinstance(value, str | numbers.Number | list | dict | tuple | None) else "..."
    text = " ".join(text.split())
    return f"{name}={text if len(text) <= 60 else text[:60] + '...'}"


def _get_hint(value: Any) -> str:
    try:
        is_number = isinstance(value, str) and float(value) is not None
    except ValueError:
        is_number = False
    return " Write the number without quotes; YAML takes 5e-5 for text and 5.0e-5 for a number." if is_number else ""


# ---- Combinations of arguments ---------------------------------------------------------------------------------------

STEP_INTERVALS = {
    "logging_steps": "logging_strategy",
    "eval_steps": "eval_strategy",
    "save_steps": "save_strategy",
}

# Checked when a Trainer is made, since a script may set the number of processes late.
WORKER_FIELDS = ("dataloader_persistent_workers", "dataloader_multiprocessing_context")

# Argument that forms batches or rows by length -> required values of other arguments.
REQUIRED_BY_LENGTH = {
    "train_sampling_strategy": "random",
    "sortish_sampler": False,
    "split_batches": False,
    "use_seedable_sampler": True,
}
REQUIRED_VALUES: dict[str, dict[str, Any]] = {
    "pack_to_length": REQUIRED_BY_LENGTH,
    "max_tokens_per_batch": {
        **REQUIRED_BY_LENGTH,
        **dict.fromkeys(("pack_to_length", "dispatch_batches", "global_batch_size")),
        **dict.fromkeys(("auto_find_batch_size", "dataloader_drop_last", "eval_use_gather_object"), False),
        # Needed to restore the dataset's order.
        "eval_do_concat_batches": True,
    },
}

# Scale of step shares, so that rounding errors do not matter.
MILLIONTHS = 1_000_000


def validate(args: ArgumentFields) -> None:
    _check_step_intervals(args)
    if getattr(args, "is_for_trainer", True):
        _check_best_model(args)
        check_nonfinite_arguments(args)
        if args.lr_scheduler_type in METRIC_DRIVEN_SCHEDULES and args.eval_strategy == IntervalStrategy.NO:
            raise ValueError(
                f"lr_scheduler_type={_get_text(args.lr_scheduler_type)!r} follows an evaluation metric; "
                'set eval_strategy to "steps" or "epoch".'
            )
    optim = str(_get_text(args.optim))
    for name, is_set in (
        ("auto_find_batch_size=True, which starts over instead", args.auto_find_batch_size),
        ("ddp_static_graph=True, whose first pass waits for all processes", args.ddp_static_graph),
        (f"optim={optim!r}, which updates weights in the backward pass", "layerwise" in optim or "lomo" in optim),
    ):
        if args.auto_micro_batch and is_set:
            raise ValueError(f"auto_micro_batch does not go with {name}: choose one of them.")
    if args.ema_decay is not None and args.load_best_model_at_end and args.ema_use != "both":
        differ = f"with ema_use={args.ema_use!r} a checkpoint holds other weights than were evaluated"
        raise ValueError(f'load_best_model_at_end: {differ}; set ema_use="both".')
    for first, second in (("fp16", "bf16"), ("fp16_full_eval", "bf16_full_eval")):
        if getattr(args, first) and getattr(args, second):
            raise ValueError(f"{first} and {second} are both set; choose one of them.")
    if args.loss_normalization == "exact" and not args.average_tokens_across_devices:
        raise ValueError(
            'loss_normalization="exact" divides by what all processes count, and average_tokens_across_devices=False '
            "by what each counts; leave that at True."
        )
    if args.signature_columns is not None and not (args.remove_unused_columns and args.signature_columns):
        kept = "all columns are kept" if not args.remove_unused_columns else "it would keep no column"
        raise ValueError(
            f"signature_columns={args.signature_columns} names the columns that remove_unused_columns keeps, and with "
            f"remove_unused_columns={args.remove_unused_columns} {kept}: leave it out, or change that."
        )
    checkpointing: Any = args.activation_checkpointing_kwargs or {}
    every = checkpointing.get("every_n_layers", 1)
    if not isinstance(every, int) or every < 1:
        raise ValueError(
            f"activation_checkpointing_kwargs={{'every_n_layers': {every!r}}} must be a whole number above 0."
        )
    check_loader_processes(args, ("dataloader_prefetch_factor",))
    if getattr(args.accelerator_config, "use_configured_state", False):
        get_configured_device()
    strategy = args.train_sampling_strategy
    if getattr(args, "sortish_sampler", False) and strategy not in ("random", "group_by_length"):
        raise ValueError(
            f"sortish_sampler groups training samples by length and train_sampling_strategy={strategy!r} does not; "
            "set one of them."
        )
    for name, requirements in REQUIRED_VALUES.items():
        for other, required in requirements.items() if getattr(args, name) is not None else ():
            holder = args.accelerator_config if hasattr(args.accelerator_config, other) else args
            value = getattr(holder, other, required)
            if value != required and (value or required):
                raise ValueError(
                    f"{name}={getattr(args, name)} decides which samples form a batch, and cannot be combined with "
                    f"{other}={_get_text(value)!r}. Set {other}={required!r}, or leave {name} out."
                )


def _check_step_intervals(args: ArgumentFields) -> None:
    if args.logging_strategy == IntervalStrategy.STEPS and args.logging_steps == 0:
        raise ValueError('logging_strategy="steps" needs logging_steps other than 0; give one, or use "epoch" or "no".')
    for name, strategy in STEP_INTERVALS.items():
        steps: Any = getattr(args, name)
        if getattr(args, strategy) == IntervalStrategy.STEPS and steps > 1:
            if steps != int(steps):
                raise ValueError(
                    f"{name}={steps} is not a whole number; from 1 up it counts steps, only below 1 is it a share of "
                    "them."
                )
            setattr(args, name, int(steps))


def _check_best_model(args: ArgumentFields) -> None:
    name = "load_best_model_at_end" if args.load_best_model_at_end else "save_total_limit_best"
    if not getattr(args, name) or args.save_strategy == SaveStrategy.BEST:
        return
    if args.eval_strategy != args.save_strategy:
        raise ValueError(
            f"{name} needs a checkpoint for each evaluation, but "
            f"eval_strategy={_get_text(args.eval_strategy)!r} and save_strategy={_get_text(args.save_strategy)!r}; "
            'set both to the same value, or save_strategy="best".'
        )
    saving, evaluating = args.save_steps, args.eval_steps or 0
    if args.eval_strategy != IntervalStrategy.STEPS or saving % evaluating == 0:
        return
    are_shares = saving < 1 and evaluating < 1
    if not are_shares or (saving * MILLIONTHS) % (evaluating * MILLIONTHS) != 0:
        raise ValueError(
            f"{name} needs an evaluation at each checkpoint, but "
            f"save_steps={args.save_steps} is not a multiple of eval_steps={args.eval_steps}."
        )


def check_nonfinite_arguments(args: Any, optimizer: Any = None, splits_weights: bool = False) -> None:
    """Raise ValueError if `on_nonfinite`, or checkpoints to keep, conflict with other arguments.

    Parameters:
        splits_weights: whether tensor parallelism or version 1 of FSDP splits weights.
    """
    policy, optim = args.on_nonfinite, str(_get_text(args.optim))
    optimizer_name = f"optim={optim!r}" if optimizer is None else type(optimizer).__name__
    in_backward = "layerwise" in optim or "lomo" in optim or hasattr(optimizer, "fused_backward")
    saves_none = args.save_strategy == SaveStrategy.NO and args.save_minutes is None
    conflicts = (
        (("rollback",), saves_none, 'needs checkpoints, and save_strategy="no" saves none'),
        (("rollback",), args.save_only_model, "needs optimizer states, and save_only_model=True does not save them"),
        (("rollback",), args.ignore_data_skip, "reads on from its checkpoint, and ignore_data_skip=True begins again"),
        (("rollback",), splits_weights, "does not go with tp_size nor with version 1 of FSDP"),
        (("skip", "rollback"), args.deepspeed, "looks at gradients before the step, and DeepSpeed's engine hides them"),
        (("skip",), in_backward, f"leaves out steps, and {optimizer_name} updates weights in the backward pass"),
    )
    for policies, is_conflict, reason in conflicts:
        if policy in policies and is_conflict:
            raise ValueError(f'on_nonfinite={policy!r} {reason}. Change that, or choose on_nonfinite="warn" or "stop".')
    for name, has_none, other in (
        ("save_total_limit_best", saves_none, 'save_strategy="no"'),
        ("keep_optimizer_states", args.save_only_model, "save_only_model=True"),
    ):
        if has_none and getattr(args, name) is not None:
            raise ValueError(f"{name} has nothing to keep with {other}. Change that, or leave {name} out.")


def check_loader_processes(args: ArgumentFields, names: Iterable[str] = WORKER_FIELDS) -> None:
    """Raise ValueError for settings of loader processes without loader processes."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value is not False and args.dataloader_num_workers == 0:
            raise ValueError(
                f"{name}={value!r} needs loader processes; set dataloader_num_workers above 0 or leave {name} unset."
            )


def apply_global_batch_size(args: Any, batch_size: int | None = None, is_of_dict: bool = False) -> None:
    """Derive `gradient_accumulation_steps` from `global_batch_size`.

    Parameters:
        is_of_dict: whether the arguments are from `to_dict()`, so that other sizes may have set the accumulation.
    """
    total, size = args.global_batch_size, batch_size or args.train_batch_size
    if total is None:
        return
    processes = _count_batch_processes(args)
    steps, left_over = divmod(total, size * processes)
    if left_over:
        valid = list_valid_batch_sizes(args)
        nearest = [other for other in valid if other < size][-2:] + [other for other in valid if other > size][:2]
        sizes = ", ".join(map(str, nearest))
        advice = f"per_device_train_batch_size to one of {sizes}" if sizes else f"it to a multiple of {processes}"
        raise ValueError(
            f"global_batch_size={total} is not a multiple of {size * processes}, the {size} samples of a micro-batch "
            f"times the {processes} process(es). Set {advice}."
        )
    present, config = args.gradient_accumulation_steps, args.accelerator_config
    # Copies by `dataclasses.replace` share the config.
    derived = getattr(config, "derived_accumulation", ())
    if present not in (1, steps, *derived) and not is_of_dict:
        raise ValueError(
            f"gradient_accumulation_steps={present} and global_batch_size={total} are both set, which asks for {steps} "
            "micro-batches in an optimizer step: leave one of them out."
        )
    args.gradient_accumulation_steps, config.derived_accumulation = steps, (*derived, steps)


def list_valid_batch_sizes(args: Any) -> list[int]:
    """Return the micro-batch sizes that divide `global_batch_size`."""
    samples, left_over = divmod(args.global_batch_size, _count_batch_processes(args))
    return [] if left_over else [size for size in range(1, samples + 1) if samples % size == 0]


def _count_batch_processes(args: Any) -> int:
    # With split_batches the processes share a batch.
    return 1 if getattr(args.accelerator_config, "split_batches", False) else data_parallel_size(args)


def _get_text(choice: Any) -> str:
    return getattr(choice, "value", choice)


# ---- Unsupported values ----------------------------------------------------------------------------------------------

SUPPORTED_VALUES: dict[str, tuple[str, ...]] = {"debug": ("underflow_overflow",)}


def refuse_unsupported(args: Any) -> None:
    unsupported = []
    for name, supported in SUPPORTED_VALUES.items():
        value = getattr(args, name)
        texts = [_get_text(item) for item in (value if isinstance(value, list) else [value])]
        if not set(texts) <= set(supported):
            unsupported.append(f"{name}={texts!r} (choose from {', '.join(supported)})")
    unsupported += [
        f"environment variable {name}={value} (unset it)" for name, value in get_refused_variables().items()
    ]
    if unsupported:
        raise NotImplementedError(
            f"littrainer does not support {'; '.join(unsupported)}. "
            "Change that, or run the script with plain `python` to train with transformers."
        )
