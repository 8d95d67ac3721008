"""Lists with an entry for each sample as labels and predictions, as in object detection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from littrainer import Trainer
from tests.scenarios.data import Rows
from tests.scenarios.trainers import quiet_trainer


class Detector(nn.Module):
    """Model that returns boxes for each sample, or features for each of four layers."""

    def __init__(self, returns_layers: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.returns_layers = returns_layers

    def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
        detections = [{"boxes": label["boxes"] * self.scale} for label in labels]
        layers = [x * self.scale + number for number in range(4)]
        return {"loss": x.mean() * self.scale.sum(), "outputs": layers if self.returns_layers else detections}


def detections(number: int) -> list[Any]:
    return [
        {"x": torch.full((2,), float(n)), "labels": {"boxes": torch.full((n % 3, 4), float(n))}} for n in range(number)
    ]


def collate_lists(rows: list[Any]) -> Any:
    return {"x": torch.stack([row["x"] for row in rows]), "labels": [row["labels"] for row in rows]}


def make_trainer(folder: Path, model: Any, **changes: Any) -> Trainer:
    settings = {"per_device_eval_batch_size": 4, "remove_unused_columns": False, **changes}
    keywords = {
        "data_collator": collate_lists,
        "compute_metrics": lambda prediction: {"labels": len(prediction.label_ids)},
    }
    return quiet_trainer(folder, model, trainer_kwargs=keywords, **settings)


@pytest.mark.parametrize("number", [3, 8, 9, 10])
def test_lists_of_samples_are_concatenated(tmp_path: Path, number: int) -> None:
    rows = detections(number)
    trainer = make_trainer(tmp_path, Detector())
    output: Any = trainer.predict(Rows(rows))
    for entries in (output.label_ids, output.predictions):
        assert [len(entry["boxes"]) for entry in entries] == [n % 3 for n in range(number)]
        assert all((entry["boxes"] == n).all() for n, entry in enumerate(entries))
        assert isinstance(entries[0]["boxes"], np.ndarray)
    assert trainer.evaluate(Rows(rows))["eval_labels"] == number


def test_a_list_with_an_entry_for_each_layer_is_joined_along_the_rows(tmp_path: Path) -> None:
    output: Any = make_trainer(tmp_path, Detector(returns_layers=True)).predict(Rows(detections(9)))
    assert [layer.tolist() for layer in output.predictions] == [[[n + k] * 2 for n in range(9)] for k in range(4)]
    assert len(output.label_ids) == 9


def test_outputs_that_cannot_be_joined_are_refused_immediately(tmp_path: Path) -> None:
    steps: list[int] = []

    class Uneven(Detector):
        """Model with other outputs for a short batch."""

        def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
            steps.append(len(x))
            loss = super().forward(x, labels)["loss"]
            parts: Any = (x,) * len(x)
            return {"loss": loss, "outputs": {"parts": parts, "names": parts if len(x) == 4 else "text"}}

    with pytest.raises(ValueError, match=r"tuple with the entries 4, and with 1.*eval_do_concat_batches=False"):
        make_trainer(tmp_path, Uneven()).predict(Rows(detections(5)))
    assert steps == [4, 1]
    separate: Any = make_trainer(tmp_path, Uneven(), eval_do_concat_batches=False).predict(Rows(detections(5)))
    assert len(separate.predictions) == 2
