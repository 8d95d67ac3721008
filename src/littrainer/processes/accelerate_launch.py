"""What `accelerate launch`, and its configuration file, ask for: read from the variables that it sets.

The script's process sees nothing else of them. `littrainer run --strategy` sets the same variables.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

USE_FSDP, USE_DEEPSPEED = "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"
TRUE_WORDS = ("1", "true", "yes", "on", "y", "t")
FALSE_WORDS = ("", "0", "false", "no", "off", "n", "f", "none")
# Names that accelerate writes as their number in this list, from 1 up.
SHARDING_STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
BACKWARD_PREFETCHES = ("backward_pre", "backward_post", "no_prefetch")
STATE_DICT_TYPES = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
# DeepSpeed's values that the training arguments fill in.
AUTO = "auto"
# Bytes and numbers are FSDP's and DeepSpeed's; "none" stands for no value in the variables.
NOTHING = ("", "none")


class Setting(NamedTuple):
    """Where the value of a variable goes.

    Parameters:
        key: its name in the result; for DeepSpeed the path into the configuration, joined by dots.
        convert: makes the value of the variable's name and text.
        default: what counts where the variable is not set; None leaves the key out.
    """

    key: str
    convert: Callable[[str, str], Any]
    default: Any = None


def truth(name: str, text: str) -> bool:
    """The truth value that a variable holds.

    Raises:
        ValueError: it holds none.
    """
    word = text.strip().lower()
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    raise ValueError(f"environment variable {name}={text!r} is neither true nor false; accelerate launch sets it.")


def is_on(name: str) -> bool:
    """Whether a variable is set to a true value.

    Raises:
        ValueError: it holds no truth value.
    """
    return truth(name, os.environ.get(name, ""))


def _whole_number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"environment variable {name}={text!r} must be a whole number.") from None


def _number_or_auto(name: str, text: str) -> float | str:
    if text.lower() == AUTO:
        return AUTO
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f'environment variable {name}={text!r} must be a number or "{AUTO}".') from None
    return int(number) if number == int(number) and "." not in text else number


def _one_of(choices: tuple[str, ...]) -> Callable[[str, str], str]:
    def convert(name: str, text: str) -> str:
        if text.isdecimal() and 1 <= int(text) <= len(choices):
            return choices[int(text) - 1]
        known = {choice.lower(): choice for choice in choices}
        if text.lower() not in known:
            raise ValueError(f"environment variable {name}={text!r} is not valid; choose one of {', '.join(choices)}.")
        return known[text.lower()]

    return convert


def _class_names(name: str, text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _as_it_is(name: str, text: str) -> str:
    return text


_WRAPPING = _one_of(("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"))

# Variable -> key of `fsdp_config`, whichever version of FSDP it is.
FSDP_SETTINGS: dict[str, Setting] = {
    "FSDP_VERSION": Setting("version", _whole_number, 1),
    "FSDP_OFFLOAD_PARAMS": Setting("cpu_offload", truth, False),
    "FSDP_AUTO_WRAP_POLICY": Setting("auto_wrap_policy", _WRAPPING, "NO_WRAP"),
    "FSDP_TRANSFORMER_CLS_TO_WRAP": Setting("transformer_layer_cls_to_wrap", _class_names),
    "FSDP_MIN_NUM_PARAMS": Setting("min_num_params", _whole_number, 0),
    "FSDP_STATE_DICT_TYPE": Setting("state_dict_type", _one_of(STATE_DICT_TYPES)),
    "FSDP_CPU_RAM_EFFICIENT_LOADING": Setting("cpu_ram_efficient_loading", truth, False),
    "FSDP_ACTIVATION_CHECKPOINTING": Setting("activation_checkpointing", truth, False),
}
# Those that one version alone has, and what the other reads in their place. `accelerate launch` sets all of them.
FSDP_SETTINGS_OF_VERSION: dict[int, dict[str, Setting]] = {
    1: {
        "FSDP_SHARDING_STRATEGY": Setting("reshard_after_forward", _one_of(SHARDING_STRATEGIES), "full_shard"),
        "FSDP_BACKWARD_PREFETCH": Setting("backward_prefetch", _one_of(BACKWARD_PREFETCHES), "no_prefetch"),
        "FSDP_FORWARD_PREFETCH": Setting("forward_prefetch", truth, False),
        "FSDP_USE_ORIG_PARAMS": Setting("use_orig_params", truth, False),
        "FSDP_SYNC_MODULE_STATES": Setting("sync_module_states", truth, False),
    },
    2: {"FSDP_RESHARD_AFTER_FORWARD": Setting("reshard_after_forward", truth, True)},
}
DEFAULT_STATE_DICT_TYPES = {1: "FULL_STATE_DICT", 2: "SHARDED_STATE_DICT"}

# Variable -> place in DeepSpeed's configuration, where no file of one is named.
DEEPSPEED_SETTINGS: dict[str, Setting] = {
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": Setting("zero_optimization.stage", _whole_number, 2),
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": Setting("zero_optimization.offload_optimizer.device", _as_it_is),
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH": Setting(
        "zero_optimization.offload_optimizer.nvme_path", _as_it_is
    ),
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": Setting("zero_optimization.offload_param.device", _as_it_is),
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": Setting("zero_optimization.offload_param.nvme_path", _as_it_is),
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": Setting(
        "zero_optimization.stage3_gather_16bit_weights_on_model_save", truth, False
    ),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": Setting("gradient_accumulation_steps", _number_or_auto, AUTO),
    "ACCELERATE_GRADIENT_CLIPPING": Setting("gradient_clipping", _number_or_auto, AUTO),
}
DEEPSPEED_FILE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
ZERO3_INIT = "ACCELERATE_DEEPSPEED_ZERO3_INIT"
# In each configuration that the variables make; they follow from the training arguments.
DEEPSPEED_FROM_ARGUMENTS: dict[str, Any] = {
    "train_batch_size": AUTO,
    "train_micro_batch_size_per_gpu": AUTO,
    "bf16": {"enabled": AUTO},
    "fp16": {"enabled": AUTO},
}

# Variables that ask for what nobody here carries out, with the values that ask for nothing.
REFUSED_VARIABLES: dict[str, tuple[str, ...]] = {
    "ACCELERATE_USE_MEGATRON_LM": FALSE_WORDS,
    "ACCELERATE_USE_SAGEMAKER": FALSE_WORDS,
    "ACCELERATE_CPU_AFFINITY": FALSE_WORDS,
    "ACCELERATE_DYNAMO_BACKEND": ("", "no"),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": FALSE_WORDS,
    "FSDP_IGNORED_MODULES": NOTHING,
}
# Of them, those that count only where their switch is on.
ONLY_WITH_SWITCH = {"FSDP_": USE_FSDP, "ACCELERATE_DEEPSPEED_": USE_DEEPSPEED}


def launcher_settings() -> dict[str, Any]:
    """What the launcher asks for, in the words of training arguments; an argument that the script sets goes before it.

    Returns:
        a dict with the keys that the launcher asks for, empty where it asks for none. `fsdp`: a dict as `fsdp_config`
        has it (beside `fsdp=True`), with its `version`. `deepspeed`: a configuration or the path of one, as the
        argument has it, its open values "auto". `zero3_init`: whether `from_pretrained` is to shard under ZeRO 3,
        where that was said.

    Raises:
        ValueError: a variable holds a value that cannot be; the message names it.
    """
    settings: dict[str, Any] = {}
    if is_on(USE_FSDP):
        settings["fsdp"] = _fsdp_settings()
    if is_on(USE_DEEPSPEED):
        file = os.environ.get(DEEPSPEED_FILE, "")
        settings["deepspeed"] = _deepspeed_settings() if file.lower() in NOTHING else file
        if os.environ.get(ZERO3_INIT, ""):
            settings["zero3_init"] = is_on(ZERO3_INIT)
    return settings


def refused_variables() -> dict[str, str]:
    """Variables, with their values, that ask for what is not carried out."""
    refused = {}
    for name, harmless in REFUSED_VARIABLES.items():
        switch = next((switch for prefix, switch in ONLY_WITH_SWITCH.items() if name.startswith(prefix)), None)
        value = os.environ.get(name, "")
        if value.strip().lower() not in harmless and (switch is None or is_on(switch)):
            refused[name] = value
    return refused


def _fsdp_settings() -> dict[str, Any]:
    settings = _read(FSDP_SETTINGS)
    version = settings["version"]
    if version not in FSDP_SETTINGS_OF_VERSION:
        raise ValueError(f"environment variable FSDP_VERSION={version} is no version of FSDP; choose 1 or 2.")
    settings.setdefault("state_dict_type", DEFAULT_STATE_DICT_TYPES[version])
    return {**settings, **_read(FSDP_SETTINGS_OF_VERSION[version])}


def _deepspeed_settings() -> dict[str, Any]:
    config: dict[str, Any] = {
        name: dict(value) if isinstance(value, dict) else value for name, value in DEEPSPEED_FROM_ARGUMENTS.items()
    }
    for path, value in _read(DEEPSPEED_SETTINGS).items():
        *sections, key = path.split(".")
        place = config
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    return config


def _read(table: dict[str, Setting]) -> dict[str, Any]:
    values = {}
    for name, setting in table.items():
        text = os.environ.get(name, "").strip()
        value = setting.default if text.lower() in NOTHING else setting.convert(name, text)
        if value is not None:
            values[setting.key] = value
    return values
