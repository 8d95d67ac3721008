from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from littrainer.loop.loss import (
    HostValues,
    LabelSmoother,
    RunningLoss,
    add_to_running_loss,
    compute_loss_and_outputs,
    items_in_window,
    scale_for_accumulation,
)
from littrainer.loop.loss_normalization import UNKNOWN
from tests.scenarios.models import (
    LogitsOnly,
    LosslessClassifier,
    VectorClassifier,
    tiny_bart,
)
from tests.scenarios.trainers import quiet_trainer

BATCH = {"x": torch.ones(2, 6), "labels": torch.tensor([0, 2])}


def added(losses: list[torch.Tensor], waiting: bool, filtered: bool, running: torch.Tensor) -> torch.Tensor:
    record = RunningLoss()
    record.since_last_log = running
    for steps, loss in enumerate(losses):
        if waiting:
            record.add(loss, steps // 2, filtered)
        else:
            add_to_running_loss(running, loss, steps // 2, filtered)
    return record.since_last_log


@pytest.fixture(params=[True, False], ids=["on the CPU", "as on a GPU"])
def _losses_of_both_devices(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("littrainer.loop.loss.is_on_cpu", lambda loss: request.param)


@pytest.mark.usefixtures("_losses_of_both_devices")
@pytest.mark.parametrize(("filtered", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
@pytest.mark.parametrize("odd_one", [3e7, float("nan")])
@pytest.mark.parametrize("number", [1, 3, 105])
def test_pending_losses_have_the_same_sum_bit_for_bit(
    number: int, odd_one: float, dtype: torch.dtype, filtered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunningLoss, "MAX_PENDING", 100)
    torch.manual_seed(number)
    losses = list((torch.rand(number) * 3).to(dtype))
    losses[number // 2] = torch.tensor(odd_one, dtype=dtype)
    sums = [added(losses, waiting, filtered, torch.tensor(0.7)) for waiting in (True, False)]
    assert torch.equal(sums[0].view(torch.int32), sums[1].view(torch.int32)) or (sums[0].isnan() and sums[1].isnan())


@pytest.mark.usefixtures("_losses_of_both_devices")
def test_a_later_change_of_a_loss_does_not_count() -> None:
    record, loss = RunningLoss(), torch.tensor(2.0)
    record.since_last_log = torch.tensor(1.0)
    record.add(loss, 0, True)
    loss.fill_(100.0)
    assert record.since_last_log.item() == 3.0


def facts(**changes: Any) -> Any:
    defaults = {
        "loss_is_scaled_for_ga": None,
        "model_accepts_loss_kwargs": False,
        "compute_loss_func": None,
        "compute_loss": print,
        "training_step": print,
        "current_gradient_accumulation_steps": 4,
        "_loss_shifts_labels": False,
        "_loss_reduction": UNKNOWN,
        "args": SimpleNamespace(world_size=1, average_tokens_across_devices=True),
    }
    return SimpleNamespace(**{**defaults, **changes})


class AMean:
    """A fake override without num_items_in_batch."""

    _reduces_to_micro_batch_mean = True


@pytest.mark.parametrize(
    ("changes", "items", "divided"),
    [
        ({}, None, False),
        ({}, 7, False),
        ({"model_accepts_loss_kwargs": True}, 7, True),
        ({"model_accepts_loss_kwargs": True}, None, False),
        ({"compute_loss_func": print}, None, True),
        ({"loss_is_scaled_for_ga": True}, None, True),
        ({"compute_loss": AMean(), "model_accepts_loss_kwargs": True}, 7, False),
        ({"training_step": AMean(), "compute_loss_func": print}, None, False),
        ({"compute_loss": AMean(), "loss_is_scaled_for_ga": True}, 7, True),
        ({"compute_loss": Mock(), "model_accepts_loss_kwargs": True}, 7, True),
        ({"loss_is_scaled_for_ga": False, "model_accepts_loss_kwargs": True, "compute_loss_func": print}, 7, False),
    ],
)
def test_a_loss_is_divided_by_the_window_exactly_once(changes: Any, items: int | None, divided: bool) -> None:
    loss = torch.tensor(8.0)
    assert scale_for_accumulation(facts(**changes), loss, items).item() == (8.0 if divided else 2.0)


@pytest.mark.parametrize("window", [[], [{"x": torch.ones(1)}], [{"labels": ["a"]}]])
def test_a_window_without_labels_that_can_be_counted_has_no_number(window: Any) -> None:
    assert items_in_window(facts(model_accepts_loss_kwargs=True), window, torch.device("cpu")) is None


def loss_of(folder: Path, model: nn.Module, inputs: Any = BATCH, items: Any = None, **trainer_kwargs: Any) -> Any:
    trainer = quiet_trainer(folder, model, trainer_kwargs=trainer_kwargs)
    return compute_loss_and_outputs(trainer, trainer.model, dict(inputs), items)


def test_a_loss_function_without_labels_to_give_it_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loss_of(tmp_path, LogitsOnly(), {"x": BATCH["x"]}, compute_loss_func=lambda o, labels, **_: o["logits"].sum())
    assert "labels=None" in caplog.text


class Returns(nn.Module):
    """A model that returns a fixed value."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.head = nn.Linear(1, 1)
        self.value = value

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return self.value


@pytest.mark.parametrize(
    ("value", "described"),
    [
        ((), "tuple"),
        ((torch.ones(2, 3),), r"tuple.*Tensor of shape \(2, 3\)"),
        (torch.ones(2, 3), "Tensor"),
        ({"logits": torch.ones(1)}, "logits"),
        ({"loss": None, "logits": torch.ones(1)}, "loss.*logits"),
    ],
)
def test_outputs_without_a_loss_are_described(tmp_path: Path, value: Any, described: str) -> None:
    with pytest.raises(ValueError, match=rf"Returns\.forward returned no loss.*{described}.*compute_loss"):
        loss_of(tmp_path, Returns(value))


def test_missing_labels_and_a_model_without_loss_have_different_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"batch has no labels \(it has x\)"):
        loss_of(tmp_path, LosslessClassifier(), {"x": BATCH["x"]})
    with pytest.raises(ValueError, match="under the key 'loss'"):
        loss_of(tmp_path, LosslessClassifier())


def scores(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.7])
def test_the_loss_is_torchs_smoothed_cross_entropy_over_labels_that_count(epsilon: float) -> None:
    logits, labels = scores(2, 4, 5), torch.tensor([[1, -100, 4, 0], [2, 2, -100, 3]])
    expected = nn.functional.cross_entropy(logits.view(-1, 5), labels.view(-1), label_smoothing=epsilon)
    torch.testing.assert_close(LabelSmoother(epsilon)({"logits": logits}, labels), expected)
    torch.testing.assert_close(LabelSmoother(epsilon)((logits,), labels.unsqueeze(-1)), expected)


def test_several_true_labels_at_once_are_not_smoothed_and_a_warning_says_so(tmp_path: Path) -> None:
    model = VectorClassifier()
    model.config = SimpleNamespace(problem_type="multi_label_classification")  # type: ignore[assignment]
    with pytest.warns(UserWarning, match=r"label_smoothing_factor=0\.3 has no effect"):
        trainer = quiet_trainer(tmp_path, model, label_smoothing_factor=0.3)
    assert trainer.label_smoother is None


class WithoutLabels(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


@pytest.mark.parametrize("names", [["target"], ["target", "weight"]])
def test_a_loss_function_gets_the_labels_under_their_names(tmp_path: Path, names: list[str]) -> None:
    got = []

    def compute_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        got.append(labels)
        return outputs.sum()

    batch = {"x": torch.ones(2, 6), **dict.fromkeys(names, torch.tensor([0, 2]))}
    trainer = quiet_trainer(
        tmp_path, WithoutLabels(6, 3), trainer_kwargs={"compute_loss_func": compute_loss}, label_names=names
    )
    trainer.compute_loss(trainer.model, dict(batch))
    assert torch.equal(got[0] if len(names) == 1 else got[0][1], batch["target"])


def test_the_error_of_smoothing_without_decoder_inputs_names_the_collator(tmp_path: Path) -> None:
    model = tiny_bart()
    trainer = quiet_trainer(tmp_path, model, label_smoothing_factor=0.1)
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 2]]), "labels": torch.tensor([[8, 9, 2]])}
    with pytest.raises(RuntimeError) as caught:
        trainer.compute_loss(model, dict(inputs))
    assert "DataCollatorForSeq2Seq(tokenizer, model=model)" in caught.value.__notes__[0]
    decoder_inputs = model.prepare_decoder_input_ids_from_labels(labels=inputs["labels"])
    assert trainer.compute_loss(model, {**inputs, "decoder_input_ids": decoder_inputs}) > 0


def test_a_number_of_inference_mode_is_read_each_time() -> None:
    with torch.inference_mode():
        number = torch.tensor(3.0)
    values = HostValues()
    assert values.to_list([number, 2.0]) == [3.0, 2.0] and values.to_float(number) == 3.0
