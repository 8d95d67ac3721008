from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from littrainer import TrainingArguments
from littrainer.distributed import error_report


@pytest.fixture
def own_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", lambda *error: None)
    monkeypatch.setattr(error_report, "_reports", False)


def test_the_agent_hears_of_an_error_of_the_arguments_before_the_processes_have_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_hook: None
) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv(error_report.ERROR_FILE, str(file))
    with pytest.raises(ValueError, match="ddp_timeout=0") as refused:
        TrainingArguments("out", use_cpu=True, ddp_timeout=0)
    sys.excepthook(ValueError, refused.value, None)
    told = json.loads(file.read_text())
    assert told["message"]["message"].startswith("ValueError: ddp_timeout=0") and told["is_consequence"] is False


def test_without_an_agent_errors_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch, own_hook: None) -> None:
    monkeypatch.delenv(error_report.ERROR_FILE, raising=False)
    before = sys.excepthook
    error_report.report_errors_to_agent()
    assert sys.excepthook is before
