"""Metrics as a user reads and keeps them: printed tables and JSON files beside the model."""

from __future__ import annotations

import datetime
import json
import math
from pathlib import Path
from typing import Any

from littrainer.whole_files import write_whole


def metrics_format(metrics: dict[str, Any]) -> dict[str, Any]:
    """Metrics for reading: times as h:mm:ss.cc, memory in MB, operations in GF, other numbers with four decimals.

    A value that such a name does not fit, as a text or an infinite time, stays as it is.
    """
    return {name: _shown(name, value) for name, value in metrics.items()}


def _shown(name: str, value: Any) -> Any:
    if "_mem_" in name and isinstance(value, int):
        return f"{value >> 20}MB"
    if "_runtime" in name and _is_finite_number(value):
        hundredths = int(abs(value - int(value)) * 100)
        return f"{datetime.timedelta(seconds=int(value))}.{hundredths:02d}"
    if name == "total_flos" and _is_finite_number(value):
        return f"{int(value) >> 30}GF"
    return round(value, 4) if isinstance(value, float) else value


def _is_finite_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def print_metrics(split: str, metrics: dict[str, Any]) -> None:
    """Print the metrics of a split as a table, sorted by name."""
    shown = metrics_format(metrics)
    name_width = max(map(len, shown), default=0)
    value_width = max((len(str(value)) for value in shown.values()), default=0)
    print(f"***** {split} metrics *****")
    for name in sorted(shown):
        print(f"  {name:<{name_width}} = {_to_the_right(shown[name], value_width)}")


def _to_the_right(value: Any, width: int) -> str:
    try:
        return f"{value:>{width}}"
    except (TypeError, ValueError):
        # None, lists, dicts and tensors have no formats of their own.
        return f"{value!s:>{width}}"


def save_metrics(output_dir: str, split: str, metrics: dict[str, Any], combined: bool) -> None:
    """Write `<split>_results.json`, and add the metrics to `all_results.json` where `combined`.

    Raises:
        TypeError: JSON has no form for one of the metrics.
        ValueError: `all_results.json` holds something else than metrics; it is left as it is.
        OSError: a file cannot be written; what it held before is kept.
    """
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{split}_results.json"
    write_whole(path, _as_json(path, metrics))
    if combined:
        path = folder / "all_results.json"
        write_whole(path, _as_json(path, {**_known_results(path), **metrics}))


def _as_json(path: Path, metrics: dict[str, Any]) -> str:
    try:
        return json.dumps(metrics, indent=4, sort_keys=True)
    except (TypeError, ValueError) as error:
        for name, value in metrics.items():
            try:
                json.dumps({name: value})
            except (TypeError, ValueError):
                raise TypeError(
                    f"{path} cannot hold the metric {name!r}: {value!r} is a {type(value).__name__}, for which JSON "
                    "has no form. Make it a number, a text or a list of them (.item(), .tolist()); nothing was written."
                ) from error
        raise


def _known_results(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        known = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}), so the metrics were not added to it. {_NEXT_STEP}") from error
    if not isinstance(known, dict):
        raise ValueError(
            f"{path} holds a JSON {type(known).__name__} and no object, so the metrics were not added to it. "
            f"{_NEXT_STEP}"
        )
    return known


_NEXT_STEP = "Mend it, or move it away and save the metrics again; those of this call are in the file of their split."
