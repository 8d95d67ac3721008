"""The code of the section about TFTrainer in docs/compatibility.md runs as printed, and names what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"


def section() -> str:
    (found,) = re.findall(r"^## The first edition's TFTrainer$(.*?)^## ", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return found


def test_the_code_of_the_section_runs_as_printed(keras: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # The code sets it, which is undone with this.
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    (block,) = re.findall(r"^```python$(.*?)^```$", section(), re.DOTALL | re.MULTILINE)
    keras.utils.set_random_seed(0)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(block, str(PAGE), "exec"), names)
    assert names["metrics"]["eval_accuracy"] > 0.7
    assert {"model.safetensors", "model.keras"} < {path.name for path in (tmp_path / "trained").iterdir()}
