"""Which part of the time of a training is worth a change, and which one (`log_speed`)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from littrainer.callbacks.log_history import SPEED_PREFIX

TIME_PARTS = ("data", "to_device", "forward", "backward", "step", "evaluation", "save", "other")


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
    shares, texts = shares_of_time(logs), {name: str(value) for name, value in args.items()}
    if {texts.get(name, "None") for name in ("max_tokens_per_batch", "pack_to_length")} == {"None"}:
        shares["padding"] = logs.get(f"{SPEED_PREFIX}padding_share", 0.0)
    workers = int(args.get("dataloader_num_workers") or 0)
    wanted = min(max(2 * workers, 4), max((os.cpu_count() or 1) - 1, 1))
    load = f"dataloader_num_workers={wanted}" if wanted > workers else "prepare the data once, before training"
    copy = "smaller types of inputs, and less work in _prepare_inputs"
    if texts.get("dataloader_pin_memory") == "False":
        copy = "dataloader_pin_memory=True"
    evaluate, save, log = (
        f"{name}_strategy='steps' and a larger {name}_steps"
        if texts.get(f"{name}_strategy", "").lower().endswith("epoch")
        else f"a larger {name}_steps"
        for name in ("eval", "save", "logging")
    )
    if texts.get("async_save") != "True":
        save = "async_save=True"
    # Part -> the share from which on it is worth a sentence, what it is a share of, and what to set instead.
    remedies = {
        "data": (0.15, "the time is spent waiting for data", load),
        "to_device": (0.15, "the time is spent copying batches to the device", copy),
        "evaluation": (0.3, "the time is spent in evaluations", evaluate),
        "save": (0.15, "the time is spent saving checkpoints", save),
        "other": (0.4, "the time is spent in callbacks, logs and trackers", log),
        "padding": (0.25, "the tokens are padding", "max_tokens_per_batch=N"),
    }
    found = [(share, *remedies[part]) for part, share in shares.items() if part in remedies]
    share, _, of_what, instead = max((one for one in found if one[0] >= one[1]), default=(None,) * 4)
    return None if share is None else f"{100 * share:.0f} % of {of_what}: {instead}"
