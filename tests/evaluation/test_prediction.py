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


@pytest.mark.parametrize("asked", [None, False])
def test_a_model_that_returns_a_loss_without_labels_is_asked_for_it_unless_the_batch_declines(
    tmp_path: Path, asked: bool | None
) -> None:
    class Contrastive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(FEATURES, 2)

        def forward(self, x: torch.Tensor, return_loss: bool = True) -> Any:
            logits = self.head(x)
            return {"loss": logits.mean(), "logits": logits} if return_loss else {"logits": logits}

    inputs: dict[str, Any] = {"x": torch.ones(ROWS, FEATURES)}
    if asked is not None:
        inputs["return_loss"] = asked
    trainer = quiet_trainer(tmp_path, Contrastive())
    loss, logits, labels = trainer.prediction_step(trainer.model, inputs, False)
    assert (loss is None) is (asked is False)
    assert logits.shape == (ROWS, 2)
    assert labels == (() if asked is None else None)


class Reducing(nn.Module):
    """Returns what a function makes of its logits."""

    def __init__(self, reduce: Any) -> None:
        super().__init__()
        self.head = nn.Linear(FEATURES, 2)
        self.reduce = reduce

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return {"loss": self.head(x).sum(), **self.reduce(self.head(x))}


def measured(folder: Path, model: nn.Module, **given: Any) -> Any:
    trainer = quiet_trainer(folder, model, given={"compute_metrics": lambda prediction: {}, **given})
    return trainer.evaluate()


# What the model returns -> what is said of it; None if that is enough.
REDUCED: dict[str, tuple[Any, str | None]] = {
    "mean over the batch": (lambda logits: {"logits": logits.mean(dim=0)}, r"logits of shape \(2,\)"),
    "first row": (lambda logits: {"logits": logits[:1]}, r"logits of shape \(1, 2\)"),
    "more rows": (lambda logits: {"logits": logits.repeat(2, 1)[1:]}, r"logits of shape \(5, 2\)"),
    "a number beside it": (lambda logits: {"logits": logits[:1], "other": logits.sum()}, r"other of shape \(\)"),
    "one number beside logits": (lambda logits: {"auxiliary": logits.mean(), "logits": logits}, None),
    "nested beside": (lambda logits: {"logits": logits.mean(dim=0), "states": (logits,)}, None),
}


@pytest.mark.parametrize("kind", REDUCED)
def test_predictions_that_lose_the_batch_are_named_with_their_shape(tmp_path: Path, kind: str) -> None:
    reduce, told = REDUCED[kind]
    if told is None:
        assert "eval_loss" in measured(tmp_path, Reducing(reduce))
    else:
        with pytest.raises(ValueError, match=rf"{told}.*'labels' have 3 rows.*first dimension"):
            measured(tmp_path, Reducing(reduce))


def test_labels_of_another_length_than_the_predictions_are_refused(tmp_path: Path) -> None:
    def too_many_labels(samples: list[Any]) -> Any:
        x = torch.stack([sample["x"] for sample in samples])
        return {"x": x, "labels": torch.zeros(len(samples) + 2, dtype=torch.long)}

    with pytest.raises(ValueError, match=r"logits of shape \(3, 2\).*'labels' have 5 rows.*data collator"):
        measured(tmp_path, Reducing(lambda logits: {"logits": logits}), data_collator=too_many_labels)


def test_predictions_may_have_any_shape_if_the_script_shapes_them_or_measures_nothing(tmp_path: Path) -> None:
    def shapes(prediction: Any) -> dict[str, Any]:
        return {"shapes": [part.shape for part in prediction.predictions]}

    # Parts of the loss come as one number for each batch.
    parts = Reducing(lambda logits: {"cross_entropy": logits.mean(), "penalty": logits.abs().mean()})
    assert measured(tmp_path, parts, compute_metrics=shapes)["eval_shapes"] == [(3,), (3,)]
    model = Reducing(lambda logits: {"logits": logits.mean()})
    assert "eval_loss" in measured(tmp_path, model, preprocess_logits_for_metrics=lambda logits, labels: logits)
    assert "eval_loss" in measured(tmp_path, model, compute_metrics=None)
    output = quiet_trainer(tmp_path, model).predict(Rows(vector_rows(7)))
    assert output.predictions.shape == (3,)


def test_a_bare_tensor_keeps_its_rows_also_for_a_batch_of_one_sample(tmp_path: Path) -> None:
    model = nn.Linear(FEATURES, 2)
    model.forward = lambda x: nn.Linear.forward(model, x)  # type: ignore[method-assign]
    rows = [{"x": row["x"]} for row in vector_rows(7)]
    assert quiet_trainer(tmp_path, model).predict(Rows(rows)).predictions.shape == (7, 2)
