"""What `accelerate launch`, and its configuration file, ask for: read from the variables that it sets.

The script's process sees nothing else of them. `littrainer run --strategy` sets the same variables. Those about FSDP
are read with `fsdp_config`, those about the layout of the processes with `parallelism_config`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

USE_FSDP, USE_DEEPSPEED = "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"
TRUE_WORDS = ("1", "true", "yes", "on", "y", "t")
FALSE_WORDS = ("", "0", "false", "no", "off", "n", "f", "none")
# DeepSpeed's values that the training arguments fill in.
AUTO = "auto"
# What stands for no value in the variables.
NOTHING = ("", "none")


class Setting(NamedTuple):
    """Where the value of a variable goes.

    Parameters:
        key: the path into DeepSpeed's configuration, joined by dots.
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


def _as_it_is(name: str, text: str) -> str:
    return text


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
}


def launcher_settings() -> dict[str, Any]:
    """What the launcher asks of DeepSpeed; a `deepspeed` argument goes before it.

    Returns:
        a dict, empty where it asks for nothing. `deepspeed`: a configuration or the path of one, as the argument has
        it, its open values "auto". `zero3_init`: whether `from_pretrained` is to shard under ZeRO 3, where that was
        said.

    Raises:
        ValueError: a variable holds a value that cannot be; the message names it.
    """
    if not is_on(USE_DEEPSPEED):
        return {}
    file = os.environ.get(DEEPSPEED_FILE, "")
    settings: dict[str, Any] = {"deepspeed": _deepspeed_settings() if file.lower() in NOTHING else file}
    if os.environ.get(ZERO3_INIT, ""):
        settings["zero3_init"] = is_on(ZERO3_INIT)
    return settings


def refused_variables() -> dict[str, str]:
    """Variables, with their values, that ask for what is not carried out."""
    values = {name: os.environ.get(name, "") for name in REFUSED_VARIABLES}
    return {name: value for name, value in values.items() if value.strip().lower() not in REFUSED_VARIABLES[name]}


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
