"""The examples of docs/evaluation.md run as printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "evaluation.md"


def test_the_examples_of_streaming_metrics_run_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    (section,) = re.findall(r"^## Streaming metrics$(.*?)^## ", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in re.findall(r"^```python$(.*?)^```$", section, re.DOTALL | re.MULTILINE):
        exec(compile(block, str(PAGE), "exec"), names)
    printed = capsys.readouterr().out
    assert all(f"'eval_{name}'" in printed for name in ("loss", "accuracy", "f1_0", "f1_1", "f1_2"))
    assert set(names["compute_metrics"]) == {"next_token_accuracy", "perplexity", "class_accuracy"}
