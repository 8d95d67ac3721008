"""What `log_speed` names the parts of a training's time, and what to change if one of them takes too much of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from littrainer.callbacks.log_history import SPEED_PREFIX

TIME_PARTS = ("data", "to_device", "forward", "backward", "step", "evaluation", "save", "other")


def _more_workers(args: Mapping[str, Any]) -> str:
    workers = int(args.get("dataloader_num_workers") or 0)
    wanted = min(max(2 * workers, 4), max((os.cpu_count() or 1) - 1, 1))
    return f"dataloader_num_workers={wanted}" if wanted > workers else "prepare the data once, before training"


# Part -> the share from which on it is worth a sentence, what it is a share of, and what to set instead.
REMEDIES: dict[str, tuple[float, str, Callable[[Mapping[str, Any]], str]]] = {
    "data": (0.15, "the time is spent waiting for data", _more_workers),
    "to_device": (0.15, "the time is spent copying batches to the device", lambda _: "dataloader_pin_memory=True"),
    "evaluation": (0.3, "the time is spent in evaluations", lambda _: "a larger eval_steps"),
    "save": (
        0.15,
        "the time is spent saving checkpoints",
        lambda args: "a larger save_steps" if str(args.get("async_save")) == "True" else "async_save=True",
    ),
    "other": (0.4, "the time is spent in callbacks, logs and trackers", lambda _: "a larger logging_steps"),
    "padding": (0.25, "the tokens are padding", lambda _: 'train_sampling_strategy="group_by_length"'),
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
    shares = {**shares_of_time(logs), "padding": logs.get(f"{SPEED_PREFIX}padding_share", 0.0)}
    found = {name: share for name, share in shares.items() if name in REMEDIES and share >= REMEDIES[name][0]}
    if not found:
        return None
    worst = max(found, key=lambda name: found[name])
    _, of_what, instead = REMEDIES[worst]
    return f"{100 * found[worst]:.0f} % of {of_what}: {instead(args)}"
