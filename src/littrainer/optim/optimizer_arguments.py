"""`optim_args`: further settings of an optimizer, written as `key=value,key=value`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from littrainer.arguments.did_you_mean import suggestion

Convert = Callable[[str], Any]

YES = ("true", "1", "yes", "y", "on", "t")
NO = ("false", "0", "no", "n", "off", "f")


def truth(text: str) -> bool:
    """The truth value that a text names.

    Raises:
        ValueError: it names none.
    """
    if text.lower() not in (*YES, *NO):
        raise ValueError(f"expected true or false, got {text!r}")
    return text.lower() in YES


def torch_dtype(text: str) -> Any:
    """The dtype of torch that a text such as `bfloat16` names.

    Raises:
        ValueError: it names none.
    """
    import torch

    dtype = getattr(torch, text, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"expected a dtype of torch such as float32 or bfloat16, got {text!r}")
    return dtype


def parse_optim_args(text: str | None) -> dict[str, str]:
    """The keys and values of `optim_args`, still as text.

    Parameters:
        text: `key=value` pairs with commas between them; blanks do not count.

    Raises:
        ValueError: it is not written like that.
        TypeError: it is no text.
    """
    if not text:
        return {}
    if not isinstance(text, str):
        raise TypeError(f"optim_args={text!r} has to be text such as 'key=value,key=value', not {type(text).__name__}.")
    settings = {}
    for pair in text.replace(" ", "").split(","):
        parts = pair.split("=")
        if len(parts) != 2 or not all(parts):
            raise ValueError(
                f"optim_args={text!r} has {pair!r} where key=value is expected; write it as key=value,key=value."
            )
        settings[parts[0]] = parts[1]
    return settings


def read_optim_args(optim: str, text: str | None, accepted: Mapping[str, Convert]) -> dict[str, Any]:
    """The settings in `optim_args`, each in the type that the optimizer takes.

    Parameters:
        optim: the optimizer's name, for messages.
        text: `optim_args` as the user wrote it.
        accepted: key -> what makes a value out of its text.

    Raises:
        ValueError: a key that this optimizer does not take, or a value that cannot be.
    """
    settings = {}
    for key, value in parse_optim_args(text).items():
        if value.strip().lower() == ALWAYS_SO.get(optim, {}).get(key):
            continue
        if key not in accepted:
            raise ValueError(
                f"optim_args has {key!r}, which optim={optim!r} does not take{_what_it_takes(key, accepted)}."
            )
        try:
            settings[key] = accepted[key](value)
        except ValueError as error:
            raise ValueError(f"optim_args has {key}={value}, which optim={optim!r} cannot read: {error}.") from None
    return settings


# Optimizer -> settings that a Trainer always gives it; scripts ask for them all the same.
ALWAYS_SO: dict[str, dict[str, str]] = {"adafactor": {"scale_parameter": "false", "relative_step": "false"}}


def _what_it_takes(key: str, accepted: Mapping[str, Convert]) -> str:
    if not accepted:
        return "; it takes none, so leave optim_args unset"
    return f" ({suggestion(key, accepted)}); it takes {', '.join(accepted)}"
