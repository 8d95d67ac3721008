"""What `log_speed` names the parts of a training's time, and what to change if one of them takes too much of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from littrainer.callbacks.log_history import SPEED_PREFIX

TIME_PARTS = ("data", "to_device", "forward", "backward", "step", "evaluation", "save", "other")
PADDING_SHARE = f"{SPEED_PREFIX}padding_share"


class Remedy(NamedTuple):
    """What to do if a part takes more than a share of the time.

    Parameters:
        share: from which on it is worth a sentence.
        of_what: what the share is a share of, and where it goes.
        instead: takes the arguments by name, returns what to set.
    """

    share: float
    of_what: str
    instead: Callable[[Mapping[str, Any]], str]


def _more_workers(args: Mapping[str, Any]) -> str:
    workers, cores = int(args.get("dataloader_num_workers") or 0), os.cpu_count() or 1
    if not workers:
        return f"dataloader_num_workers={min(4, max(cores - 1, 1))}"
    if 2 * workers < cores:
        return f"dataloader_num_workers={2 * workers}"
    return "prepare the data once, before training, instead of in each epoch"


REMEDIES: dict[str, Remedy] = {
    "data": Remedy(0.15, "the time is spent waiting for data", _more_workers),
    "to_device": Remedy(
        0.15, "the time is spent copying batches to the device", lambda args: "dataloader_pin_memory=True"
    ),
    "evaluation": Remedy(
        0.3, "the time is spent in evaluations", lambda args: "a larger eval_steps or per_device_eval_batch_size"
    ),
    "save": Remedy(
        0.15,
        "the time is spent saving checkpoints",
        lambda args: "a larger save_steps" if str(args.get("async_save")) == "True" else "async_save=True",
    ),
    "other": Remedy(
        0.4, "the time is spent in callbacks, logs and trackers", lambda args: "a larger logging_steps, fewer callbacks"
    ),
    "padding": Remedy(0.25, "the tokens are padding", lambda args: 'train_sampling_strategy="group_by_length"'),
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
    shares = {**shares_of_time(logs), "padding": logs.get(PADDING_SHARE, 0.0)}
    found = {name: share for name, share in shares.items() if name in REMEDIES and share >= REMEDIES[name].share}
    if not found:
        return None
    worst = max(found, key=lambda name: found[name])
    return f"{100 * found[worst]:.0f} % of {REMEDIES[worst].of_what}: {REMEDIES[worst].instead(args)}"
