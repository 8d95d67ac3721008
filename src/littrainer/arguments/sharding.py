"""Sharded training: the keys of `fsdp_config`, and the one plan that arguments or accelerate's environment ask for."""

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
# Words that `fsdp` takes, as transformers 4 had them.
WORDS = (*(name.lower() for name in SHARDING_STRATEGIES), OFFLOAD, "auto_wrap")

# In the environment if `ask_for_efficient_loading` has set the switch there, and no launcher.
SET_BY_ARGUMENTS = "LITTRAINER_SWITCHED_FSDP_ON"


@dataclass(frozen=True)
class ShardingPlan:
    """Plan by which parameters, gradients and optimizer states are sharded; each field is a key of `fsdp_config`.

    Parameters:
        reshard_after_forward: in version 2 whether a layer's parameters are freed after its forward pass, in version 1
            the name of torch's sharding strategy.
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
        """Whether each process writes its part of a checkpoint."""
        return self.state_dict_type == "SHARDED_STATE_DICT"


def get_sharding_plan(args: Any) -> ShardingPlan | None:
    """Return the plan that arguments or the environment of `accelerate launch` ask for; None for no FSDP."""
    words = _words(args.fsdp)
    if words is not None:
        return _plan(_with_words(read_config(args.fsdp_config), words), "fsdp_config")
    return _plan(_launched_config(), "the environment of accelerate launch") if is_launched_with_fsdp() else None


def is_launched_with_fsdp() -> bool:
    """Whether `accelerate launch` asks for FSDP."""
    return SET_BY_ARGUMENTS not in os.environ and os.environ.get(USE_FSDP, "").strip().lower() in TRUE_VALUES


def normalize_sharding(args: ArgumentFields) -> None:
    """Bring `fsdp` and `fsdp_config` into the form that scripts read, and refuse what cannot be carried out."""
    attributes: Any = args
    words = _words(args.fsdp)
    if words is None:
        config = args.fsdp_config
        entries = config.items() if isinstance(config, Mapping) else [("", config)]
        if any(value for name, value in entries if str(name).removeprefix(PREFIX) != "version"):
            warnings.warn(
                f"fsdp_config={config!r} has no effect, since fsdp is not switched on. Set fsdp=True.", stacklevel=1
            )
        attributes.fsdp = args.fsdp or None
    else:
        config = _with_words(read_config(args.fsdp_config), words)
        layers = config.get("transformer_layer_cls_to_wrap")
        if isinstance(layers, str):
            config["transformer_layer_cls_to_wrap"] = [name.strip() for name in layers.split(",")]
        # transformers sets them too.
        for name, default in (("min_num_params", 0), *((name, False) for name in TPU_KEYS[:3])):
            config.setdefault(name, default)
        attributes.fsdp, attributes.fsdp_config = True, config
    plan = get_sharding_plan(args)
    attributes.fsdp_plugin_args = None if plan is None or words is None else get_fsdp_plugin_keywords(plan)
    if plan is not None:
        _check_with_arguments(args, plan)
    ask_for_efficient_loading(plan)


def get_fsdp_plugin_keywords(plan: ShardingPlan) -> dict[str, Any]:
    """Return what transformers calls `fsdp_plugin_args`: keywords of accelerate's plugin that mean the same."""
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


def ask_for_efficient_loading(plan: ShardingPlan | None) -> None:
    """Let `from_pretrained`, which reads the environment, load weights in the first process alone, if planned.

    Arguments without sharding leave that to those with it, of which the process may have some too.
    """
    if plan is None:
        return
    if plan.cpu_ram_efficient_loading and not is_launched_with_fsdp():
        os.environ.update(dict.fromkeys((USE_FSDP, RAM_VARIABLE, SET_BY_ARGUMENTS), "true"))
    elif SET_BY_ARGUMENTS in os.environ:
        del os.environ[SET_BY_ARGUMENTS], os.environ[USE_FSDP]
        os.environ[RAM_VARIABLE] = "false"


def check_processes(args: Any) -> None:
    """Refuse sharding in a process that trains alone, and version 1 on a CPU."""
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


def read_config(given: Any) -> dict[str, Any]:
    """Return a config without the prefix that its keys may have, from a dict or the path of a JSON file."""
    entries = {} if given is None else read_mapping(given, "fsdp_config")
    return {str(name).removeprefix(PREFIX): value for name, value in entries.items()}


# ---- What a key may hold ---------------------------------------------------------------------------------------------


def _whole_number(value: Any) -> int:
    if isinstance(value, bool) or not str(value).strip().isdecimal():
        raise ValueError("give a whole number from 0 up")
    return int(value)


def _one_of(*words: str) -> Callable[[Any], str]:
    """Return a function that reads a word, or its number from 1 up, as in enumerations of torch and accelerate."""

    def read(value: Any) -> str:
        text = str(value.name if isinstance(value, Enum) else value).strip().upper()
        if text.isdecimal() and 0 < int(text) <= len(words):
            return words[int(text) - 1]
        if text not in words:
            raise ValueError(f"choose from {', '.join(words)}")
        return text

    return read


def _resharding(value: Any) -> bool | str:
    # The number 1 is torch's FULL_SHARD, which is `True` in version 2.
    if str(value).strip().lower() in (*TRUE_VALUES, *FALSE_VALUES):
        return truth(value)
    try:
        return _one_of(*SHARDING_STRATEGIES)(value)
    except ValueError as error:
        raise ValueError(f"give true or false, or for version 1 {error}") from None


def _class_names(value: Any) -> tuple[str, ...] | None:
    names = value.split(",") if isinstance(value, str) else value or ()
    if not isinstance(names, (list, tuple, set)) or not all(isinstance(name, str) for name in names):
        raise ValueError("give the names of layer classes, such as LlamaDecoderLayer")
    return tuple(name.strip() for name in names if name.strip()) or None


def _pattern(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value or None
    raise ValueError("give a regular expression that matches the names of modules")


# Strategies of version 1 -> whether version 2 frees the parameters of a layer after its forward pass.
RESHARDING: Mapping[str, bool] = {"FULL_SHARD": True, "SHARD_GRAD_OP": False}


class Key(NamedTuple):
    """A key of `fsdp_config`.

    Parameters:
        read: returns the value of the plan; raises ValueError, whose message says what can be given.
        only: version -> the values that it carries out, if not all of them.
    """

    read: Callable[[Any], Any]
    only: Mapping[int, tuple[Any, ...]] = MappingProxyType({})


STATE_DICT_TYPES = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")
KEYS: dict[str, Key] = {
    **{field.name: Key(truth) for field in fields(ShardingPlan)},
    "version": Key(lambda value: int(_one_of("1", "2")(value))),
    "reshard_after_forward": Key(_resharding),
    "auto_wrap_policy": Key(_one_of(TRANSFORMER_BASED, SIZE_BASED, NO_WRAP)),
    "transformer_layer_cls_to_wrap": Key(_class_names),
    "min_num_params": Key(_whole_number),
    "state_dict_type": Key(
        _one_of("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"), dict.fromkeys((1, 2), STATE_DICT_TYPES)
    ),
    "activation_checkpointing_offload": Key(truth, {1: (False,)}),
    # Version 2 prefetches by itself.
    "backward_prefetch": Key(
        _one_of("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"), {2: ("NO_PREFETCH", "BACKWARD_PRE")}
    ),
    "limit_all_gathers": Key(truth, {2: (True,)}),
    "use_orig_params": Key(truth, {2: (True,)}),
    "ignored_modules": Key(_pattern),
}
# Other names of keys, from accelerate's configuration files.
OTHER_NAMES: Mapping[str, str] = {
    "offload_params": "cpu_offload",
    "sharding_strategy": "reshard_after_forward",
    "transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap",
    "transformer_cls_to_wrap": "transformer_layer_cls_to_wrap",
}
# Keys about TPUs, which no strategy of Lightning's carries out.
TPU_KEYS = ("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings")
# Environment variable of `accelerate launch` -> key, as far as the launcher has an option for it.
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
# Keys that the launcher always sets, and that mean nothing to version 2.
MEANINGLESS_IN_2 = frozenset(
    {"sharding_strategy", "use_orig_params", "sync_module_states", "forward_prefetch", "backward_prefetch"}
)


# ---- From words, environment and keys to a plan ----------------------------------------------------------------------


def _words(given: Any) -> list[str] | None:
    """Return the words of `fsdp`, in lower case; None if it is off."""
    if given is True:
        return []
    if not given:
        return None
    members = given.split() if isinstance(given, str) else list(given)
    words = [str(getattr(member, "value", member)).strip().lower() for member in members]
    if len(words) == 1 and words[0] in (*TRUE_VALUES, *FALSE_VALUES):
        return [] if truth(words[0]) else None
    for word in words:
        if word not in WORDS:
            raise ValueError(
                f"fsdp={given!r} has an unknown word, {word!r} ({suggest_name(word, WORDS)}). Set fsdp=True."
            )
    return words


def _with_words(config: dict[str, Any], words: list[str]) -> dict[str, Any]:
    strategies = [word.upper() for word in words if word.upper() in SHARDING_STRATEGIES]
    if len(strategies) > 1:
        raise ValueError(f"fsdp={' '.join(words)!r} names {len(strategies)} ways to shard; name one.")
    if strategies and not {"reshard_after_forward", "sharding_strategy"} & config.keys():
        is_first = str(config.get("version", 2)).strip() == "1"
        config["reshard_after_forward"] = (
            strategies[0].lower() if is_first or strategies[0] not in RESHARDING else RESHARDING[strategies[0]]
        )
    if OFFLOAD in words:
        config.setdefault("cpu_offload", True)
    return config


def _launched_config() -> dict[str, Any]:
    config: dict[str, Any] = {"version": 1, "auto_wrap_policy": NO_WRAP}
    config.update({key: os.environ[name] for name, key in VARIABLES.items() if os.environ.get(name, "").strip()})
    if str(config["version"]) == "2":
        for name in MEANINGLESS_IN_2:
            config.pop(name, None)
        config.setdefault("state_dict_type", "SHARDED_STATE_DICT")
    elif "sharding_strategy" in config:
        # The launcher sets it for the other version.
        config.pop("reshard_after_forward", None)
    if config["auto_wrap_policy"].upper() != SIZE_BASED:
        # The launcher sets its default, 100 million, for each policy.
        config.pop("min_num_params", None)
    if config["auto_wrap_policy"].upper() != TRANSFORMER_BASED:
        config.pop("transformer_layer_cls_to_wrap", None)
    return config


def _plan(config: Mapping[str, Any], source: str) -> ShardingPlan:
    values: dict[str, Any] = {}
    for given_name, value in config.items():
        if given_name in TPU_KEYS:
            if value and str(value).strip().lower() not in FALSE_VALUES:
                raise NotImplementedError(
                    f"littrainer does not carry out {source} with {given_name}={value!r}: it trains on CPUs and GPUs. "
                    "Leave that out, or run the script with plain `python` to train with transformers."
                )
            continue
        name = OTHER_NAMES.get(given_name, given_name)
        if name not in KEYS:
            known = [*KEYS, *OTHER_NAMES]
            raise ValueError(f"{source} has an unknown key, {given_name!r} ({suggest_name(given_name, known)}).")
        try:
            read = KEYS[name].read(value)
        except ValueError as error:
            raise ValueError(f"{source} has {given_name}={value!r}; {error}.") from None
        if values.setdefault(name, read) != read:
            raise ValueError(f"{source} gives {name} twice, once as {given_name}, and they differ.")
    asked = ShardingPlan(**values)
    version, other = asked.version, 3 - asked.version
    for name, key in KEYS.items():
        value, only = getattr(asked, name), key.only.get(version)
        if only is not None and value not in only:
            instead = "" if other in key.only else f", or version to {other}"
            raise ValueError(
                f"{source} has {name}={config.get(name, value)!r}, which FSDP version {version} does not carry out; "
                f"set it to {' or '.join(map(str, only))}{instead}."
            )
    values["reshard_after_forward"] = _resharding_of(version, asked.reshard_after_forward, source)
    if asked.min_num_params > 0:
        values.setdefault("auto_wrap_policy", SIZE_BASED)
    plan = ShardingPlan(**values)
    for message, is_wrong in _contradictions(plan).items():
        if is_wrong:
            raise ValueError(f"{source} has {message}.")
    return plan


def _resharding_of(version: int, value: bool | str, source: str) -> bool | str:
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


def _contradictions(plan: ShardingPlan) -> dict[str, bool]:
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
