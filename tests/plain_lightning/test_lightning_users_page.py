"""The code of docs/lightning-users.md runs as printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "lightning-users.md"


def test_the_code_for_lightning_users_runs_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    names: dict[str, Any] = {"__name__": "__main__"}
    blocks = re.findall(r"^```python$(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert (names["lightning_trainer"].global_step, names["trainer"].state.global_step) == (6, 8)
    assert (tmp_path / "exported" / "model.safetensors").is_file()
    assert (tmp_path / "again" / "checkpoint-4" / "trainer_state.json").is_file()
