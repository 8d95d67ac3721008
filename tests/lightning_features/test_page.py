"""docs/lightning-features.md names everything that it is about."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "lightning-features.md"
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


def test_the_table_has_each_feature_in_one_line() -> None:
    text = PAGE.read_text()
    table = text[text.index("| | one line |") : text.index("## Profilers")]
    assert [name for name in FEATURES if name not in table] == []
    titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
    sections = {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}
    assert set(re.findall(r"\]\(#([a-z-]+)\)", table)) == sections
