"""Metrics as a user reads and keeps them: printed tables and JSON files beside the model."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any


def metrics_format(metrics: dict[str, Any]) -> dict[str, Any]:
    """Metrics for reading: times as h:mm:ss.cc, memory in MB, operations in GF, other numbers with four decimals."""
    shown: dict[str, Any] = {}
    for name, value in metrics.items():
        if "_mem_" in name:
            shown[name] = f"{value >> 20}MB"
        elif "_runtime" in name:
            hundredths = int(abs(value - int(value)) * 100)
            shown[name] = f"{datetime.timedelta(seconds=int(value))}.{hundredths:02d}"
        elif name == "total_flos":
            shown[name] = f"{int(value) >> 30}GF"
        else:
            shown[name] = round(value, 4) if isinstance(value, float) else value
    return shown


def print_metrics(split: str, metrics: dict[str, Any]) -> None:
    """Print the metrics of a split as a table, sorted by name."""
    shown = {name: str(value) for name, value in metrics_format(metrics).items()}
    name_width = max(map(len, shown), default=0)
    value_width = max(map(len, shown.values()), default=0)
    print(f"***** {split} metrics *****")
    for name in sorted(shown):
        print(f"  {name:<{name_width}} = {shown[name]:>{value_width}}")


def save_metrics(output_dir: str, split: str, metrics: dict[str, Any], combined: bool) -> None:
    """Write `<split>_results.json`, and add the metrics to `all_results.json` where `combined`."""
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / f"{split}_results.json", metrics)
    if combined:
        everything = folder / "all_results.json"
        known = json.loads(everything.read_text("utf-8")) if everything.exists() else {}
        _write_json(everything, {**known, **metrics})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=4, sort_keys=True), "utf-8")
