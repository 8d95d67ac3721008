"""What evaluations found, for the model card: the results of the model that is shared, and how they came about."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from littrainer.callbacks.log_history import COSTS, EVALUATION, OF_THE_WHOLE_TRAINING, TRAINING, History, read_history

if TYPE_CHECKING:
    from littrainer.callbacks.state import TrainerState

# More rows than a page can show are thinned out.
MOST_ROWS = 100
NOTHING_LOGGED = "No log"


@dataclass(frozen=True)
class Results:
    """Evaluation results of one training.

    Parameters:
        metrics: (metric, evaluation set) -> value, of the model as it is after training; the set is `EVALUATION` or,
            for a dict of sets, the name of one.
        columns: head of the table of evaluations during training.
        rows: its rows, each as many texts as there are columns; empty where nothing was trained.
        left_out: rows that were left out since there are more than `MOST_ROWS`.
    """

    metrics: dict[tuple[str, str], float] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    left_out: int = 0


def results_of(state: TrainerState, loads_best: bool = False) -> Results:
    """Read results from a `log_history`.

    Parameters:
        state: where training stands.
        loads_best: the model is that of the best evaluation, and not of the last one.
    """
    entries = [entry for entry in state.log_history if isinstance(entry, dict)]
    ends = [place for place, entry in enumerate(entries) if OF_THE_WHOLE_TRAINING in entry]
    during = read_history(entries[: ends[-1]] if ends else entries)
    after = read_history(entries[ends[-1] + 1 :] if ends else [])
    in_training = _evaluations(during)
    metrics = _last_of(after) or _metrics_at(in_training, _step_of_the_model(state, in_training, loads_best))
    if not ends and ("loss", TRAINING) not in during.curves:
        return Results(metrics)
    return _with_table(metrics, during, in_training)


Evaluations = dict[tuple[str, str], dict[int, tuple[float, "float | None"]]]


def _evaluations(history: History) -> Evaluations:
    return {
        (metric, source): {point.step: (point.value, point.epoch) for point in points}
        for (metric, source), points in history.curves.items()
        if source != TRAINING and metric not in COSTS
    }


def _last_of(history: History) -> dict[tuple[str, str], float]:
    return {key: points[-1].value for key, points in history.curves.items() if key in _evaluations(history)}


def _step_of_the_model(state: TrainerState, evaluations: Evaluations, loads_best: bool) -> int | None:
    steps = sorted({step for values in evaluations.values() for step in values})
    if loads_best and state.best_global_step in steps:
        return state.best_global_step
    return steps[-1] if steps else None


def _metrics_at(evaluations: Evaluations, step: int | None) -> dict[tuple[str, str], float]:
    return {key: values[step][0] for key, values in evaluations.items() if step is not None and step in values}


def _with_table(metrics: dict[tuple[str, str], float], history: History, evaluations: Evaluations) -> Results:
    losses = history.curves.get(("loss", TRAINING), [])
    logged_at = [point.step for point in losses]
    epochs = {step: epoch for values in evaluations.values() for step, (_, epoch) in values.items()}
    steps = sorted(epochs)
    shown = _thinned(steps)
    rows = []
    for step in shown:
        before = bisect.bisect_right(logged_at, step)
        loss = rounded(losses[before - 1].value) if before else NOTHING_LOGGED
        epoch = epochs[step]
        cells = (rounded(values[step][0]) if step in values else "" for values in evaluations.values())
        rows.append((loss, "" if epoch is None else rounded(epoch), str(step), *cells))
    heads = ("Validation Loss" if key == ("loss", EVALUATION) else label(*key) for key in evaluations)
    return Results(metrics, ("Training Loss", "Epoch", "Step", *heads), tuple(rows), len(steps) - len(shown))


def _thinned(steps: list[int]) -> list[int]:
    if len(steps) <= MOST_ROWS:
        return steps
    return [steps[round(row * (len(steps) - 1) / (MOST_ROWS - 1))] for row in range(MOST_ROWS)]


def label(metric: str, source: str) -> str:
    """What a metric is called on the card: `matthews_correlation` is Matthews Correlation."""
    words = " ".join(word[:1].upper() + word[1:] for word in metric.split("_") if word) or metric
    return words if source == EVALUATION else f"{words} ({source})"


def rounded(value: float) -> str:
    """A number with four decimals at most, and a small one with four digits that count."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{value:.1f}" if isinstance(value, float) else str(value)
    return f"{value:.4g}" if abs(value) < 0.001 else f"{value:.4f}"


def metric_tags(results: Results) -> dict[str, tuple[str, float]]:
    """Metrics that the Hub knows: its name of each -> how the card calls it, and the finite value."""
    found: dict[str, tuple[str, float]] = {}
    for (metric, source), value in results.metrics.items():
        known = _HUB_NAMES.get(metric.lower())
        if known is not None and source == EVALUATION and math.isfinite(value):
            found.setdefault(known, (label(metric, source), value))
    return found


_NAMED_ALIKE = (
    *("accuracy", "bleu", "cer", "chrf", "exact_match", "f1", "mae", "matthews_correlation", "mean_iou", "meteor"),
    *("mse", "pearsonr", "perplexity", "precision", "recall", "roc_auc", "rouge", "sacrebleu", "seqeval", "spearmanr"),
    *("squad", "squad_v2", "ter", "wer"),
)
_HUB_NAMES = {**{name: name for name in _NAMED_ALIKE}, "rouge1": "rouge"}
