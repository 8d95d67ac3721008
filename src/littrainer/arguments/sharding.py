"""FSDP: keys of `fsdp_config`, and the plan of a run."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from littrainer.arguments.did_you_mean import suggest_name
from littrainer.arguments.json_values import read_mapping, truth
from littrainer.distributed.environment import FALSE_VALUES, TRUE_VALUES, USE_FSDP, is_launched

if TYPE_CHECKING:
    from littrainer.arguments.fields import ArgumentFields


PREFIX = "fsdp_"
RAM_VARIABLE = "FSDP_CPU_RAM_EFFICIENT_LOADING"
TRANSFORMER_BASED, SIZE_BASED, NO_WRAP = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
SHARDING_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
OFFLOAD = "offload"
# Options of `fsdp` in transformers 4.
FSDP_OPTIONS = (*(name.lower() for name in SHARDING_STRATEGIES), OFFLOAD, "auto_wrap")

# Marks USE_FSDP as set by arguments, not by a launcher.
SET_BY_ARGUMENTS = "LITTRAINER_SWITCHED_FSDP_ON"


@dataclass(frozen=True)
class ShardingPlan:
    """Normalized `fsdp_config`.

    Parameters:
        reshard_after_forward: whether parameters are freed after the forward pass; in version 1 torch's
            sharding strategy.
    """

    version: int = 2
    reshard_after_forward: bool | str = True
    cpu_offload: bool = False
    auto_wrap_policy: str = TRANSFORMER_BASED
    transformer_layer_cls_to_wrap: tuple[str, ...] | None = None
    min_num_params: int = 0
    state_dict_type: str = "FULL_STATE_DICT"
    activation_checkpointing: bool = False
    activation_checkpointing_offload: bool = False
    cpu_ram_efficient_loading: bool = False
    sync_module_states: bool = True
    forward_prefetch: bool = False
    backward_prefetch: str = "NO_PREFETCH"
    limit_all_gathers: bool = True
    use_orig_params: bool = True
    ignored_modules: str | None = None

    @property
    def has_sharded_checkpoints(self) -> bool:
        return self.state_dict_type == "SHARDED_STATE_DICT"


def get_sharding_plan(args: Any) -> ShardingPlan | None:
    """Return the plan of arguments or `accelerate launch`; None without FSDP."""
    options = _parse_options(args.fsdp) if args.fsdp else None
    if options is not None:
        return _make_plan(_add_options(read_config(args.fsdp_config), options), "fsdp_config")
    if is_launched_with_fsdp():
        return _make_plan(_read_launcher_config(), "the environment of accelerate launch")
    return None


def is_launched_with_fsdp() -> bool:
    return SET_BY_ARGUMENTS not in os.environ and os.environ.get(USE_FSDP, "").strip().lower() in TRUE_VALUES


def normalize_sharding(args: ArgumentFields) -> None:
    attributes: Any = args
    options = _parse_options(args.fsdp)
    if options is None:
        config = args.fsdp_config
        entries = config.items() if isinstance(config, Mapping) else [("", config)]
        if any(value for name, value in entries if str(name).removeprefix(PREFIX) != "version"):
            warnings.warn(
                f"fsdp_config={config!r} has no effect, since fsdp is not switched on. Set fsdp=True.", stacklevel=1
            )
        attributes.fsdp = args.fsdp or None
    else:
        config = _add_options(read_config(args.fsdp_config), options)
        layers = config.get("transformer_layer_cls_to_wrap")
        if isinstance(layers, str):
            config["transformer_layer_cls_to_wrap"] = [name.strip() for name in layers.split(",")]
        # As in transformers.
        for name, default in (("min_num_params", 0), *((name, False) for name in TPU_KEYS[:3])):
            config.setdefault(name, default)
        attributes.fsdp, attributes.fsdp_config = True, config
    plan = get_sharding_plan(args)
    attributes.fsdp_plugin_args = None if plan is None or options is None else get_fsdp_plugin_keywords(plan)
    if plan is not None:
        _check_with_arguments(args, plan)
    enable_efficient_loading(plan)


def get_fsdp_plugin_keywords(plan: ShardingPlan) -> dict[str, Any]:
    """Return transformers' `fsdp_plugin_args`."""
    always = ("auto_wrap_policy", "cpu_ram_efficient_loading", "state_dict_type", "reshard_after_forward")
    keywords: dict[str, Any] = {"fsdp_version": plan.version, **{name: getattr(plan, name) for name in always}}
    keywords.update({name: True for name in ("cpu_offload", "activation_checkpointing") if getattr(plan, name)})
    if plan.auto_wrap_policy == SIZE_BASED:
        keywords["min_num_params"] = plan.min_num_params
    if plan.transformer_layer_cls_to_wrap is not None:
        keywords["transformer_cls_names_to_wrap"] = ",".join(plan.transformer_layer_cls_to_wrap)
    if plan.version == 1:
        keywords["reshard_after_forward"] = str(plan.reshard_after_forward).lower()
        for name in ("forward_prefetch", "backward_prefetch", "use_orig_params", "sync_module_states"):
            keywords[name] = getattr(plan, name)
    return keywords


def enable_efficient_loading(plan: ShardingPlan | None) -> None:
    """Let `from_pretrained` load weights in the main process only, if planned.

    Without a plan nothing changes, since other arguments may have a plan.
    """
    if plan is None:
        return
    if plan.cpu_ram_efficient_loading and not is_launched_with_fsdp():
        os.environ.update(dict.fromkeys((USE_FSDP, RAM_VARIABLE, SET_BY_ARGUMENTS), "true"))
    elif SET_BY_ARGUMENTS in os.environ:
        del os.environ[SET_BY_ARGUMENTS], os.environ[USE_FSDP]
        os.environ[RAM_VARIABLE] = "false"


def check_processes(args: Any) -> None:
    plan = get_sharding_plan(args)
    if plan is None:
        return
    if args.world_size == 1 and not is_launched():
        raise ValueError(
            "fsdp shards a model over several processes, and this process trains alone. Start the script with "
            "`littrainer run --devices 2 script.py` or torchrun; or leave fsdp out."
        )
    if plan.version == 1 and args.device.type == "cpu":
        raise ValueError(
            "fsdp_config has version=1, which torch offers on GPUs only, and this process trains on the CPU. Set "
            "fsdp_config={'version': 2}, which trains on CPUs too."
        )


def read_config(config: Any) -> dict[str, Any]:
    """Return a config without the prefix `fsdp_` of keys."""
    entries = {} if config is None else read_mapping(config, "fsdp_config")
    return {str(name).removeprefix(PREFIX): value for name, value in entries.items()}


# ---- Parsers of values -----------------------------------------------------------------------------------------------


def _parse_integer(value: Any) -> int:
    if isinstance(value, bool) or not str(value).strip().isdecimal():
        raise ValueError("give a whole number from 0 up")
    return int(value)


def _make_choice_parser(*choices: str) -> Callable[[Any], str]:
    """Return a parser of a choice or its number, from 1 up."""

    def parse(value: Any) -> str:
        text = str(value.name if isinstance(value, Enum) else value).strip().upper()
        if text.isdecimal() and 0 < int(text) <= len(choices):
            return choices[int(text) - 1]
        if text not in choices:
            raise ValueError(f"choose from {', '.join(choices)}")
        return text

    return parse


def _parse_resharding(value: Any) -> bool | str:
    # 1 is FULL_SHARD in version 1 and True in version 2.
    if str(value).strip().lower() in (*TRUE_VALUES, *FALSE_VALUES):
        return truth(value)
    try:
        return _make_choice_parser(*SHARDING_STRATEGIES)(value)
    except ValueError as error:
        raise ValueError(f"give true or false, or for version 1 {error}") from None


def _parse_class_names(value: Any) -> tuple[str, ...] | None:
    names = value.split(",") if isinstance(value, str) else value or ()
    if not isinstance(names, (list, tuple, set)) or not all(isinstance(name, str) for name in names):
        raise ValueError("give the names of layer classes, such as LlamaDecoderLayer")
    return tuple(name.strip() for name in names if name.strip()) or None


def _parse_pattern(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value or None
    raise ValueError("give a regular expression that matches the names of modules")


# Strategy of version 1 -> `reshard_after_forward` of version 2.
RESHARDING: Mapping[str, bool] = {"FULL_SHARD": True, "SHARD_GRAD_OP": False}


class Key(NamedTuple):
    """Key of `fsdp_config`.

    Parameters:
        parse: returns the value, or raises ValueError with the valid values.
        supported: version -> supported values, if not all.
    """

    parse: Callable[[Any], Any]
    supported: Mapping[int, tuple[Any, ...]] = MappingProxyType({})


STATE_DICT_TYPES = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")
KEYS: dict[str, Key] = {
    **{field.name: Key(truth) for field in fields(ShardingPlan)},
    "version": Key(lambda value: int(_make_choice_parser("1", "2")(value))),
    "reshard_after_forward": Key(_parse_resharding),
    "auto_wrap_policy": Key(_make_choice_parser(TRANSFORMER_BASED, SIZE_BASED, NO_WRAP)),
    "transformer_layer_cls_to_wrap": Key(_parse_class_names),
    "min_num_params": Key(_parse_integer),
    "state_dict_type": Key(
        _make_choice_parser("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"),
        dict.fromkeys((1, 2), STATE_DICT_TYPES),
    ),
    "activation_checkpointing_offload": Key(truth, {1: (False,)}),
    # Version 2 always prefetches.
    "backward_prefetch": Key(
        _make_choice_parser("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"), {2: ("NO_PREFETCH", "BACKWARD_PRE")}
    ),
    "limit_all_gathers": Key(truth, {2: (True,)}),
    "use_orig_params": Key(truth, {2: (True,)}),
    "ignored_modules": Key(_parse_pattern),
}
# From accelerate's configuration files.
KEY_ALIASES: Mapping[str, str] = {
    "offload_params": "cpu_offload",
    "sharding_strategy": "reshard_after_forward",
    "transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap",
    "transformer_cls_to_wrap": "transformer_layer_cls_to_wrap",
}
TPU_KEYS = ("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings")
# Environment variable of `accelerate launch` -> key.
VARIABLES: Mapping[str, str] = {
    "FSDP_SHARDING_STRATEGY": "sharding_strategy",
    "FSDP_OFFLOAD_PARAMS": "cpu_offload",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "transformer_layer_cls_to_wrap",
    **{
        f"FSDP_{key.upper()}": key
        for key in KEYS
        if key not in ("cpu_offload", "transformer_layer_cls_to_wrap", "limit_all_gathers")
    },
}
# Keys that the launcher always sets and version 2 ignores.
IGNORED_BY_VERSION_2 = frozenset(
    {"sharding_strategy", "use_orig_params", "sync_module_states", "forward_prefetch", "backward_prefetch"}
)


# ---- Parsing of arguments and environment ----------------------------------------------------------------------------


def _parse_options(fsdp: Any) -> list[str] | None:
    """Return the options of `fsdp` in lower case; None if it is off."""
    if fsdp is True:
        return []
    if not fsdp:
        return None
    members = fsdp.split() if isinstance(fsdp, str) else list(fsdp)
    options = [str(getattr(member, "value", member)).strip().lower() for member in members]
    if len(options) == 1 and options[0] in (*TRUE_VALUES, *FALSE_VALUES):
        return [] if truth(options[0]) else None
    for option in options:
        if option not in FSDP_OPTIONS:
            raise ValueError(
                f"fsdp={fsdp!r} has an unknown word, {option!r} ({suggest_name(option, FSDP_OPTIONS)}). Set fsdp=True."
            )
    return options


def _add_options(config: dict[str, Any], options: list[str]) -> dict[str, Any]:
    strategies = [option.upper() for option in options if option.upper() in SHARDING_STRATEGIES]
    if len(strategies) > 1:
        raise ValueError(f"fsdp={' '.join(options)!r} names {len(strategies)} ways to shard; name one.")
    if strategies and not {"reshard_after_forward", "sharding_strategy"} & config.keys():
        is_version_1 = str(config.get("version", 2)).strip() == "1"
        config["reshard_after_forward"] = (
            strategies[0].lower() if is_version_1 or strategies[0] not in RESHARDING else RESHARDING[strategies[0]]
        )
    if OFFLOAD in options:
        config.setdefault("cpu_offload", True)
    return config


def _read_launcher_config() -> dict[str, Any]:
    config: dict[str, Any] = {"version": 1, "auto_wrap_policy": NO_WRAP}
    config.update({key: os.environ[name] for name, key in VARIABLES.items() if os.environ.get(name, "").strip()})
    if str(config["version"]) == "2":
        for name in IGNORED_BY_VERSION_2:
            config.pop(name, None)
        config.setdefault("state_dict_type", "SHARDED_STATE_DICT")
    elif "sharding_strategy" in config:
        # The launcher sets it for version 2.
        config.pop("reshard_after_forward", None)
    if config["auto_wrap_policy"].upper() != SIZE_BASED:
        # The launcher sets 100 million for each policy.
        config.pop("min_num_params", None)
    if config["auto_wrap_policy"].upper() != TRANSFORMER_BASED:
        config.pop("transformer_layer_cls_to_wrap", None)
    return config


def _make_plan(config: Mapping[str, Any], source: str) -> ShardingPlan:
    values: dict[str, Any] = {}
    for alias, value in config.items():
        if alias in TPU_KEYS:
            if value and str(value).strip().lower() not in FALSE_VALUES:
                raise NotImplementedError(
                    f"littrainer does not support {source} with {alias}={value!r}: it trains on CPUs and GPUs. "
                    "Leave that out, or run the script with plain `python` to train with transformers."
                )
            continue
        name = KEY_ALIASES.get(alias, alias)
        if name not in KEYS:
            raise ValueError(f"{source} has an unknown key, {alias!r} ({suggest_name(alias, [*KEYS, *KEY_ALIASES])}).")
        try:
            parsed = KEYS[name].parse(value)
        except ValueError as error:
            raise ValueError(f"{source} has {alias}={value!r}; {error}.") from None
        if values.setdefault(name, parsed) != parsed:
            raise ValueError(f"{source} gives {name} twice, once as {alias}, and they differ.")
    plan = ShardingPlan(**values)
    version, other = plan.version, 3 - plan.version
    for name, key in KEYS.items():
        value, supported = getattr(plan, name), key.supported.get(version)
        if supported is not None and value not in supported:
            alternative = "" if other in key.supported else f", or version to {other}"
            raise ValueError(
                f"{source} has {name}={config.get(name, value)!r}, which FSDP version {version} does not support; "
                f"set it to {' or '.join(map(str, supported))}{alternative}."
            )
    values["reshard_after_forward"] = _convert_resharding(version, plan.reshard_after_forward, source)
    if plan.min_num_params > 0:
        values.setdefault("auto_wrap_policy", SIZE_BASED)
    plan = ShardingPlan(**values)
    for message, is_present in _find_contradictions(plan).items():
        if is_present:
            raise ValueError(f"{source} has {message}.")
    return plan


def _convert_resharding(version: int, value: bool | str, source: str) -> bool | str:
    if version == 1:
        return value if isinstance(value, str) else next(name for name, frees in RESHARDING.items() if frees is value)
    if isinstance(value, bool):
        return value
    if value not in RESHARDING:
        advice = (
            "give parallelism_config={'dp_replicate_size': ..., 'dp_shard_size': ...} for replicas of a sharded model"
            if value.startswith("HYBRID")
            else "leave fsdp out, and each process has a whole model (DDP)"
        )
        raise ValueError(f"{source} asks for {value}, which is FSDP version 1's: {advice}, or set version to 1.")
    return RESHARDING[value]


def _find_contradictions(plan: ShardingPlan) -> dict[str, bool]:
    policy, size, layers = plan.auto_wrap_policy, plan.min_num_params, plan.transformer_layer_cls_to_wrap
    by_size, by_class = policy == SIZE_BASED, policy == TRANSFORMER_BASED
    return {
        f"min_num_params={size} and transformer_layer_cls_to_wrap: modules are wrapped by their size or by their "
        "class. Leave one of them out": bool(size and layers),
        f"auto_wrap_policy={SIZE_BASED}, which needs min_num_params; give a number above 0": by_size and not size,
        f"min_num_params={size}, which is for auto_wrap_policy={SIZE_BASED}, not {policy}": not by_size and size > 0,
        f"transformer_layer_cls_to_wrap, which is for auto_wrap_policy={TRANSFORMER_BASED}, not {policy}": (
            not by_class and layers is not None
        ),
        "activation_checkpointing_offload without activation_checkpointing; set both": (
            plan.activation_checkpointing_offload and not plan.activation_checkpointing
        ),
        "cpu_ram_efficient_loading, with which only the first process has weights, and sync_module_states=False, with "
        "which it does not send them. Leave sync_module_states out": (
            plan.cpu_ram_efficient_loading and not plan.sync_module_states
        ),
    }


def _check_with_arguments(args: Any, plan: ShardingPlan) -> None:
    if args.deepspeed:
        raise ValueError("fsdp and deepspeed are both given, and each shards the model. Leave one of them out.")
    if plan.activation_checkpointing and args.activation_checkpointing:
        raise ValueError(
            "activation_checkpointing is True in fsdp_config and in the arguments (or gradient_checkpointing is): "
            "layers would be recomputed twice. Leave the argument out."
        )
    if plan.has_sharded_checkpoints and args.save_only_model:
        raise ValueError(
            "save_only_model=True writes models for from_pretrained, and fsdp_config has "
            "state_dict_type=SHARDED_STATE_DICT. Set state_dict_type to FULL_STATE_DICT."
        )
