"""Profilers, anomalies, averaging and monitors: what each shows or changes in a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    EMAWeightAveraging,
    RichProgressBar,
    StochasticWeightAveraging,
    ThroughputMonitor,
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


class Weights(TrainerCallback):
    """Notes the head's weights after each optimizer step and at the end of each epoch, and learning rates."""

    def __init__(self) -> None:
        self.after_steps: list[torch.Tensor] = []
        self.epochs: list[torch.Tensor] = []
        self.rates: list[float] = []

    def on_step_begin(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_step_end(self, *_: Any, model: Any = None, **__: Any) -> None:
        self.after_steps.append(model.head.weight.detach().clone())

    def on_epoch_end(self, *_: Any, model: Any = None, **__: Any) -> None:
        self.epochs.append(model.head.weight.detach().clone())


def test_a_moving_average_is_that_of_the_weights_after_each_step(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    noting = Weights()
    trainer = quiet_trainer(
        tmp_path, given={"callbacks": [noting, EMAWeightAveraging(decay=0.7)]}, max_steps=6, rows=20
    )
    trainer.train()
    assert not [warning for warning in recwarn if "configure_model" in str(warning.message)]
    expected = noting.after_steps[0]
    for weights in noting.after_steps[1:]:
        expected = 0.7 * expected + 0.3 * weights
    torch.testing.assert_close(trainer.model.head.weight.detach(), expected)
    assert not torch.allclose(expected, noting.after_steps[-1])


def test_a_stochastic_average_is_the_mean_of_the_weights_that_later_epochs_begin_with(tmp_path: Path) -> None:
    noting = Weights()
    averaging = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2, annealing_epochs=1)
    trainer = quiet_trainer(tmp_path, given={"callbacks": [noting, averaging]}, num_train_epochs=5, rows=8, optim="sgd")
    trainer.train()
    # The second epoch, counted from 1, is the first of them.
    expected = torch.stack(noting.epochs[:4]).mean(dim=0)
    torch.testing.assert_close(trainer.model.head.weight.detach(), expected)
    assert noting.rates[-1] == pytest.approx(0.05)


def test_monitors_tell_of_the_device_and_of_the_throughput(tmp_path: Path) -> None:
    pytest.importorskip("psutil")
    throughput = ThroughputMonitor(batch_size_fn=lambda batch: len(batch.inputs["labels"]), window_size=2)
    given = {"callbacks": [DeviceStatsMonitor(cpu_stats=True), throughput]}
    trainer = quiet_trainer(tmp_path, given=given, max_steps=4, rows=20, logging_strategy="steps", logging_steps=1)
    trainer.train()

    def logged(name: str) -> list[float]:
        return [entry[name] for entry in trainer.state.log_history if name in entry]

    rates = logged("train/device/samples_per_sec")
    assert logged("train/samples") == [4, 8, 12, 16] and len(rates) >= 2 and min(rates) > 0
    assert len(logged("DeviceStatsMonitor.on_train_batch_end/cpu_percent")) == 4


def test_the_rich_bar_counts_the_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    bar = RichProgressBar(leave=True)
    trainer = quiet_trainer(tmp_path, given={"callbacks": [bar]}, rows=20, num_train_epochs=1, disable_tqdm=False)
    trainer.train()
    assert "Epoch 0/0" in (printed := capsys.readouterr().out) and "5/5" in printed
