"""Sharded training: the keys of `fsdp_config`, and the one plan that arguments or accelerate's environment ask for."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from littrainer.arguments.did_you_mean import suggestion
from littrainer.arguments.json_values import read_json_object

if TYPE_CHECKING:
    from littrainer.arguments.fields import ArgumentFields


TRUE_WORDS = ("1", "true", "yes", "on", "y", "t")
FALSE_WORDS = ("0", "false", "no", "off", "n", "f")

WRAP_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
SHARDING_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
STATE_DICT_TYPES = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")
# Strategies of version 1 -> whether version 2 frees the parameters of a layer after its forward pass.
RESHARDING: Mapping[str, bool] = {"FULL_SHARD": True, "SHARD_GRAD_OP": False}
# Short names of number formats in a mixed precision policy -> torch's, which are taken too.
NUMBER_FORMATS: Mapping[str, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
# Entries of a mixed precision policy, by the version that has them.
POLICY_ENTRIES: Mapping[int, tuple[str, ...]] = {
    1: ("param_dtype", "reduce_dtype", "buffer_dtype", "cast_forward_inputs"),
    2: ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs"),
}


class BadKey(ValueError):
    """A value of `fsdp_config` that cannot be meant; says what can."""


def truth(value: Any) -> bool:
    """True or false, as JSON, Python and environment variables write them."""
    if isinstance(value, str) and value.strip().lower() in (*TRUE_WORDS, *FALSE_WORDS):
        return value.strip().lower() in TRUE_WORDS
    if isinstance(value, bool) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise BadKey("give true or false")


def _whole_number(value: Any) -> int:
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise BadKey("give a whole number from 0 up")
    return value


def _word_of(words: tuple[str, ...], numbered_from: int | None = None) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        text = str(value.name if isinstance(value, Enum) else value).strip().upper()
        if numbered_from is not None and text.isdecimal() and 0 <= int(text) - numbered_from < len(words):
            return words[int(text) - numbered_from]
        if text not in words:
            raise BadKey(f"choose from {', '.join(words)}")
        return text

    return read


def _class_names(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, (list, tuple, set)) or not all(isinstance(name, str) for name in names):
        raise BadKey("give the names of layer classes, such as LlamaDecoderLayer")
    return tuple(name.strip() for name in names if name.strip()) or None


def _version(value: Any) -> int:
    if str(value).strip() not in ("1", "2"):
        raise BadKey("give 1 or 2")
    return int(value)


def _resharding(value: Any) -> bool | str:
    for read in (truth, _word_of(SHARDING_STRATEGIES, numbered_from=1)):
        with contextlib.suppress(BadKey):
            return read(value)
    raise BadKey(f"give true or false, or for version 1 one of {', '.join(SHARDING_STRATEGIES)}")


def _pattern(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value or None
    raise BadKey("give a regular expression that matches the names of modules")


def _precision_policy(value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    policy = dict.fromkeys(("param_dtype", "reduce_dtype"), value) if isinstance(value, str) else value
    if not isinstance(policy, Mapping):
        raise BadKey("give a dict with some of param_dtype, reduce_dtype and output_dtype, or the name of one format")
    read: dict[str, Any] = {}
    for entry, wanted in policy.items():
        if entry == "cast_forward_inputs":
            read[entry] = truth(wanted)
            continue
        if entry not in (*POLICY_ENTRIES[1], *POLICY_ENTRIES[2]):
            raise BadKey(f"{entry!r} is no entry of it ({suggestion(str(entry), POLICY_ENTRIES[2])})")
        name = str(wanted).removeprefix("torch.")
        read[entry] = None if wanted is None else NUMBER_FORMATS.get(name, name)
        if read[entry] not in (None, *NUMBER_FORMATS.values()):
            raise BadKey(f"{entry} has to be one of {', '.join((*NUMBER_FORMATS, *NUMBER_FORMATS.values()))}")
    return read


class Key(NamedTuple):
    """One key of `fsdp_config`.

    Parameters:
        read: from what is given to what is meant; raises `BadKey`.
        default: if the key is not given.
        in_2, in_1: what torch's or Lightning's argument it becomes in that version; None has no use for the key.
        only: version -> the values that this version carries out, if not all of them.
    """

    read: Callable[[Any], Any]
    default: Any
    in_2: str
    in_1: str | None
    only: Mapping[int, tuple[Any, ...]] = {}

    @property
    def becomes(self) -> dict[int, str]:
        """What the key becomes, by version."""
        return {2: self.in_2} if self.in_1 is None else {2: self.in_2, 1: self.in_1}


IN_FILES = "how checkpoints hold weights and optimizer: in one file, or each process its part"
FROM_THE_FIRST = "`from_pretrained` is told that only the first process needs weights; the others get them"

KEYS: dict[str, Key] = {
    "version": Key(_version, 2, "`ModelParallelStrategy` and `fully_shard`", "`FSDPStrategy`"),
    "reshard_after_forward": Key(
        _resharding, True, "`fully_shard(reshard_after_forward=)`", "`FSDPStrategy(sharding_strategy=)`"
    ),
    "cpu_offload": Key(
        truth, False, "`fully_shard(offload_policy=CPUOffloadPolicy())`", "`FSDPStrategy(cpu_offload=)`"
    ),
    "auto_wrap_policy": Key(
        _word_of(WRAP_POLICIES),
        None,
        "the modules that `fully_shard` is called for",
        "`FSDPStrategy(auto_wrap_policy=)`",
    ),
    "transformer_layer_cls_to_wrap": Key(
        _class_names,
        None,
        "the classes of these modules; by default the model's own list",
        "`transformer_auto_wrap_policy`",
    ),
    "min_num_params": Key(
        _whole_number,
        0,
        "how many parameters such a module has at least",
        "`size_based_auto_wrap_policy(min_num_params=)`",
    ),
    "state_dict_type": Key(
        _word_of(("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"), numbered_from=1),
        "FULL_STATE_DICT",
        IN_FILES,
        IN_FILES,
        {2: STATE_DICT_TYPES, 1: STATE_DICT_TYPES},
    ),
    "activation_checkpointing": Key(
        truth,
        False,
        "each wrapped layer runs in `torch.utils.checkpoint.checkpoint`",
        "`FSDPStrategy(activation_checkpointing_policy=)`",
    ),
    "activation_checkpointing_offload": Key(
        truth, False, "`torch.autograd.graph.save_on_cpu` around it", None, {1: (False,)}
    ),
    "cpu_ram_efficient_loading": Key(truth, False, FROM_THE_FIRST, FROM_THE_FIRST),
    "sync_module_states": Key(
        truth,
        True,
        "the first process's weights are sent to all before `fully_shard`",
        "`FSDPStrategy(sync_module_states=)`",
    ),
    "forward_prefetch": Key(
        truth, False, "`FSDPModule.set_modules_to_forward_prefetch`", "`FSDPStrategy(forward_prefetch=)`"
    ),
    "backward_prefetch": Key(
        _word_of(PREFETCHES, numbered_from=1),
        "NO_PREFETCH",
        "nothing to set: version 2 gathers ahead by itself",
        "`FSDPStrategy(backward_prefetch=)`",
        {2: ("NO_PREFETCH", "BACKWARD_PRE")},
    ),
    "limit_all_gathers": Key(
        truth, True, "nothing to set: version 2 always does", "`FSDPStrategy(limit_all_gathers=)`", {2: (True,)}
    ),
    "use_orig_params": Key(
        truth, True, "nothing to set: version 2 always does", "`FSDPStrategy(use_orig_params=)`", {2: (True,)}
    ),
    "ignored_modules": Key(_pattern, None, "`fully_shard(ignored_params=)`", "`FSDPStrategy(ignored_modules=)`"),
    "mixed_precision_policy": Key(
        _precision_policy,
        None,
        "`fully_shard(mp_policy=MixedPrecisionPolicy())`",
        "`FSDPStrategy(mixed_precision=MixedPrecision())`",
    ),
}

# Other names of keys, as accelerate's configuration files have them.
OTHER_NAMES: Mapping[str, str] = {
    "offload_params": "cpu_offload",
    "sharding_strategy": "reshard_after_forward",
    "transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap",
    "transformer_cls_to_wrap": "transformer_layer_cls_to_wrap",
}
# Keys about TPUs, which no strategy of Lightning's carries out, with what they hold where they ask for nothing.
TPU_KEYS: Mapping[str, Any] = {
    "xla": False,
    "xla_fsdp_v2": False,
    "xla_fsdp_grad_ckpt": False,
    "xla_fsdp_settings": None,
}
# Environment variable of `accelerate launch` -> key; what no argument of the launcher says is left out.
VARIABLES: Mapping[str, str] = {
    "FSDP_SHARDING_STRATEGY": "sharding_strategy",
    "FSDP_OFFLOAD_PARAMS": "cpu_offload",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "transformer_layer_cls_to_wrap",
    **{
        f"FSDP_{key.upper()}": key
        for key in KEYS
        if key not in ("cpu_offload", "transformer_layer_cls_to_wrap", "limit_all_gathers", "mixed_precision_policy")
    },
}
# Keys that its environment holds whatever was asked for, and that mean nothing to version 2.
MEANINGLESS_IN_2 = frozenset(
    {"sharding_strategy", "use_orig_params", "sync_module_states", "forward_prefetch", "backward_prefetch"}
)


# ---- The plan --------------------------------------------------------------------------------------------------------


PREFIX = "fsdp_"
SWITCH_VARIABLE = "ACCELERATE_USE_FSDP"
RAM_VARIABLE = "FSDP_CPU_RAM_EFFICIENT_LOADING"
TRANSFORMER_BASED, SIZE_BASED, NO_WRAP = WRAP_POLICIES
OFFLOAD, AUTO_WRAP = "offload", "auto_wrap"
# Words that `fsdp` takes, as transformers 4 had them.
WORDS = (*(name.lower() for name in SHARDING_STRATEGIES), OFFLOAD, AUTO_WRAP)

# Whether `ask_for_efficient_loading` has set the switch in the environment of this process.
_switched_on_here = False


@dataclass(frozen=True)
class ShardingPlan:
    """How parameters, gradients and optimizer states are sharded; each field is a key of `fsdp_config`.

    Parameters:
        reshard_after_forward: in version 2 whether a layer's parameters are freed after its forward pass, in version 1
            the name of torch's sharding strategy.
    """

    version: int
    reshard_after_forward: bool | str
    cpu_offload: bool
    auto_wrap_policy: str
    transformer_layer_cls_to_wrap: tuple[str, ...] | None
    min_num_params: int
    state_dict_type: str
    activation_checkpointing: bool
    activation_checkpointing_offload: bool
    cpu_ram_efficient_loading: bool
    sync_module_states: bool
    forward_prefetch: bool
    backward_prefetch: str
    limit_all_gathers: bool
    use_orig_params: bool
    ignored_modules: str | None
    mixed_precision_policy: dict[str, Any] | None

    @property
    def saves_shards(self) -> bool:
        """Whether each process writes its part of a checkpoint."""
        return self.state_dict_type == "SHARDED_STATE_DICT"


def sharding_plan(args: Any) -> ShardingPlan | None:
    """The plan that arguments, as they stand now, or the environment of `accelerate launch` ask for; None for no FSDP.

    Raises:
        ValueError: a word, key or value that means nothing, or that the version cannot carry out.
        NotImplementedError: it asks for TPUs.
    """
    words = _words(args.fsdp)
    if words is not None:
        return _plan(_with_words(read_config(args.fsdp_config), words), "fsdp_config")
    return _plan(_launched_config(), "the environment of accelerate launch") if is_launched_with_fsdp() else None


def is_launched_with_fsdp() -> bool:
    """Whether `accelerate launch` asks for FSDP."""
    return not _switched_on_here and os.environ.get(SWITCH_VARIABLE, "").strip().lower() in TRUE_WORDS


def settle_sharding(args: ArgumentFields) -> None:
    """Bring `fsdp` and `fsdp_config` into the form in which scripts read them, and refuse what cannot be carried out.

    Raises:
        ValueError, NotImplementedError: as `sharding_plan`; or `fsdp` together with `deepspeed` or the model's
            own activation checkpointing.
    """
    attributes: Any = args
    words = _words(args.fsdp)
    if words is None:
        given = args.fsdp_config
        entries = given.items() if isinstance(given, Mapping) else [("", given)]
        if any(value for name, value in entries if str(name).removeprefix(PREFIX) != "version"):
            warnings.warn(
                f"fsdp_config={args.fsdp_config!r} has no effect, since fsdp is not switched on. Set fsdp=True.",
                stacklevel=1,
            )
        attributes.fsdp = None if not args.fsdp else attributes.fsdp
    else:
        config = _with_words(read_config(args.fsdp_config), words)
        config.setdefault("min_num_params", 0)
        layers = config.get("transformer_layer_cls_to_wrap")
        if isinstance(layers, str):
            config["transformer_layer_cls_to_wrap"] = [name.strip() for name in layers.split(",")]
        for name, nothing in TPU_KEYS.items():
            if nothing is not None:
                config.setdefault(name, nothing)
        attributes.fsdp, attributes.fsdp_config = True, config
    plan = sharding_plan(args)
    attributes.fsdp_plugin_args = None if plan is None or words is None else plugin_arguments(plan)
    if plan is not None:
        _check_beside(args, plan)
    ask_for_efficient_loading(plan)


def plugin_arguments(plan: ShardingPlan) -> dict[str, Any]:
    """What transformers calls `fsdp_plugin_args`: keywords of accelerate's plugin that mean the same."""
    keywords: dict[str, Any] = {
        "fsdp_version": plan.version,
        "auto_wrap_policy": plan.auto_wrap_policy,
        "cpu_ram_efficient_loading": plan.cpu_ram_efficient_loading,
        "state_dict_type": plan.state_dict_type,
        "reshard_after_forward": plan.reshard_after_forward,
    }
    if plan.cpu_offload:
        keywords["cpu_offload"] = True
    if plan.activation_checkpointing:
        keywords["activation_checkpointing"] = True
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
    """Let `from_pretrained`, which goes by the environment, read weights in the first process alone where planned."""
    global _switched_on_here
    wanted = plan is not None and plan.cpu_ram_efficient_loading
    if wanted and not is_launched_with_fsdp():
        os.environ[SWITCH_VARIABLE] = os.environ[RAM_VARIABLE] = "true"
        _switched_on_here = True
    elif not wanted and _switched_on_here:
        os.environ.pop(SWITCH_VARIABLE, None)
        os.environ[RAM_VARIABLE] = "false"
        _switched_on_here = False


def check_processes(args: Any) -> None:
    """Refuse sharding where this process trains alone, and version 1 on a device that torch has it not for.

    Raises:
        ValueError: either is asked for.
    """
    from littrainer.distributed.environment import is_launched

    plan = sharding_plan(args)
    if plan is None:
        return
    if args.world_size == 1 and not is_launched():
        raise ValueError(
            "fsdp shards a model over several processes, and this one trains alone. Start the script with "
            "`littrainer run --devices 2 script.py` or torchrun; or leave fsdp out."
        )
    if plan.version == 1 and args.device.type == "cpu":
        raise ValueError(
            "fsdp_config has version=1, which torch offers on GPUs only, and this process trains on the CPU. Set "
            "fsdp_config={'version': 2}, which trains on CPUs too."
        )


def read_config(given: Any) -> dict[str, Any]:
    """Return a config without the prefix that its keys may have, from a dict or the path of a JSON file.

    Raises:
        ValueError: the file cannot be read, or holds no JSON object.
    """
    if isinstance(given, (str, os.PathLike)):
        given = read_json_object(given, f"fsdp_config={os.fspath(given)!r}")
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(f"fsdp_config={given!r} is not usable; give a dict, or the path of a JSON file.")
    return {str(name).removeprefix(PREFIX): value for name, value in (given or {}).items()}


# ---- Words, environment and keys -------------------------------------------------------------------------------------


def _words(given: Any) -> list[str] | None:
    """The words of `fsdp`, in lower case; None where it is off."""
    if given is True:
        return []
    if not given:
        return None
    members = given.split() if isinstance(given, str) else list(given)
    words = [str(getattr(member, "value", member)).strip().lower() for member in members]
    if len(words) == 1 and words[0] in (*TRUE_WORDS, *FALSE_WORDS):
        return [] if words[0] in TRUE_WORDS else None
    for word in words:
        if word not in WORDS:
            raise ValueError(
                f"fsdp={given!r} has an unknown word, {word!r} ({suggestion(word, WORDS)}). Set fsdp=True."
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
        # What the launcher holds for the other version.
        config.pop("reshard_after_forward", None)
    if config["auto_wrap_policy"].upper() != SIZE_BASED:
        # Its default, 100 million, stands there whatever the policy.
        config.pop("min_num_params", None)
    if config["auto_wrap_policy"].upper() != TRANSFORMER_BASED:
        config.pop("transformer_layer_cls_to_wrap", None)
    return config


def _plan(config: Mapping[str, Any], source: str) -> ShardingPlan:
    values: dict[str, Any] = {}
    for given_name, value in config.items():
        if given_name in TPU_KEYS:
            if value and str(value).strip().lower() not in FALSE_WORDS:
                raise NotImplementedError(
                    f"littrainer does not carry out {source} with {given_name}={value!r}: it trains on CPUs and GPUs. "
                    "Leave that out, or run the script with plain `python` to train with transformers."
                )
            continue
        name = OTHER_NAMES.get(given_name, given_name)
        if name not in KEYS:
            known = [*KEYS, *OTHER_NAMES]
            raise ValueError(f"{source} has an unknown key, {given_name!r} ({suggestion(given_name, known)}).")
        try:
            read = KEYS[name].read(value)
        except BadKey as error:
            raise ValueError(f"{source} has {given_name}={value!r}; {error}.") from None
        if name in values and values[name] != read:
            raise ValueError(f"{source} gives {name} twice, once as {given_name}, and they differ.")
        values[name] = read
    version = values.get("version", KEYS["version"].default)
    for name, value in values.items():
        only = KEYS[name].only.get(version)
        if only is not None and value not in only:
            raise ValueError(
                f"{source} has {name}={config.get(name, value)!r}, which FSDP version {version} does not carry out; "
                f"set it to {' or '.join(map(str, only))}"
                + (f", or version to {3 - version}." if 3 - version not in KEYS[name].only else ".")
            )
    for name, key in KEYS.items():
        values.setdefault(name, key.default)
    values["reshard_after_forward"] = _resharding_of(version, values["reshard_after_forward"], source)
    values["auto_wrap_policy"] = _policy_of(values, source)
    _check_precision_policy(version, values["mixed_precision_policy"], source)
    if values["activation_checkpointing_offload"] and not values["activation_checkpointing"]:
        raise ValueError(f"{source} has activation_checkpointing_offload without activation_checkpointing; set both.")
    if values["cpu_ram_efficient_loading"] and not values["sync_module_states"]:
        raise ValueError(
            f"{source} has cpu_ram_efficient_loading, with which only the first process has weights, and "
            "sync_module_states=False, with which it does not send them. Leave sync_module_states out."
        )
    return ShardingPlan(**{field.name: values[field.name] for field in fields(ShardingPlan)})


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


def _policy_of(values: Mapping[str, Any], source: str) -> str:
    policy, size, layers = (
        values[name] for name in ("auto_wrap_policy", "min_num_params", "transformer_layer_cls_to_wrap")
    )
    if size > 0 and layers is not None:
        raise ValueError(
            f"{source} has min_num_params={size} and transformer_layer_cls_to_wrap: modules are wrapped by their size "
            "or by their class. Leave one of them out."
        )
    if policy is None:
        return SIZE_BASED if size > 0 else TRANSFORMER_BASED
    if policy == SIZE_BASED and size == 0:
        raise ValueError(
            f"{source} has auto_wrap_policy={SIZE_BASED}, which needs min_num_params; give a number above 0."
        )
    if policy != SIZE_BASED and size > 0:
        raise ValueError(
            f"{source} has min_num_params={size}, which is for auto_wrap_policy={SIZE_BASED}, not {policy}."
        )
    if policy != TRANSFORMER_BASED and layers is not None:
        raise ValueError(
            f"{source} has transformer_layer_cls_to_wrap, which is for auto_wrap_policy={TRANSFORMER_BASED}, not "
            f"{policy}."
        )
    return policy


def _check_precision_policy(version: int, policy: Mapping[str, Any] | None, source: str) -> None:
    others = [name for name in policy or () if name not in POLICY_ENTRIES[version]]
    if others:
        raise ValueError(
            f"{source} has {', '.join(others)} in mixed_precision_policy, which FSDP version {version} does not know; "
            f"it knows {', '.join(POLICY_ENTRIES[version])}."
        )


def _check_beside(args: Any, plan: ShardingPlan) -> None:
    if args.deepspeed:
        raise ValueError(
            "fsdp and deepspeed are both given, and each shards the model by itself. Leave one of them out."
        )
    if plan.activation_checkpointing and args.activation_checkpointing:
        raise ValueError(
            "activation_checkpointing is True in fsdp_config and in the arguments (or gradient_checkpointing is), and "
            "layers would be recomputed twice. Leave the argument out."
        )
    if plan.saves_shards and args.save_only_model:
        raise ValueError(
            "save_only_model=True writes models for from_pretrained, and fsdp_config has "
            "state_dict_type=SHARDED_STATE_DICT. Set state_dict_type to FULL_STATE_DICT."
        )
