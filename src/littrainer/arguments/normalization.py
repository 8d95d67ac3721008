"""Normalization of arguments."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

from littrainer.arguments.accelerator_config import AcceleratorConfig
from littrainer.arguments.choices import (
    DebugOption,
    HubStrategy,
    IntervalStrategy,
    OptimizerNames,
    SaveStrategy,
    SchedulerType,
    get_script_stacklevel,
)
from littrainer.arguments.fields import ArgumentFields
from littrainer.arguments.json_values import convert_nested_text, parse_json_object
from littrainer.arguments.report_to import list_available_services, list_trackers
from littrainer.runtime.remote_folder import local_folder, strip_credentials

DEFAULT_OUTPUT_DIR = "trainer_output"

CHOICE_FIELDS: dict[str, type[Enum]] = {
    "eval_strategy": IntervalStrategy,
    "logging_strategy": IntervalStrategy,
    "save_strategy": SaveStrategy,
    "hub_strategy": HubStrategy,
    "lr_scheduler_type": SchedulerType,
    "optim": OptimizerNames,
}

# Dict fields whose text is JSON and never a path.
JSON_TEXT_ONLY_FIELDS = (
    "activation_checkpointing_kwargs",
    "gradient_checkpointing_kwargs",
    "lr_scheduler_kwargs",
    "lightning",
)

# Alias -> name with precedence; both get the same value.
ALIASES = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}

METRIC_DRIVEN_SCHEDULES = (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)


def normalize(args: ArgumentFields, dict_fields: Iterable[str]) -> None:
    """Normalize each field; `dict_fields` may be JSON text."""
    args.output_dir = os.path.expanduser(DEFAULT_OUTPUT_DIR if args.output_dir is None else args.output_dir)
    folder = local_folder(args.output_dir)
    if folder != args.output_dir:
        if args.save_on_each_node:
            raise ValueError(
                f"output_dir={args.output_dir!r} with save_on_each_node=True: each node would upload to it. Leave "
                "save_on_each_node at False, so that one process uploads what all nodes send to it."
            )
        # Scripts search an existing folder for a checkpoint.
        with contextlib.suppress(OSError):
            os.makedirs(folder, exist_ok=True)
        args.output_dir = folder
    if isinstance(args.resume_from_checkpoint, str):
        args.resume_from_checkpoint = strip_credentials(args.resume_from_checkpoint)
    if args.logging_dir is not None:
        args.logging_dir = os.path.expanduser(args.logging_dir)
    for name in dict_fields:
        value = getattr(args, name)
        if isinstance(value, str) and (value.lstrip().startswith("{") or name in JSON_TEXT_ONLY_FIELDS):
            setattr(args, name, convert_nested_text(parse_json_object(value, name)))
    for alias, name in ALIASES.items():
        if getattr(args, name) is None:
            setattr(args, name, getattr(args, alias))
        setattr(args, alias, getattr(args, name))
    if args.activation_checkpointing is None:
        args.activation_checkpointing = args.gradient_checkpointing = False
    _apply_warmup_ratio(args)
    _convert_choices(args)
    trackers = list_trackers(args.report_to)
    args.report_to = list_available_services() if trackers == ["all"] else trackers
    args.restore_callback_states_from_checkpoint = bool(args.restore_callback_states_from_checkpoint)
    if args.disable_tqdm is None:
        loggers = (logging.getLogger(name) for name in ("littrainer", "transformers"))
        args.disable_tqdm = max(logger.getEffectiveLevel() for logger in loggers) > logging.WARNING
    if isinstance(args.include_num_input_tokens_seen, bool):
        args.include_num_input_tokens_seen = "all" if args.include_num_input_tokens_seen else "no"
    _derive_evaluation(args)
    _derive_switches(args)
    args.accelerator_config = AcceleratorConfig.from_argument(args.accelerator_config)


def unpack_containers(args: ArgumentFields) -> None:
    """Replace containers of omegaconf (hydra) by dicts and lists."""
    if "omegaconf" in sys.modules:
        for name, value in vars(args).items():
            setattr(args, name, _unpack(value))


def _unpack(value: Any) -> Any:
    is_foreign = type(value).__module__.partition(".")[0] == "omegaconf"
    if type(value) is dict or (is_foreign and isinstance(value, Mapping)):
        return {name: _unpack(entry) for name, entry in value.items()}
    is_list = type(value) is list or (is_foreign and isinstance(value, Sequence))
    return [_unpack(entry) for entry in value] if is_list else value


def is_copy_of_normalized(args: ArgumentFields) -> bool:
    """Return whether arguments are a copy by `dataclasses.replace` or `to_dict()`.

    Derived values of a copy are not the script's wishes.
    """
    settings: Any = args.accelerator_config
    if isinstance(settings, AcceleratorConfig):
        # `replace` may have set a few.
        return sum(isinstance(getattr(args, name), Enum) for name in CHOICE_FIELDS) > len(CHOICE_FIELDS) / 2
    # `to_dict()` of arguments omits `use_configured_state`.
    all_settings = AcceleratorConfig().to_dict().keys() - {"use_configured_state"}
    return isinstance(settings, dict) and settings.keys() >= all_settings


def _apply_warmup_ratio(args: ArgumentFields) -> None:
    ratio, steps = args.warmup_ratio, args.warmup_steps
    if ratio is not None:
        # With 0, the former default, scripts mean the steps.
        args.warmup_steps = ratio or steps
        ignored = f", and warmup_steps={steps} is set aside" if args.warmup_steps != steps and steps != 0 else ""
        warnings.warn(
            f"warmup_ratio={ratio} is an earlier spelling: write warmup_steps={args.warmup_steps}, which below 1 is a "
            f"share of all steps{ignored}.",
            FutureWarning,
            stacklevel=get_script_stacklevel(),
        )


def _convert_choices(args: ArgumentFields) -> None:
    debug = args.debug.split() if isinstance(args.debug, str) else args.debug or []
    kinds: dict[str, type[Enum]] = {**CHOICE_FIELDS, "debug": DebugOption}
    for name, kind in kinds.items():
        try:
            value: Any = [kind(option) for option in debug] if name == "debug" else kind(getattr(args, name))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        setattr(args, name, value)


def _derive_evaluation(args: ArgumentFields) -> None:
    if args.eval_strategy != IntervalStrategy.NO:
        args.do_eval = True
    if args.eval_strategy == IntervalStrategy.STEPS and not args.eval_steps:
        if args.logging_steps <= 0:
            raise ValueError(
                'eval_strategy="steps" needs eval_steps or logging_steps above 0, '
                f"got eval_steps={args.eval_steps} and logging_steps={args.logging_steps}."
            )
        args.eval_steps = args.logging_steps
    ranks_checkpoints = args.load_best_model_at_end or args.save_total_limit_best
    watches_a_metric = ranks_checkpoints or args.lr_scheduler_type in METRIC_DRIVEN_SCHEDULES
    if watches_a_metric and args.metric_for_best_model is None:
        args.metric_for_best_model = "loss"
    if args.greater_is_better is None and args.metric_for_best_model is not None:
        args.greater_is_better = not args.metric_for_best_model.endswith("loss")


def _derive_switches(args: ArgumentFields) -> None:
    if args.jit_checkpoint_signals:
        args.enable_jit_checkpoint = True
    if args.torch_compile_mode is not None or args.torch_compile_backend is not None:
        args.torch_compile = True
    if args.torch_compile and args.torch_compile_backend is None:
        args.torch_compile_backend = "inductor"
    if args.use_cpu:
        args.dataloader_pin_memory = False
    is_open = args.dataloader_multiprocessing_context is None and args.dataloader_num_workers > 1
    if is_open and sys.platform == "darwin":
        import torch

        if torch.backends.mps.is_available():
            # Metal fails with other start methods.
            args.dataloader_multiprocessing_context = "fork"
