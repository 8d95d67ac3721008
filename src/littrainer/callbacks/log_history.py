"""Curves of a `log_history` by metric and source, and throughput."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from littrainer.runtime.notes import listed

TRAINING = "training"
EVALUATION = "evaluation"
# Marks the last entry, about the whole training.
END_OF_TRAINING_METRIC = "train_samples_per_second"
RUNTIME_ENDING = "_runtime"
# Totals, not metrics; counting input tokens adds some to each entry.
NO_METRICS = frozenset({"total_flos", "num_input_tokens_seen", "train_runtime"})
THROUGHPUT = "samples_per_second"
COSTS = frozenset({"runtime", THROUGHPUT, "steps_per_second", "model_preparation_time", "jit_compilation_time"})
MEMORY_PARTS = ("_mem_cpu_", "_mem_gpu_", "mem_cpu_", "mem_gpu_")
# Time and memory, which differ in each run.
NOT_REPEATED = re.compile(
    r"^speed/|_(runtime|per_second|model_preparation_time|jit_compilation_time)$|(^|_)mem_[cg]pu(_|$)"
)
MAX_LISTED = 5


class Point(NamedTuple):
    """Logged number.

    Parameters:
        step: optimizer step.
        epoch: epochs done, None if not logged.
        is_after_training: whether the training had ended, as for an evaluation of the best model.
    """

    step: int
    value: float
    epoch: float | None
    is_after_training: bool = False


@dataclass
class History:
    """Logged numbers of a training.

    Parameters:
        curves: (metric, source) -> points in the order of their steps; the source is `TRAINING`, `EVALUATION` or the
            name of an evaluation set.
        summary: metrics of the whole training.
        notes: sentences about non-finite values.
    """

    curves: dict[tuple[str, str], list[Point]] = field(default_factory=dict)
    summary: dict[str, float] = field(default_factory=dict)
    last_epoch: float | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def throughput(self) -> dict[str, float]:
        """Logs of `log_speed` for the whole training; before its end, sums of seconds and the last rates."""
        final = {name: value for name, value in self.summary.items() if name.startswith(SPEED_PREFIX)}
        curves = {name: [point.value for point in points] for (name, _), points in self.curves.items()}
        return final or {
            name: sum(values) if name.endswith("_seconds") else values[-1]
            for name, values in curves.items()
            if name.startswith(SPEED_PREFIX)
        }


def parse_log_history(entries: list[Any], training_entries: int | None = None) -> History:
    """Sort the numbers of a `log_history` into curves, with notes about those that are not finite.

    Parameters:
        training_entries: number of entries before those logged after training; None to find the entry that ends it.
    """
    entries = _select_entries_with_step(entries)
    history, sources = History(), find_evaluation_sources(entries)
    curves: dict[tuple[str, str], list[Point]] = {}
    has_ended = False
    for number, entry in enumerate(entries):
        epoch = entry["epoch"] if _is_number(entry.get("epoch")) and math.isfinite(entry["epoch"]) else None
        history.last_epoch = history.last_epoch if epoch is None else epoch
        ends_training = END_OF_TRAINING_METRIC in entry
        if training_entries is None:
            has_ended = ends_training or (has_ended and "loss" not in entry)
        else:
            has_ended = number >= training_entries
        for name, value in entry.items():
            is_total = name in NO_METRICS and not ends_training
            if name in ("step", "epoch") or is_total or not _is_number(value):
                continue
            if ends_training:
                history.summary[name] = value
            elif not any(part in name for part in MEMORY_PARTS):
                point = Point(entry["step"], value, epoch, has_ended)
                curves.setdefault(_split_metric(name, sources), []).append(point)
    history.curves = {key: sorted(points, key=lambda point: point.step) for key, points in curves.items()}
    for (metric, source), points in history.curves.items():
        steps = [point.step for point in points if not math.isfinite(point.value)]
        if steps:
            count = f"{len(steps)} of {len(points)} values are nan or infinite"
            history.notes.append(f"{metric} ({source}): {count}, at step {listed(steps, MAX_LISTED)}.")
    return history


def _select_entries_with_step(entries: Iterable[Any]) -> list[dict[str, Any]]:
    # A callback may add entries without a step.
    return [entry for entry in entries if isinstance(entry, dict) and type(entry.get("step")) is int]


def find_evaluation_sources(entries: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Return the evaluation sets by the prefixes of their metrics, from logged durations (`eval_NAME_runtime`)."""
    sources = {"eval": EVALUATION}
    for entry in entries:
        for name in entry:
            if name.endswith(RUNTIME_ENDING) and name not in NO_METRICS:
                prefix = name.removesuffix(RUNTIME_ENDING)
                sources.setdefault(prefix, prefix.removeprefix("eval_"))
    return sources


def collect_logged_values(entries: Iterable[Any]) -> dict[tuple[int, str], Any]:
    """Return the logged values, by step and name, except time and memory."""
    values: dict[tuple[int, str], Any] = {}
    for entry in _select_entries_with_step(entries):
        names = [name for name in entry if name != "step" and not NOT_REPEATED.search(name)]
        values |= {(entry["step"], name): entry[name] for name in names}
    return values


def _split_metric(name: str, sources: dict[str, str]) -> tuple[str, str]:
    # Longest prefix first: a name may begin with another name.
    prefix = name
    while "_" in prefix:
        prefix = prefix.rpartition("_")[0]
        if prefix in sources:
            return name[len(prefix) + 1 :], sources[prefix]
    return name, TRAINING


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# ---- Throughput ------------------------------------------------------------------------------------------------------

SPEED_PREFIX = "speed/"
TIME_PARTS = ("data", "to_device", "forward", "backward", "step", "evaluation", "save", "other")
# Part -> minimum share for advice, and the sentence after the share.
ADVICE = {
    "data": (
        0.15,
        "the time is spent waiting for data: a larger dataloader_num_workers, or prepared data",
    ),
    "to_device": (
        0.15,
        "the time is spent copying batches to the device: dataloader_pin_memory=True, or fewer bytes",
    ),
    "evaluation": (0.3, "the time is spent in evaluations: a larger eval_steps, with eval_strategy='steps'"),
    "save": (0.15, "the time is spent saving checkpoints: async_save=True, or a larger save_steps"),
    "other": (0.4, "the time is spent in callbacks, logs and trackers: a larger logging_steps"),
    "padding": (0.25, "the tokens are padding: max_tokens_per_batch=N"),
}


def compute_time_shares(logs: Mapping[str, float]) -> dict[str, float]:
    """Return each part's share of the time in the logs of `log_speed`."""
    seconds = {part: logs.get(f"{SPEED_PREFIX}{part}_seconds", 0.0) for part in TIME_PARTS}
    total = sum(seconds.values())
    return {part: value / total for part, value in seconds.items()} if total > 0 else {}


def suggest_speedup(logs: Mapping[str, float]) -> str | None:
    """Return a line of advice from the logs of `log_speed`; None if no part is large."""
    shares = compute_time_shares(logs) | {"padding": logs.get(f"{SPEED_PREFIX}padding_share", 0.0)}
    large = [(shares[part], text) for part, (minimum, text) in ADVICE.items() if shares.get(part, 0.0) >= minimum]
    share, text = max(large, default=(0.0, ""))
    return f"{100 * share:.0f} % of {text}" if text else None
