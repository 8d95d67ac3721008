"""What `fsdp_config` may say: the one table that is checked, carried out and documented."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple

from littrainer.arguments.nearest import suggestion

TRUE_WORDS = ("1", "true", "yes", "on", "y", "t")
FALSE_WORDS = ("0", "false", "no", "off", "n", "f")

WRAP_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
SHARDING_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
STATE_DICT_TYPES = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")
# Strategies of version 1 -> whether version 2 frees the parameters of a layer after its forward pass.
RESHARDING: Mapping[str, bool] = {"FULL_SHARD": True, "SHARD_GRAD_OP": False}
# Names of number formats in a mixed precision policy -> torch's.
NUMBER_FORMATS: Mapping[str, str] = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "fp32": "float32",
    "float32": "float32",
}
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
    try:
        return truth(value)
    except BadKey:
        pass
    try:
        return _word_of(SHARDING_STRATEGIES, numbered_from=1)(value)
    except BadKey:
        raise BadKey(f"give true or false, or for version 1 one of {', '.join(SHARDING_STRATEGIES)}") from None


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
        if wanted is not None and name not in NUMBER_FORMATS:
            raise BadKey(f"{entry} has to be one of {', '.join(NUMBER_FORMATS)}")
        read[entry] = None if wanted is None else NUMBER_FORMATS[name]
    return read


class Key(NamedTuple):
    """One key of `fsdp_config`.

    Parameters:
        read: from what is given to what is meant; raises `BadKey`.
        default: where the key is not given.
        becomes: version -> what torch's or Lightning's argument it becomes; a version that is not there has no use
            for the key.
        only: version -> the values that this version carries out, where it does not do so with all of them.
    """

    read: Callable[[Any], Any]
    default: Any
    becomes: Mapping[int, str]
    only: Mapping[int, tuple[Any, ...]] = {}


KEYS: dict[str, Key] = {
    "version": Key(_version, 2, {2: "`ModelParallelStrategy` and `fully_shard`", 1: "`FSDPStrategy`"}),
    "reshard_after_forward": Key(
        _resharding, True, {2: "`fully_shard(reshard_after_forward=)`", 1: "`FSDPStrategy(sharding_strategy=)`"}
    ),
    "cpu_offload": Key(
        truth, False, {2: "`fully_shard(offload_policy=CPUOffloadPolicy())`", 1: "`FSDPStrategy(cpu_offload=)`"}
    ),
    "auto_wrap_policy": Key(
        _word_of(WRAP_POLICIES),
        None,
        {2: "the modules that `fully_shard` is called for", 1: "`FSDPStrategy(auto_wrap_policy=)`"},
    ),
    "transformer_layer_cls_to_wrap": Key(
        _class_names,
        None,
        {2: "the classes of these modules; by default the model's own list", 1: "`transformer_auto_wrap_policy`"},
    ),
    "min_num_params": Key(
        _whole_number,
        0,
        {2: "how many parameters such a module has at least", 1: "`size_based_auto_wrap_policy(min_num_params=)`"},
    ),
    "state_dict_type": Key(
        _word_of(("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"), numbered_from=1),
        "FULL_STATE_DICT",
        dict.fromkeys((2, 1), "how checkpoints hold weights and optimizer: in one file, or each process its part"),
        dict.fromkeys((2, 1), STATE_DICT_TYPES),
    ),
    "activation_checkpointing": Key(
        truth,
        False,
        {
            2: "each wrapped layer runs in `torch.utils.checkpoint.checkpoint`",
            1: "`FSDPStrategy(activation_checkpointing_policy=)`",
        },
    ),
    "activation_checkpointing_offload": Key(
        truth, False, {2: "`torch.autograd.graph.save_on_cpu` around it"}, {1: (False,)}
    ),
    "cpu_ram_efficient_loading": Key(
        truth,
        False,
        dict.fromkeys(
            (2, 1), "`from_pretrained` is told that only the first process needs weights; the others get them"
        ),
    ),
    "sync_module_states": Key(
        truth,
        True,
        {
            2: "the first process's weights are sent to all before `fully_shard`",
            1: "`FSDPStrategy(sync_module_states=)`",
        },
    ),
    "forward_prefetch": Key(
        truth, False, {2: "`FSDPModule.set_modules_to_forward_prefetch`", 1: "`FSDPStrategy(forward_prefetch=)`"}
    ),
    "backward_prefetch": Key(
        _word_of(PREFETCHES, numbered_from=1),
        "NO_PREFETCH",
        {2: "nothing to set: version 2 gathers ahead by itself", 1: "`FSDPStrategy(backward_prefetch=)`"},
        {2: ("NO_PREFETCH", "BACKWARD_PRE")},
    ),
    "limit_all_gathers": Key(
        truth, True, {2: "nothing to set: version 2 always does", 1: "`FSDPStrategy(limit_all_gathers=)`"}, {2: (True,)}
    ),
    "use_orig_params": Key(
        truth, True, {2: "nothing to set: version 2 always does", 1: "`FSDPStrategy(use_orig_params=)`"}, {2: (True,)}
    ),
    "ignored_modules": Key(
        _pattern, None, {2: "`fully_shard(ignored_params=)`", 1: "`FSDPStrategy(ignored_modules=)`"}
    ),
    "mixed_precision_policy": Key(
        _precision_policy,
        None,
        {2: "`fully_shard(mp_policy=MixedPrecisionPolicy())`", 1: "`FSDPStrategy(mixed_precision=MixedPrecision())`"},
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
# Environment variable of `accelerate launch` -> key.
VARIABLES: Mapping[str, str] = {
    "FSDP_VERSION": "version",
    "FSDP_SHARDING_STRATEGY": "sharding_strategy",
    "FSDP_RESHARD_AFTER_FORWARD": "reshard_after_forward",
    "FSDP_OFFLOAD_PARAMS": "cpu_offload",
    "FSDP_AUTO_WRAP_POLICY": "auto_wrap_policy",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "transformer_layer_cls_to_wrap",
    "FSDP_MIN_NUM_PARAMS": "min_num_params",
    "FSDP_BACKWARD_PREFETCH": "backward_prefetch",
    "FSDP_FORWARD_PREFETCH": "forward_prefetch",
    "FSDP_STATE_DICT_TYPE": "state_dict_type",
    "FSDP_USE_ORIG_PARAMS": "use_orig_params",
    "FSDP_SYNC_MODULE_STATES": "sync_module_states",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "cpu_ram_efficient_loading",
    "FSDP_ACTIVATION_CHECKPOINTING": "activation_checkpointing",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "activation_checkpointing_offload",
    "FSDP_IGNORED_MODULES": "ignored_modules",
}
# Keys that its environment holds whatever was asked for, and that mean nothing to version 2.
MEANINGLESS_IN_2 = (
    "sharding_strategy",
    "use_orig_params",
    "sync_module_states",
    "forward_prefetch",
    "backward_prefetch",
)
