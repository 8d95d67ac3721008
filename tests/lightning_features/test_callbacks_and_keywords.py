"""Lightning's profilers and anomaly detection in a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.profilers import SimpleProfiler

from littrainer import Trainer
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import StepwiseTrainer, quiet_trainer

BOTH_MODES = pytest.mark.parametrize("kind", [Trainer, StepwiseTrainer])


@BOTH_MODES
def test_the_simple_profiler_reports_each_step_and_each_batch_of_an_evaluation(
    tmp_path: Path, kind: type[Trainer]
) -> None:
    profiler = SimpleProfiler(dirpath=tmp_path, filename="profile")
    trainer = quiet_trainer(tmp_path, kind=kind, lightning={"profiler": profiler}, max_steps=3, eval_strategy="steps")
    trainer.args.eval_steps = 3
    trainer.train()
    report = (tmp_path / "fit-profile.txt").read_text()
    calls = {
        name.strip().split(".")[-1]: int(number)
        for _, name, _, number, *_ in (line.split("|") for line in report.splitlines() if line.count("|") > 4)
        if number.strip().isdigit()
    }
    assert (calls["run_training_batch"], calls["training_step"], calls["validation_step"]) == (3, 3, 3)


@BOTH_MODES
def test_an_anomaly_ends_training_and_names_the_operation(tmp_path: Path, kind: type[Trainer]) -> None:
    class AnomalousModel(VectorClassifier):
        def logits(self, x: torch.Tensor) -> torch.Tensor:
            # A finite value with an infinite gradient, multiplied by zero.
            hidden = self.inner(x)
            return self.head(torch.sqrt(hidden * 0)) + super().logits(x)

    changes: dict[str, Any] = {"kind": kind, "max_steps": 1}
    quiet_trainer(tmp_path, AnomalousModel(), **changes).train()
    with (
        pytest.warns(UserWarning, match="Error detected in MulBackward0"),
        pytest.raises(RuntimeError, match="'MulBackward0' returned nan values"),
    ):
        quiet_trainer(tmp_path, AnomalousModel(), lightning={"detect_anomaly": True}, **changes).train()
    assert not torch.is_anomaly_enabled()
