"""Which part of the time of a training is worth a change, and which one (`log_speed`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from littrainer.callbacks.log_history import SPEED_PREFIX

# Each has its seconds.
TIME_PARTS = ("data", "to_device", "forward", "backward", "step", "evaluation", "save", "other")


def _more_workers(args: Mapping[str, Any]) -> str:
    workers = int(args.get("dataloader_num_workers") or 0)
    wanted = min(max(2 * workers, 4), max((os.cpu_count() or 1) - 1, 1))
    return f"dataloader_num_workers={wanted}" if wanted > workers else "prepare the data once, before training"


def _more_seldom(what: str, args: Mapping[str, Any]) -> str:
    by_steps = f"{what}_strategy='steps' and " if str(args.get(f"{what}_strategy")).lower().endswith("epoch") else ""
    return f"{by_steps}a larger {what}_steps"


# Part -> the share from which on it is worth a sentence, what it is a share of, and what to set instead.
REMEDIES: dict[str, tuple[float, str, Callable[[Mapping[str, Any]], str]]] = {
    "data": (0.15, "the time is spent waiting for data", _more_workers),
    "to_device": (
        0.15,
        "the time is spent copying batches to the device",
        lambda args: (
            "dataloader_pin_memory=True"
            if str(args.get("dataloader_pin_memory")) == "False"
            else "smaller types of inputs, and less work in _prepare_inputs"
        ),
    ),
    "evaluation": (0.3, "the time is spent in evaluations", partial(_more_seldom, "eval")),
    "save": (
        0.15,
        "the time is spent saving checkpoints",
        lambda args: _more_seldom("save", args) if str(args.get("async_save")) == "True" else "async_save=True",
    ),
    "other": (0.4, "the time is spent in callbacks, logs and trackers", partial(_more_seldom, "logging")),
    "padding": (0.25, "the tokens are padding", lambda _: "max_tokens_per_batch=N"),
}


def shares_of_time(logs: Mapping[str, float]) -> dict[str, float]:
    """Return the share of each part in what `log_speed` has logged; nothing if no time was logged."""
    seconds = {part: logs.get(f"{SPEED_PREFIX}{part}_seconds", 0.0) for part in TIME_PARTS}
    total = sum(seconds.values())
    return {part: one / total for part, one in seconds.items()} if total > 0 else {}


def advice_on(logs: Mapping[str, float], args: Mapping[str, Any]) -> str | None:
    """Return one line on what to change first; None if there is nothing worth it.

    Parameters:
        logs: what `log_speed` has logged.
        args: arguments by name, as values or as texts.
    """
    shares = shares_of_time(logs)
    if {str(args.get(name)) for name in ("max_tokens_per_batch", "pack_to_length")} == {"None"}:
        shares["padding"] = logs.get(f"{SPEED_PREFIX}padding_share", 0.0)
    found = {name: share for name, share in shares.items() if name in REMEDIES and share >= REMEDIES[name][0]}
    if not found:
        return None
    worst = max(found, key=lambda name: found[name])
    _, of_what, instead = REMEDIES[worst]
    return f"{100 * found[worst]:.0f} % of {of_what}: {instead(args)}"
