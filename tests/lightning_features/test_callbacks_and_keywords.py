"""Profilers, anomalies and averaging: what each shows or changes in a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
)
from lightning.pytorch.profilers import Profiler, SimpleProfiler

from littrainer import Trainer, TrainerCallback
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


@pytest.mark.parametrize("name", ["simple", "advanced", "pytorch"])
def test_a_profiler_may_be_named_and_tells_when_training_ends(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(Profiler, "_rank_zero_info", lambda self, *texts, **_: told.extend(texts))
    trainer = quiet_trainer(tmp_path, given={"lightning": {"profiler": name}}, max_steps=5)
    trainer.train()
    words = {"simple": "run_training_batch", "advanced": "function calls", "pytorch": "aten::"}[name]
    assert any(words in text for text in told)


@BOTH_MODES
def test_an_anomaly_ends_training_and_names_the_operation(tmp_path: Path, kind: type[Trainer]) -> None:
    class Broken(VectorClassifier):
        def logits(self, x: torch.Tensor) -> torch.Tensor:
            # A finite value, and an infinite gradient that is multiplied with zero.
            hidden = self.inner(x)
            return self.head(torch.sqrt(hidden * 0)) + super().logits(x)

    changes: dict[str, Any] = {"kind": kind, "max_steps": 1}
    quiet_trainer(tmp_path, Broken(), **changes).train()
    with (
        pytest.warns(UserWarning, match="Error detected in MulBackward0"),
        pytest.raises(RuntimeError, match="'MulBackward0' returned nan values"),
    ):
        quiet_trainer(tmp_path, Broken(), lightning={"detect_anomaly": True}, **changes).train()
    assert not torch.is_anomaly_enabled()


def test_a_moving_average_is_that_of_the_weights_after_each_step(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    after_steps: list[torch.Tensor] = []

    class Weights(TrainerCallback):
        def on_step_end(self, *_: Any, model: Any = None, **__: Any) -> None:
            after_steps.append(model.head.weight.detach().clone())

    given = {"callbacks": [Weights(), EMAWeightAveraging(decay=0.7)]}
    trainer = quiet_trainer(tmp_path, given=given, max_steps=6, rows=20)
    trainer.train()
    assert not [warning for warning in recwarn if "configure_model" in str(warning.message)]
    expected = after_steps[0]
    for weights in after_steps[1:]:
        expected = 0.7 * expected + 0.3 * weights
    torch.testing.assert_close(trainer.model.head.weight.detach(), expected)
    assert not torch.allclose(expected, after_steps[-1])
