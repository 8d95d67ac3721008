from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.models import FEATURES
from tests.scenarios.trainers import quiet_trainer

ROWS = 3


@pytest.mark.parametrize("return_loss", [None, False])
def test_a_loss_without_labels_is_computed_unless_the_batch_sets_return_loss(
    tmp_path: Path, return_loss: bool | None
) -> None:
    class Contrastive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(FEATURES, 2)

        def forward(self, x: torch.Tensor, return_loss: bool = True) -> Any:
            logits = self.head(x)
            return {"loss": logits.mean(), "logits": logits} if return_loss else {"logits": logits}

    inputs: dict[str, Any] = {"x": torch.ones(ROWS, FEATURES)}
    if return_loss is not None:
        inputs["return_loss"] = return_loss
    trainer = quiet_trainer(tmp_path, Contrastive())
    loss, logits, labels = trainer.prediction_step(trainer.model, inputs, False)
    assert (loss is None) is (return_loss is False)
    assert logits.shape == (ROWS, 2)
    assert labels == (() if return_loss is None else None)


class Reducing(nn.Module):
    """Model that returns a function of its logits."""

    def __init__(self, reduce: Any) -> None:
        super().__init__()
        self.head = nn.Linear(FEATURES, 2)
        self.reduce = reduce

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return {"loss": self.head(x).sum(), **self.reduce(self.head(x))}


def evaluate_model(folder: Path, model: nn.Module, **trainer_kwargs: Any) -> Any:
    trainer = quiet_trainer(folder, model, trainer_kwargs={"compute_metrics": lambda prediction: {}, **trainer_kwargs})
    return trainer.evaluate()


# Outputs -> pattern of the error, or None.
REDUCED: dict[str, tuple[Any, str | None]] = {
    "mean over the batch": (lambda logits: {"logits": logits.mean(dim=0)}, r"logits of shape \(2,\)"),
    "first row": (lambda logits: {"logits": logits[:1]}, r"logits of shape \(1, 2\)"),
    "more rows": (lambda logits: {"logits": logits.repeat(2, 1)[1:]}, r"logits of shape \(5, 2\)"),
    "a number beside it": (lambda logits: {"logits": logits[:1], "other": logits.sum()}, r"other of shape \(\)"),
    "one number beside logits": (lambda logits: {"auxiliary": logits.mean(), "logits": logits}, None),
    "nested beside": (lambda logits: {"logits": logits.mean(dim=0), "states": (logits,)}, None),
}


@pytest.mark.parametrize("kind", REDUCED)
def test_predictions_without_batch_dimension_are_refused_with_their_shape(tmp_path: Path, kind: str) -> None:
    reduce, pattern = REDUCED[kind]
    if pattern is None:
        assert "eval_loss" in evaluate_model(tmp_path, Reducing(reduce))
    else:
        with pytest.raises(ValueError, match=rf"{pattern}.*'labels' have 3 rows.*first dimension"):
            evaluate_model(tmp_path, Reducing(reduce))


def test_labels_of_another_length_than_the_predictions_are_refused(tmp_path: Path) -> None:
    def too_many_labels(samples: list[Any]) -> Any:
        x = torch.stack([sample["x"] for sample in samples])
        return {"x": x, "labels": torch.zeros(len(samples) + 2, dtype=torch.long)}

    with pytest.raises(ValueError, match=r"logits of shape \(3, 2\).*'labels' have 5 rows.*data collator"):
        evaluate_model(tmp_path, Reducing(lambda logits: {"logits": logits}), data_collator=too_many_labels)


def test_predictions_may_have_any_shape_with_preprocessing_or_without_metrics(tmp_path: Path) -> None:
    def shapes(prediction: Any) -> dict[str, Any]:
        return {"shapes": [part.shape for part in prediction.predictions]}

    # Parts of the loss are numbers.
    parts = Reducing(lambda logits: {"cross_entropy": logits.mean(), "penalty": logits.abs().mean()})
    assert evaluate_model(tmp_path, parts, compute_metrics=shapes)["eval_shapes"] == [(3,), (3,)]
    model = Reducing(lambda logits: {"logits": logits.mean()})
    assert "eval_loss" in evaluate_model(tmp_path, model, preprocess_logits_for_metrics=lambda logits, labels: logits)
    assert "eval_loss" in evaluate_model(tmp_path, model, compute_metrics=None)
    output = quiet_trainer(tmp_path, model).predict(Rows(vector_rows(7)))
    assert output.predictions.shape == (3,)


def test_a_bare_tensor_of_a_single_row_is_not_unpacked(tmp_path: Path) -> None:
    model = nn.Linear(FEATURES, 2)
    model.forward = lambda x: nn.Linear.forward(model, x)  # type: ignore[method-assign]
    rows = [{"x": row["x"]} for row in vector_rows(7)]
    assert quiet_trainer(tmp_path, model).predict(Rows(rows)).predictions.shape == (7, 2)
