from __future__ import annotations

from pathlib import Path

import pytest
import torch

from littrainer.compat.accelerator import AcceleratorFacade
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import quiet_arguments


def test_the_facade_answers_for_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facade = AcceleratorFacade(quiet_arguments(tmp_path))
    assert facade.device == torch.device("cpu")
    assert (facade.num_processes, facade.process_index) == (1, 0)
    assert facade.is_main_process and facade.is_local_main_process
    tensor = torch.ones(2)
    assert facade.gather(tensor) is facade.gather_for_metrics(tensor) is facade.pad_across_processes(tensor) is tensor
    facade.wait_for_everyone()
    facade.print("once", end="!")
    assert capsys.readouterr().out == "once!"


def test_the_facade_takes_torchs_wrappers_off_and_no_others(tmp_path: Path) -> None:
    facade = AcceleratorFacade(quiet_arguments(tmp_path))
    model = VectorClassifier()

    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = model

    own = Own()
    assert facade.unwrap_model(model) is model and facade.unwrap_model(own) is own
    assert facade.unwrap_model(torch.nn.DataParallel(model)) is model
    compiled = type("OptimizedModule", (Own,), {"__module__": "torch._dynamo.eval_frame"})()
    compiled._orig_mod = torch.nn.DataParallel(model)
    assert facade.unwrap_model(compiled) is model


def test_a_backward_outside_training_is_torchs_own(tmp_path: Path) -> None:
    facade = AcceleratorFacade(quiet_arguments(tmp_path))
    leaf = torch.ones(2, requires_grad=True)
    loss = leaf.sum()
    facade.backward(loss, retain_graph=True)
    facade.backward(loss)
    assert leaf.grad is not None and leaf.grad.tolist() == [2.0, 2.0]


def test_rows_that_only_fill_an_evaluations_last_batch_are_left_out(tmp_path: Path) -> None:
    facade = AcceleratorFacade(quiet_arguments(tmp_path))
    facade.samples_in_last_batch = 1
    tensors = facade.gather_for_metrics((torch.zeros(3), {"a": torch.zeros(3, 2), "b": torch.tensor(1.0)}))
    assert tensors[0].shape == (1,) and tensors[1]["a"].shape == (1, 2) and tensors[1]["b"].shape == ()
    # Objects are one for each sample, and stay whole.
    boxes = [{"boxes": torch.zeros(2, 4)}] * 3
    assert [entry["boxes"].shape for entry in facade.gather_for_metrics(boxes, use_gather_object=True)] == [(2, 4)]
    assert facade.gather_for_metrics(["a", "b", "c"]) == ["a"]
    assert facade.gather(torch.zeros(3)).shape == (3,)
