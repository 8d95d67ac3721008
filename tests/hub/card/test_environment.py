from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import littrainer
from littrainer.hub.card.environment import framework_versions, strategy_of
from tests.scenarios.trainers import quiet_trainer


def test_libraries_that_took_part_are_named_with_their_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", SimpleNamespace(__version__="9.8"))
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    found = framework_versions()
    assert found["littrainer"] == littrainer.__version__ and found["PyTorch"] == torch.__version__
    assert found["PEFT"] == "9.8" and "DeepSpeed" not in found


def test_lightnings_own_name_of_the_strategy_is_told_after_training(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, max_steps=1)
    assert strategy_of(trainer) == "single device, one cpu device, precision 32-true (float32)"
    trainer.train()
    assert strategy_of(trainer) == "SingleDeviceStrategy, one cpu device, precision 32-true (float32)"


def test_the_number_format_is_told(tmp_path: Path) -> None:
    assert strategy_of(quiet_trainer(tmp_path, bf16=True)).endswith("precision bf16-mixed")
