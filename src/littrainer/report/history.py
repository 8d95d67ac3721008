"""What was logged, told apart: by metric, and by whether it comes from training or from which evaluation set."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from littrainer.report.labels import shortened

TRAINING = "training"
EVALUATION = "evaluation"
# The entry at the end of a training has this one, and means the whole of it.
OF_THE_WHOLE_TRAINING = "train_runtime"
RUNTIME_ENDING = "_runtime"
NO_METRICS = frozenset({"step", "epoch", "total_flos", "num_input_tokens_seen"})
# What an evaluation says about its own cost, without its prefix.
COSTS = frozenset(
    {"runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "jit_compilation_time"}
)
SPEED = "samples_per_second"
MEMORY_PARTS = ("_mem_cpu_", "_mem_gpu_", "mem_cpu_", "mem_gpu_")
MOST_NAMED = 5


class Point(NamedTuple):
    """One logged number.

    Parameters:
        step: the optimizer step at which it was logged.
        value: the number; it may be nan or infinite.
        epoch: epochs done by then, where that was logged.
    """

    step: int
    value: float
    epoch: float | None


@dataclass
class History:
    """The logged numbers of one training.

    Parameters:
        curves: (metric, source) -> points in the order of their steps; the source is `TRAINING`, `EVALUATION` or the
            name of an evaluation set.
        summary: what was logged about the whole training when it ended.
        last_epoch: epochs done when something was logged last.
        notes: sentences about what could not be shown.
    """

    curves: dict[tuple[str, str], list[Point]] = field(default_factory=dict)
    summary: dict[str, float] = field(default_factory=dict)
    last_epoch: float | None = None
    notes: list[str] = field(default_factory=list)

    def metrics(self) -> list[str]:
        """The metrics that were logged, in the order of their first appearance."""
        return list(dict.fromkeys(metric for metric, _ in self.curves))


def read_history(entries: list[Any]) -> History:
    """Sort the entries of a `log_history` into curves.

    Entries and values that cannot be shown are left out and told of in the notes.
    """
    history = History()
    sound = [entry for entry in entries if isinstance(entry, dict) and _is_step(entry.get("step"))]
    if len(sound) < len(entries):
        history.notes.append(
            f"{len(entries) - len(sound)} of {len(entries)} entries of log_history are left out: they have no step."
        )
    prefixes = evaluation_prefixes(sound)
    found: dict[tuple[str, str], dict[int, Point]] = {}
    no_numbers: dict[str, None] = {}
    for entry in sound:
        epoch = _number(entry.get("epoch"))
        history.last_epoch = epoch if epoch is not None else history.last_epoch
        ends_training = OF_THE_WHOLE_TRAINING in entry
        for name, logged in entry.items():
            value = _number(logged)
            if name in ("step", "epoch") or (name in NO_METRICS and not ends_training):
                continue
            if value is None:
                no_numbers[name] = None
            elif ends_training:
                history.summary[name] = value
            elif not any(part in name for part in MEMORY_PARTS):
                # An evaluation at the end of training stands at a step that was evaluated before.
                found.setdefault(_key_of(name, prefixes), {})[entry["step"]] = Point(entry["step"], value, epoch)
    history.curves = {key: [points[step] for step in sorted(points)] for key, points in found.items()}
    if no_numbers:
        history.notes.append(f"Not drawn, since they hold no number: {_listed(no_numbers)}.")
    history.notes += _notes_on_numbers(history.curves)
    return history


def evaluation_prefixes(entries: Iterable[dict[str, Any]]) -> dict[str, str]:
    """What the names of evaluation metrics begin with -> the name of the evaluation set.

    Each evaluation logs its duration, `eval_runtime` or, for a dataset of a dict, `eval_NAME_runtime`.
    """
    prefixes = {"eval": EVALUATION}
    for entry in entries:
        for name in entry:
            if name.endswith(RUNTIME_ENDING) and name != OF_THE_WHOLE_TRAINING:
                prefix = name.removesuffix(RUNTIME_ENDING)
                prefixes.setdefault(prefix, prefix.removeprefix("eval_"))
    return prefixes


def _key_of(name: str, prefixes: dict[str, str]) -> tuple[str, str]:
    # The longest prefix, found without a look at each of them: a dict may name thousands of evaluation sets.
    prefix = name
    while "_" in prefix:
        prefix = prefix.rpartition("_")[0]
        if prefix in prefixes:
            return name[len(prefix) + 1 :], prefixes[prefix]
    return name, TRAINING


def _is_step(step: Any) -> bool:
    return isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**53


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _notes_on_numbers(curves: dict[tuple[str, str], list[Point]]) -> list[str]:
    notes = []
    for (metric, source), points in curves.items():
        steps = [point.step for point in points if not math.isfinite(point.value)]
        if steps:
            named = f"{shortened(metric)} ({shortened(source)})"
            times = f"{len(steps)} of {len(points)} values"
            notes.append(f"{named}: {times} are nan or infinite, at step {_listed(steps)}.")
    rest = len(notes) - MOST_NAMED
    return notes[:MOST_NAMED] + ([f"{rest} more metrics have values that are nan or infinite."] if rest > 0 else [])


def _listed(items: Iterable[Any]) -> str:
    texts = [shortened(str(item)) for item in items]
    rest = len(texts) - MOST_NAMED
    return ", ".join(texts[:MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")
