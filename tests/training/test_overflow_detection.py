from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from littrainer.training.overflow_detection import DebugUnderflowOverflow
from tests.scenarios.models import BreakingClassifier, VectorClassifier
from tests.scenarios.trainers import quiet_trainer

BATCH = torch.ones(2, 6)


def test_a_healthy_model_runs_on_and_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    model = VectorClassifier()
    watch = DebugUnderflowOverflow(model)
    expected = model.logits(BATCH)
    for _ in range(3):
        assert torch.equal(model(BATCH)["logits"], expected)
    assert watch.batch_number == 3
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_stops_the_run_at_its_module(
    capsys: pytest.CaptureFixture[str], value: float
) -> None:
    model = VectorClassifier()
    DebugUnderflowOverflow(model)
    model(BATCH)
    with torch.no_grad():
        model.norm.weight[2] = value
    with pytest.raises(ValueError, match=r"forward pass of norm \(LayerNorm\) in batch 1"):
        model(BATCH)
    printed = capsys.readouterr().out
    assert "inner Linear" in printed and "norm LayerNorm" in printed
    assert "head Linear" in printed.split("inner Linear")[1], "frames of the batch before lead to this one"
    assert printed.rstrip().endswith("output")


def test_an_input_that_overflows_is_found_at_the_first_module_that_gets_it() -> None:
    model = VectorClassifier()
    DebugUnderflowOverflow(model)
    with pytest.raises(ValueError, match=r"forward pass of inner \(Linear\) in batch 0"):
        model(BATCH * float("inf"))


def test_an_output_inside_tuples_and_dicts_is_found() -> None:
    class Nested(nn.Module):
        def forward(self, x: torch.Tensor) -> object:
            return {"hidden": (x, (None, x / 0))}

    model = Nested()
    DebugUnderflowOverflow(model)
    with pytest.raises(ValueError, match=r"the model itself \(Nested\)"):
        model(torch.ones(2))


def test_only_the_last_frames_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    model = VectorClassifier()
    watch = DebugUnderflowOverflow(model, max_frames_to_save=2)
    for _ in range(4):
        model(BATCH)
    assert len(watch.frames) == 2
    assert "head Linear" in watch.frames[0]
    assert "VectorClassifier" in watch.frames[1]


def test_traced_batches_are_printed_and_not_judged(capsys: pytest.CaptureFixture[str]) -> None:
    model = VectorClassifier()
    DebugUnderflowOverflow(model, trace_batch_nums=[1])
    model(BATCH)
    assert capsys.readouterr().out == ""
    model(BATCH * float("nan"))
    assert "inner Linear" in capsys.readouterr().out
    model(BATCH)


def test_a_run_can_be_stopped_after_a_batch() -> None:
    model = VectorClassifier()
    DebugUnderflowOverflow(model, abort_after_batch_num=1)
    model(BATCH)
    with pytest.raises(ValueError, match="stops after batch 1"):
        model(BATCH)


def test_debug_stops_a_training_at_the_first_loss_that_is_no_number(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, BreakingClassifier(broken=(2,)), rows=20, debug="underflow_overflow")
    with pytest.raises(ValueError, match=r"debug='underflow_overflow'.*in batch 2"):
        trainer.train()
    assert trainer.state.global_step == 2


def test_the_hooks_are_gone_after_training(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, max_steps=1, debug="underflow_overflow")
    trainer.train()
    assert not any(module._forward_hooks for module in trainer.model.modules())
