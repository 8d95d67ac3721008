"""Which arguments are not carried out yet, and the refusal of them.

The tables are data: an argument becomes honoured when its row goes.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from littrainer.arguments.accelerator_config import AcceleratorConfig
from littrainer.arguments.fields import ArgumentFields
from littrainer.arguments.normalization import tracker_names

# Field -> topic it belongs to. Refused when set away from its default.
NOT_YET_SUPPORTED: dict[str, str] = {
    "optim_args": "further optimizers",
    "optim_target_modules": "further optimizers",
    "label_smoothing_factor": "label smoothing",
    "bf16": "mixed precision",
    "fp16": "mixed precision",
    "bf16_full_eval": "mixed precision",
    "fp16_full_eval": "mixed precision",
    "tf32": "mixed precision",
    "activation_checkpointing": "activation checkpointing",
    "activation_checkpointing_kwargs": "activation checkpointing",
    "gradient_checkpointing": "activation checkpointing",
    "gradient_checkpointing_kwargs": "activation checkpointing",
    "torch_compile": "compilation",
    "torch_compile_backend": "compilation",
    "torch_compile_mode": "compilation",
    "use_liger_kernel": "fused kernels",
    "liger_kernel_config": "fused kernels",
    "neftune_noise_alpha": "embedding noise",
    "torch_empty_cache_steps": "memory",
    "auto_find_batch_size": "memory",
    "skip_memory_metrics": "memory",
    "enable_jit_checkpoint": "saving on a signal",
    "push_to_hub": "the Hub",
    "parallelism_config": "several processes",
    "fsdp": "several processes",
    "fsdp_config": "several processes",
    "deepspeed": "several processes",
    "debug": "debugging",
}

# Entry of accelerator_config -> topic. Refused when set away from its default.
NOT_YET_SUPPORTED_ACCELERATOR_ENTRIES: dict[str, str] = {
    "split_batches": "batch dispatch",
    "dispatch_batches": "batch dispatch",
    "even_batches": "batch dispatch",
    "non_blocking": "batch dispatch",
    "gradient_accumulation_kwargs": "batch dispatch",
    "use_configured_state": "batch dispatch",
}

# Field -> its values that are carried out; every other value is refused.
HONOURED_VALUES: dict[str, tuple[str, ...]] = {
    "lr_scheduler_type": (
        "linear",
        "cosine",
        "cosine_with_restarts",
        "polynomial",
        "constant",
        "constant_with_warmup",
        "inverse_sqrt",
    ),
    "optim": ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop"),
    "report_to": ("none",),
    "train_sampling_strategy": ("random", "sequential"),
}

# Environment variable -> values that ask for nothing. Launchers set these, and a run under transformers obeys them.
HONOURED_ENVIRONMENT: dict[str, tuple[str, ...]] = {
    "ACCELERATE_MIXED_PRECISION": ("", "no"),
    "ACCELERATE_DYNAMO_BACKEND": ("", "no"),
    "ACCELERATE_USE_FSDP": ("", "0", "false", "no"),
    "ACCELERATE_USE_DEEPSPEED": ("", "0", "false", "no"),
}

# Fields for which 0 or false is a wish of its own and not the same as leaving them unset.
FALSE_IS_A_WISH = ("tf32", "neftune_noise_alpha")

_EMPTY: tuple[Any, ...] = (None, False, "", [], {})


def refuse_unsupported(args: Any) -> None:
    """Refuse every wish in `args` that would not be carried out, all of them in one message.

    Scripts set fields after construction too, so this is called again when training starts.

    Parameters:
        args: a TrainingArguments instance.

    Raises:
        NotImplementedError: names each field with its value, and the value to leave it at.
    """
    refused = [*_refused_fields(args), *_refused_accelerator_entries(args), *_refused_environment()]
    if refused:
        raise NotImplementedError(
            f"littrainer does not carry out {'; '.join(refused)}. "
            "Change that, or run the script with plain `python` to train with transformers."
        )


def _refused_fields(args: Any) -> list[str]:
    refused = []
    for field in dataclasses.fields(ArgumentFields):
        value = getattr(args, field.name)
        if field.name in NOT_YET_SUPPORTED and not _asks_for_nothing(field.name, value, field.default):
            refused.append(f"{field.name}={_shown(value)} (leave it at {_shown(field.default)})")
        elif field.name in HONOURED_VALUES and not _is_honoured_value(field.name, value):
            refused.append(f"{field.name}={_shown(value)} (choose from {', '.join(HONOURED_VALUES[field.name])})")
    return refused


def _asks_for_nothing(name: str, value: Any, default: Any) -> bool:
    if value == default:
        return True
    return not default and name not in FALSE_IS_A_WISH and any(value == empty for empty in _EMPTY)


def _is_honoured_value(name: str, value: Any) -> bool:
    # What names several things may hold None or a list, and holds it in another form when a script has set it later.
    values = tracker_names(value) if name == "report_to" else [value]
    return all(single in HONOURED_VALUES[name] for single in values)


def _refused_accelerator_entries(args: Any) -> list[str]:
    config = AcceleratorConfig.from_argument(args.accelerator_config)
    refused = []
    for field in dataclasses.fields(AcceleratorConfig):
        value = getattr(config, field.name)
        if field.name in NOT_YET_SUPPORTED_ACCELERATOR_ENTRIES and value not in (field.default, {}):
            refused.append(f"accelerator_config[{field.name!r}]={_shown(value)} (leave it at {_shown(field.default)})")
    return refused


def _refused_environment() -> list[str]:
    refused = []
    for name, honoured in HONOURED_ENVIRONMENT.items():
        value = os.environ.get(name, "")
        if value.lower() not in honoured:
            refused.append(f"environment variable {name}={value} (unset it)")
    return refused


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return repr([getattr(item, "value", item) for item in value])
    return repr(getattr(value, "value", value))
