"""The one resolved plan for sharded training, from `fsdp` and `fsdp_config` or from the environment of accelerate."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from littrainer.arguments.nearest import suggestion
from littrainer.arguments.sharding_keys import (
    FALSE_WORDS,
    KEYS,
    MEANINGLESS_IN_2,
    OTHER_NAMES,
    POLICY_ENTRIES,
    RESHARDING,
    SHARDING_STRATEGIES,
    TPU_KEYS,
    TRUE_WORDS,
    VARIABLES,
    WRAP_POLICIES,
    BadKey,
)

if TYPE_CHECKING:
    from littrainer.arguments.fields import ArgumentFields

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
        OSError: the file that `fsdp_config` names cannot be read.
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
        ValueError, NotImplementedError, OSError: as `sharding_plan`; or `fsdp` together with `deepspeed` or the model's
            own activation checkpointing.
    """
    attributes: Any = args
    words = _words(args.fsdp)
    if words is None:
        if args.fsdp_config and not _asks_for_nothing(args.fsdp_config):
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
    """A config without the prefix that its keys may have, from a dict or the path of a JSON file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds no JSON object.
    """
    if given is None:
        return {}
    if isinstance(given, (str, os.PathLike)):
        path = Path(given)
        try:
            content = json.loads(path.read_text("utf-8"))
        except OSError as error:
            raise type(error)(
                f"fsdp_config={str(path)!r} cannot be read ({error}); give a JSON file or a dict."
            ) from error
        except ValueError as error:
            raise ValueError(f"fsdp_config={str(path)!r} is not readable as JSON ({error}).") from error
        if not isinstance(content, dict):
            raise ValueError(
                f"fsdp_config={str(path)!r} holds no JSON object with keys and values; correct it, or give a dict."
            )
        given = content
    if not isinstance(given, Mapping):
        raise ValueError(f"fsdp_config={given!r} is not usable; give a dict, or the path of a JSON file.")
    return {str(name).removeprefix(PREFIX): value for name, value in given.items()}


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


def _asks_for_nothing(config: Any) -> bool:
    return isinstance(config, Mapping) and not any(
        value for name, value in config.items() if str(name).removeprefix(PREFIX) not in ("version",)
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
