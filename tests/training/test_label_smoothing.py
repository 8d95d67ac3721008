from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from littrainer.training.label_smoothing import LabelSmoother, predicts_next_token
from tests.scenarios.models import VectorClassifier, tiny_bert_classifier, tiny_llama
from tests.scenarios.trainers import quiet_trainer


def scores(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.7])
def test_the_loss_is_torchs_smoothed_cross_entropy_over_labels_that_count(epsilon: float) -> None:
    logits, labels = scores(2, 4, 5), torch.tensor([[1, -100, 4, 0], [2, 2, -100, 3]])
    expected = nn.functional.cross_entropy(logits.view(-1, 5), labels.view(-1), label_smoothing=epsilon)
    torch.testing.assert_close(LabelSmoother(epsilon)({"logits": logits}, labels), expected)
    torch.testing.assert_close(LabelSmoother(epsilon)((logits,), labels.unsqueeze(-1)), expected)


def test_a_given_number_of_labels_divides_the_sum() -> None:
    logits, labels = scores(3, 5), torch.tensor([1, 2, 4])
    mean = LabelSmoother(0.2)((logits,), labels)
    for number in (6, torch.tensor(6.0)):
        torch.testing.assert_close(LabelSmoother(0.2)((logits,), labels, num_items_in_batch=number), mean / 2)


def test_shifted_labels_are_compared_with_the_position_before() -> None:
    logits, labels = scores(2, 4, 5), torch.tensor([[1, 0, 4, 0], [2, 2, 3, 3]])
    shifted = LabelSmoother(0.2)((logits,), labels, shift_labels=True)
    assert shifted == LabelSmoother(0.2)((logits[:, :-1],), labels[:, 1:])


def test_the_inputs_keep_their_values() -> None:
    logits, labels = scores(2, 5), torch.tensor([1, -100])
    LabelSmoother()((logits,), labels)
    assert torch.equal(logits, scores(2, 5)) and labels.tolist() == [1, -100]


def test_only_causal_language_models_predict_the_next_token() -> None:
    assert predicts_next_token(tiny_llama())
    assert not predicts_next_token(tiny_bert_classifier())
    assert not predicts_next_token(VectorClassifier())


def test_a_compiled_causal_model_still_predicts_the_next_token(tmp_path: Path) -> None:
    model = tiny_llama()
    trainer = quiet_trainer(tmp_path, model, label_smoothing_factor=0.3)
    batch = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "labels": torch.tensor([[5, 6, 7, 8]])}
    compiled: Any = torch.compile(model, backend="eager")
    losses = [trainer.compute_loss(one, dict(batch)) for one in (model, compiled)]
    assert losses[0] == losses[1]


def test_a_trainer_smooths_the_labels_of_a_model_without_a_config(tmp_path: Path) -> None:
    batch = {"x": torch.ones(2, 6), "labels": torch.tensor([0, 2])}
    plain = quiet_trainer(tmp_path)
    smoothed = quiet_trainer(tmp_path, plain.model, label_smoothing_factor=0.3)
    loss: Any = smoothed.compute_loss(smoothed.model, dict(batch))
    logits = plain.model.logits(batch["x"])
    torch.testing.assert_close(loss, nn.functional.cross_entropy(logits, batch["labels"], label_smoothing=0.3))
    assert loss != plain.compute_loss(plain.model, dict(batch))


def test_several_true_labels_at_once_are_not_smoothed_and_a_warning_says_so(tmp_path: Path) -> None:
    model = VectorClassifier()
    model.config = SimpleNamespace(problem_type="multi_label_classification")  # type: ignore[assignment]
    with pytest.warns(UserWarning, match=r"label_smoothing_factor=0\.3 has no effect"):
        trainer = quiet_trainer(tmp_path, model, label_smoothing_factor=0.3)
    assert trainer.label_smoother is None
