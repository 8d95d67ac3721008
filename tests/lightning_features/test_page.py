"""The code of docs/lightning-features.md runs as printed, and the page names everything that it is about."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "lightning-features.md"
NEEDED = {"RichProgressBar": "rich", "savefig": "matplotlib", "cpu_stats": "psutil"}
FEATURES = (
    "profiler",
    *(f"limit_{name}_batches" for name in ("train", "val", "test", "predict")),
    "overfit_batches",
    "fast_dev_run",
    "detect_anomaly",
    "trainer.lr_find()",
    "trainer.scale_batch_size()",
    "GradientAccumulationScheduler",
    "EMAWeightAveraging",
    "StochasticWeightAveraging",
    "DeviceStatsMonitor",
    "ThroughputMonitor",
    "RichProgressBar",
)


def test_the_code_of_the_page_runs_and_shows_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    names: dict[str, Any] = {"__name__": "__main__"}
    shown: list[tuple[str, str]] = []
    for block in re.findall(r"^```python$(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE):
        if any(word in block and importlib.util.find_spec(package) is None for word, package in NEEDED.items()):
            continue
        exec(compile(block, str(PAGE), "exec"), names)
        shown.append((block, capsys.readouterr().out))
    # What stands behind `#` in a line that prints is what it prints first.
    said = [
        (comment, printed)
        for block, printed in shown
        for comment in re.findall(r"^print\(.*\)  # (\d+)", block, re.MULTILINE)
    ]
    assert len(said) == 4 and all(re.search(rf"^{number}$", printed, re.MULTILINE) for number, printed in said)
    assert len(shown) >= 10 and (tmp_path / "runs" / "fit-profile.txt").is_file()
    losses = [entry["loss"] for entry in names["history"].state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] / 2


def test_the_table_has_each_feature_in_one_line() -> None:
    text = PAGE.read_text()
    table = text[text.index("| | one line |") : text.index("## Profilers")]
    assert [name for name in FEATURES if name not in table] == []
    titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
    sections = {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}
    assert set(re.findall(r"\]\(#([a-z-]+)\)", table)) == sections
