"""A `log_history` sorted into curves, one for each metric and each place that it comes from; where the time went."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from littrainer.errors.notes import listed

TRAINING = "training"
EVALUATION = "evaluation"
# The entry at the end of a training has this metric and describes the whole training.
OF_THE_WHOLE_TRAINING = "train_runtime"
RUNTIME_ENDING = "_runtime"
NO_METRICS = frozenset({"total_flos", "num_input_tokens_seen"})
# What an evaluation logs about its cost, without its prefix.
SPEED = "samples_per_second"
COSTS = frozenset({"runtime", SPEED, "steps_per_second", "model_preparation_time", "jit_compilation_time"})
MEMORY_PARTS = ("_mem_cpu_", "_mem_gpu_", "mem_cpu_", "mem_gpu_")
# Names of what is measured, which is another number in each run.
NOT_REPEATED = re.compile(
    r"^speed/|_(runtime|per_second|model_preparation_time|jit_compilation_time)$|(^|_)mem_[cg]pu(_|$)"
)
MOST_NAMED = 5


class Point(NamedTuple):
    """One logged number.

    Parameters:
        step: the optimizer step at which it was logged.
        value: the number; it may be nan or infinite.
        epoch: epochs done by then, None if that was not logged.
        is_after_training: whether the training had ended, as with the evaluation of the best model.
    """

    step: int
    value: float
    epoch: float | None
    is_after_training: bool = False


@dataclass
class History:
    """The logged numbers of one training.

    Parameters:
        curves: (metric, source) -> points in the order of their steps; the source is `TRAINING`, `EVALUATION` or the
            name of an evaluation set.
        summary: what was logged about the whole training when it ended.
        last_epoch: epochs done when something was logged last.
        notes: sentences about what is not in the curves, or cannot be drawn.
    """

    curves: dict[tuple[str, str], list[Point]] = field(default_factory=dict)
    summary: dict[str, float] = field(default_factory=dict)
    last_epoch: float | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def speed(self) -> dict[str, float]:
        """What `log_speed` has logged of the whole training; of one that has not ended, sums of seconds, last rates."""
        found = {name: [value] for name, value in self.summary.items() if name.startswith(SPEED_PREFIX)} or {
            name: [one.value for one in points] for (name, _), points in self.curves.items() if SPEED_PREFIX in name
        }
        return {name: sum(values) if name.endswith("_seconds") else values[-1] for name, values in found.items()}


def read_history(entries: list[Any]) -> History:
    """Sort the entries of a `log_history` into curves; notes name what has no step or is no number."""
    history = History()
    sound = [entry for entry in entries if isinstance(entry, dict) and type(entry.get("step")) is int]
    if len(sound) < len(entries):
        history.notes.append(
            f"{len(entries) - len(sound)} of {len(entries)} entries of log_history are left out: they have no step."
        )
    sources = evaluation_sources(sound)
    found: dict[tuple[str, str], list[Point]] = {}
    has_ended = False
    no_numbers: dict[str, None] = {}
    for entry in sound:
        epoch = entry["epoch"] if _is_number(entry.get("epoch")) else None
        history.last_epoch = history.last_epoch if epoch is None else epoch
        ends_training = OF_THE_WHOLE_TRAINING in entry
        has_ended = ends_training or (has_ended and "loss" not in entry)
        for name, value in entry.items():
            if name in ("step", "epoch") or (name in NO_METRICS and not ends_training):
                continue
            if not _is_number(value):
                no_numbers[name] = None
            elif ends_training:
                history.summary[name] = value
            elif not any(part in name for part in MEMORY_PARTS):
                point = Point(entry["step"], value, epoch, has_ended)
                found.setdefault(_key_of(name, sources), []).append(point)
    # Several of one step stay in the order in which they were logged.
    history.curves = {key: sorted(points, key=lambda point: point.step) for key, points in found.items()}
    if no_numbers:
        history.notes.append(f"Not drawn, since they hold no number: {listed(no_numbers, MOST_NAMED)}.")
    for (metric, source), points in history.curves.items():
        steps = [point.step for point in points if not math.isfinite(point.value)]
        if steps:
            times = f"{len(steps)} of {len(points)} values"
            history.notes.append(
                f"{metric} ({source}): {times} are nan or infinite, at step {listed(steps, MOST_NAMED)}."
            )
    return history


def evaluation_sources(entries: Iterable[dict[str, Any]]) -> dict[str, str]:
    """What the names of evaluation metrics begin with -> the name of the evaluation set.

    Each evaluation logs its duration, `eval_runtime` or, for a dataset of a dict, `eval_NAME_runtime`.
    """
    sources = {"eval": EVALUATION}
    for entry in entries:
        for name in entry:
            if name.endswith(RUNTIME_ENDING) and name != OF_THE_WHOLE_TRAINING:
                prefix = name.removesuffix(RUNTIME_ENDING)
                sources.setdefault(prefix, prefix.removeprefix("eval_"))
    return sources


def logged_values(entries: Iterable[Any]) -> dict[tuple[int, str], Any]:
    """Return what was logged, by step and name, but for times and memory, which are others in each run."""
    found: dict[tuple[int, str], Any] = {}
    for entry in entries:
        if isinstance(entry, dict) and type(entry.get("step")) is int:
            names = [name for name in entry if name != "step" and not NOT_REPEATED.search(name)]
            found |= {(entry["step"], name): entry[name] for name in names}
    return found


def _key_of(name: str, sources: dict[str, str]) -> tuple[str, str]:
    # The longest prefix counts: one evaluation set may be called as the beginning of another one.
    prefix = name
    while "_" in prefix:
        prefix = prefix.rpartition("_")[0]
        if prefix in sources:
            return name[len(prefix) + 1 :], sources[prefix]
    return name, TRAINING


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# ---- Where the time goes ---------------------------------------------------------------------------------------------

# What `log_speed` logs begins with this; the parts of the time, each with its seconds.
SPEED_PREFIX = "speed/"
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
