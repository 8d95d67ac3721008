"""Argument names that earlier transformers releases took and the newest does not, and what each means today.

The table is data: the constructor, the command line, attribute access and the documentation read it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from littrainer.arguments.accelerator_config import AcceleratorConfig
from littrainer.arguments.json_values import parse_json_object, read_json_object

Current = Callable[[str], Any]
"""Takes the name of an argument, returns what the script has given for it, or its default."""


@dataclass(frozen=True)
class EarlierName:
    """What became of one argument.

    Parameters:
        advice: what to write instead, as the end of the sentence "X is no longer an argument: ...".
        meaning: takes a value and the current values of today's arguments, returns those of today's arguments that
            follow; None where nothing does, so that every value but the `idle` ones is refused.
        replaced_by: the argument that took over, None where there is none.
        idle: values that ask for nothing, the former default among them and first.
        kind: how a command line reads the value.
        extends: the meaning adds to a value that is given besides, instead of contradicting it.
        harmless: no value ever changed the numbers of a run, so that each may be dropped.
        read: takes arguments, returns what a script finds under the earlier name; None where it finds what it gave.
    """

    advice: str
    meaning: Callable[[Any, Current], dict[str, Any]] | None = None
    replaced_by: str | None = None
    idle: tuple[Any, ...] = (None,)
    kind: type = str
    extends: bool = False
    harmless: bool = False
    read: Callable[[Any], Any] | None = None

    def asks_for_nothing(self, value: Any) -> bool:
        """Whether a value leaves everything as it is."""
        return self.harmless or any(value == idle and type(value) is type(idle) for idle in self.idle)


def _renamed(name: str, kind: type = str) -> EarlierName:
    return EarlierName(
        f"use {name}", lambda value, current: {name: value}, name, kind=kind, read=lambda args: getattr(args, name)
    )


def _switch(advice: str, name: str, value: Any) -> EarlierName:
    return EarlierName(
        advice,
        lambda switched_on, current: {name: value},
        name,
        (False, None),
        bool,
        read=lambda args: getattr(args, name) == value,
    )


def _entry(name: str, key: str, kind: type, idle: tuple[Any, ...] = (None,), several: bool = False) -> EarlierName:
    def meaning(value: Any, current: Current) -> dict[str, Any]:
        entries = _entries_of(current(name), name)
        if several:
            held = entries.get(key) or []
            value = [*([held] if isinstance(held, str) else held), value]
        return {name: {**entries, key: value}}

    return EarlierName(
        f'use {name}={{"{key}": {"[...]" if several else "..."}}}',
        meaning,
        name,
        idle,
        kind,
        extends=True,
        read=lambda args: _entries_of(getattr(args, name), name).get(key, idle[0]),
    )


def _entries_of(config: Any, name: str) -> dict[str, Any]:
    if isinstance(config, str):
        is_json = config.lstrip().startswith("{")
        return parse_json_object(config, name) if is_json else read_json_object(config, name)
    return config.to_dict() if isinstance(config, AcceleratorConfig) else dict(config or {})


def _gone(advice: str, *idle: Any, kind: type = str) -> EarlierName:
    return EarlierName(advice, idle=(*idle, None), kind=kind)


def _harmless(advice: str, default: Any, kind: type) -> EarlierName:
    return EarlierName(advice, idle=(default,), kind=kind, harmless=True)


def _inputs_too(_: Any, current: Current) -> dict[str, Any]:
    wanted = current("include_for_metrics") or []
    wanted = [wanted] if isinstance(wanted, str) else list(wanted)
    return {"include_for_metrics": list(dict.fromkeys([*wanted, "inputs"]))}


def _tokens_counted(_: Any, current: Current) -> dict[str, Any]:
    counted = current("include_num_input_tokens_seen")
    return {"include_num_input_tokens_seen": "all" if counted in (False, None, "no") else counted}


def _tpu_debug_too(_: Any, current: Current) -> dict[str, Any]:
    options = current("debug") or []
    options = options.split() if isinstance(options, str) else [getattr(option, "value", option) for option in options]
    return {"debug": " ".join(dict.fromkeys([*options, "tpu_metrics_debug"]))}


def _within_organization(organization: str, current: Current) -> dict[str, Any]:
    folder = os.path.basename(os.path.normpath(current("output_dir") or "trainer_output"))
    return {"hub_model_id": f"{organization}/{(current('hub_model_id') or folder).rpartition('/')[2]}"}


_TORCH_PRECISION = "drop it, mixed precision always comes from torch"
_NO_REPLACEMENT = "drop it, there is no replacement"

EARLIER_NAMES: Mapping[str, EarlierName] = MappingProxyType(
    {
        # Spelled differently today.
        "evaluation_strategy": _renamed("eval_strategy"),
        "per_gpu_train_batch_size": _renamed("per_device_train_batch_size", int),
        "per_gpu_eval_batch_size": _renamed("per_device_eval_batch_size", int),
        "push_to_hub_token": _renamed("hub_token"),
        "torchdynamo": _renamed("torch_compile_backend"),
        "xpu_backend": _renamed("ddp_backend"),
        "no_cuda": _switch("use use_cpu", "use_cpu", True),
        # A value of another argument today.
        "evaluate_during_training": _switch('use eval_strategy="steps"', "eval_strategy", "steps"),
        "adafactor": _switch('use optim="adafactor"', "optim", "adafactor"),
        "group_by_length": _switch(
            'use train_sampling_strategy="group_by_length"', "train_sampling_strategy", "group_by_length"
        ),
        "include_inputs_for_metrics": EarlierName(
            'use include_for_metrics=["inputs"]',
            _inputs_too,
            "include_for_metrics",
            (False, None),
            bool,
            extends=True,
            read=lambda args: "inputs" in (args.include_for_metrics or ()),
        ),
        "include_tokens_per_second": EarlierName(
            "use include_num_input_tokens_seen",
            _tokens_counted,
            "include_num_input_tokens_seen",
            (False, None),
            bool,
            extends=True,
            read=lambda args: args.include_num_input_tokens_seen != "no",
        ),
        "tpu_metrics_debug": EarlierName(
            'use debug="tpu_metrics_debug"',
            _tpu_debug_too,
            "debug",
            (False, None),
            bool,
            extends=True,
            read=lambda args: "tpu_metrics_debug" in args.debug,
        ),
        # The organisation goes in front of the name, so the name comes first.
        "push_to_hub_model_id": EarlierName(
            'use hub_model_id="name" or "organisation/name"',
            lambda name, _: {"hub_model_id": name},
            "hub_model_id",
            read=lambda args: args.hub_model_id,
        ),
        "push_to_hub_organization": EarlierName(
            'use hub_model_id="organisation/name"',
            _within_organization,
            "hub_model_id",
            extends=True,
            read=lambda args: (args.hub_model_id or "").rpartition("/")[0] or None,
        ),
        "fsdp_min_num_params": _entry("fsdp_config", "min_num_params", int, (0, None)),
        "fsdp_transformer_layer_cls_to_wrap": _entry("fsdp_config", "transformer_layer_cls_to_wrap", str, several=True),
        "dispatch_batches": _entry("accelerator_config", "dispatch_batches", bool),
        "split_batches": _entry("accelerator_config", "split_batches", bool),
        # Set through the environment today.
        "tpu_num_cores": _gone("set the environment variable TPU_NUM_CORES", kind=int),
        "ray_scope": _gone("set the environment variable RAY_SCOPE", "last"),
        # The feature is gone.
        "fp16_backend": _gone(_TORCH_PRECISION, "auto", "amp", "cuda_amp", "cpu_amp"),
        "half_precision_backend": _gone(_TORCH_PRECISION, "auto", "amp", "cuda_amp", "cpu_amp"),
        "jit_mode_eval": _gone("evaluation is not traced any more, use torch_compile=True", False, kind=bool),
        "use_ipex": _gone("use bf16 and torch_compile, which torch has for Intel processors", False, kind=bool),
        "save_safetensors": _gone("drop it, weights are always saved as safetensors", True, kind=bool),
        "past_index": _gone(_NO_REPLACEMENT, -1, kind=int),
        "use_legacy_prediction_loop": _gone("drop it, evaluation_loop does that work", False, kind=bool),
        "mp_parameters": _gone("drop it, there is no SageMaker model parallelism any more", ""),
        "sharded_ddp": _gone("use fsdp", "", False, []),
        "_n_gpu": _gone("drop it, each process uses one GPU", -1, 0, 1, kind=int),
        # Nothing to set any more.
        "overwrite_output_dir": _harmless("drop it, an existing folder is never an error", False, bool),
        "use_mps_device": _harmless("drop it, an Apple GPU is found by itself", False, bool),
        "fp16_opt_level": _harmless("drop it, it was for apex alone", "O1", str),
    }
)
"""Earlier name -> what it means, in the order in which the meanings are worked out."""
