"""Names of losses and metrics as a Lightning user expects them: `val_loss`, `test_accuracy`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Number
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

VALIDATION, TEST = "val", "test"
# What metric functions written for a Trainer may have put in front of a name.
PREFIXES = ("eval_", "val_", "test_")


def with_prefix(prefix: str, name: str) -> str:
    """A metric's name with the prefix of what it was computed on."""
    for known in PREFIXES:
        name = name.removeprefix(known)
    return f"{prefix}_{name}"


def with_prefixes(prefix: str, suffix: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics by the names under which they are logged; those that have the same one are named in a warning."""
    found: dict[str, Any] = {}
    own_names: dict[str, list[str]] = {}
    for name, value in metrics.items():
        logged = with_prefix(prefix, name) + suffix
        found[logged] = value
        own_names.setdefault(logged, []).append(name)
    for logged, names in own_names.items():
        if len(names) > 1:
            rank_zero_warn(
                f"The metrics {', '.join(names)} are all logged as {logged}, and the last one counts. Give them names "
                f"that differ in more than a prefix ({', '.join(PREFIXES)})."
            )
    return found


def is_watched(name: str, callbacks: Iterable[Any]) -> bool:
    """Whether a callback decides by a logged number, as EarlyStopping, or names files by it, as ModelCheckpoint."""
    return any(
        getattr(one, "monitor", None) == name or name in str(getattr(one, "filename", None)) for one in callbacks
    )


def prefix_and_suffix(stage: str, loaders: Any, index: int) -> tuple[str, str]:
    """What stands before and after the names of one loader's metrics.

    Parameters:
        stage: `val` or `test`.
        loaders: what the hook of the data gave: a loader, several in a list, or by name in a dict.
        index: place of the loader among them.
    """
    if isinstance(loaders, Mapping):
        return f"{stage}_{list(loaders)[index]}", ""
    if isinstance(loaders, (list, tuple)) and len(loaders) > 1:
        # As Lightning names what was logged in the steps of several loaders.
        return stage, f"/dataloader_idx_{index}"
    return stage, ""


def loader_at(loaders: Any, index: int) -> Any:
    """The loader that a step's `dataloader_idx` stands for."""
    if isinstance(loaders, Mapping):
        return list(loaders.values())[index]
    return loaders[index] if isinstance(loaders, (list, tuple)) else loaders


def monitored_name(metric_for_best_model: str | None) -> str:
    """The logged name of the metric that a schedule follows."""
    return with_prefix(VALIDATION, metric_for_best_model or "loss")


def numbers_in(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that can be logged, which are numbers; others are named in a warning."""
    found = {name: float(value) for name, value in metrics.items() if isinstance(value, Number)}  # type: ignore[arg-type]
    others = [name for name in metrics if name not in found]
    if others:
        rank_zero_warn(
            f"Metrics that are no numbers are not logged: {', '.join(others)}. Let compute_metrics return numbers."
        )
    return found
