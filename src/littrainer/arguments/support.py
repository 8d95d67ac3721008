"""Which values of arguments, and which wishes of the environment, are not carried out, and the refusal of them."""

from __future__ import annotations

import os
from typing import Any

from littrainer.distributed.environment import refused_variables

# Field -> its values that are carried out; every other value is refused.
HONOURED_VALUES: dict[str, tuple[str, ...]] = {
    "debug": ("underflow_overflow",),
}

# Environment variable -> values that ask for nothing. Launchers set these, and a run under transformers obeys them.
HONOURED_ENVIRONMENT: dict[str, tuple[str, ...]] = {
    "ACCELERATE_MIXED_PRECISION": ("", "no", "bf16", "fp16"),
}


def refuse_unsupported(args: Any) -> None:
    """Refuse every wish in `args` that would not be carried out, all of them in one message.

    Scripts set fields after construction too, so this is called again when training starts.

    Parameters:
        args: a TrainingArguments instance.

    Raises:
        NotImplementedError: names each field with its value, and the value to leave it at.
    """
    refused = [*_refused_fields(args), *_refused_environment()]
    if refused:
        raise NotImplementedError(
            f"littrainer does not carry out {'; '.join(refused)}. "
            "Change that, or run the script with plain `python` to train with transformers."
        )


def _refused_fields(args: Any) -> list[str]:
    refused = []
    for name, honoured in HONOURED_VALUES.items():
        value = getattr(args, name)
        if any(single not in honoured for single in (value if isinstance(value, list) else [value])):
            refused.append(f"{name}={_shown(value)} (choose from {', '.join(honoured)})")
    return refused


def _refused_environment() -> list[str]:
    refused = []
    for name, honoured in HONOURED_ENVIRONMENT.items():
        value = os.environ.get(name, "")
        if value.lower() not in honoured:
            refused.append(f"environment variable {name}={value} (unset it)")
    refused += [f"environment variable {name}={value} (unset it)" for name, value in refused_variables().items()]
    return refused


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return repr([getattr(item, "value", item) for item in value])
    return repr(getattr(value, "value", value))
