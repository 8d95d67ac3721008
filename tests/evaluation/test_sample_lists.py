"""Lists with an entry for each sample as labels and predictions, as in object detection."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
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


# ---- Models and collators of transformers' vision examples -----------------------------------------------------------


SIZE = 64
IMAGES = 5


def tiny_yolos() -> Any:
    settings = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.YolosConfig(image_size=[SIZE, SIZE], num_detection_tokens=4, num_labels=3, **settings)
    return transformers.YolosForObjectDetection(config)


def tiny_maskformer() -> Any:
    backbone = transformers.SwinConfig(
        image_size=SIZE, patch_size=4, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 1, 1], window_size=2,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    decoder = transformers.DetrConfig(
        d_model=16, num_queries=4, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16,
        encoder_attention_heads=2, decoder_attention_heads=2,
    )  # fmt: skip
    config = transformers.MaskFormerConfig(
        backbone_config=backbone, decoder_config=decoder, fpn_feature_size=32, mask_feature_size=32, num_labels=3
    )
    return transformers.MaskFormerForInstanceSegmentation(config)


def make_detections() -> list[Any]:
    boxes = torch.tensor([[0.5, 0.5, 0.25, 0.25]])
    return [
        {
            "pixel_values": torch.randn(3, SIZE, SIZE),
            "labels": transformers.BatchFeature(
                {
                    "class_labels": torch.arange(1 + number % 2),
                    "boxes": boxes.repeat(1 + number % 2, 1),
                    "image_id": torch.tensor([number]),
                    "orig_size": torch.tensor([SIZE, SIZE + number]),
                }
            ),
        }
        for number in range(IMAGES)
    ]


def make_segments() -> list[Any]:
    return [
        {
            "pixel_values": torch.randn(3, SIZE, SIZE),
            "class_labels": torch.arange(1 + number % 2),
            "mask_labels": torch.full((1 + number % 2, SIZE, SIZE), float(number % 2)),
        }
        for number in range(IMAGES)
    ]


def collate_images(rows: list[Any]) -> dict[str, Any]:
    lists = {name: [row[name] for row in rows] for name in rows[0] if name != "pixel_values"}
    return {"pixel_values": torch.stack([row["pixel_values"] for row in rows]), **lists}


def collate_labels_first(rows: list[Any]) -> dict[str, Any]:
    return dict(reversed(collate_images(rows).items()))


def collate_tuples(rows: list[Any]) -> dict[str, Any]:
    batch = collate_labels_first(rows)
    return {name: tuple(value) if isinstance(value[0], Mapping) else value for name, value in batch.items()}


@pytest.mark.parametrize("collate", [collate_images, collate_labels_first, collate_tuples])
@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_labels_of_detection_and_segmentation_have_an_entry_for_each_image(
    tmp_path: Path, collate: Any, batch_size: int
) -> None:
    torch.manual_seed(0)
    settings: Any = {"per_device_eval_batch_size": batch_size, "remove_unused_columns": False}
    keywords: dict[str, Any] = {"data_collator": collate, "compute_metrics": lambda _: {}}
    rows = make_detections()
    output: Any = quiet_trainer(tmp_path, tiny_yolos(), trainer_kwargs=keywords, **settings).predict(Rows(rows))
    assert [label["image_id"].tolist() for label in output.label_ids] == [[number] for number in range(IMAGES)]
    assert [len(label["boxes"]) for label in output.label_ids] == [1, 2, 1, 2, 1]
    assert all(len(predictions) == IMAGES for predictions in output.predictions if isinstance(predictions, np.ndarray))

    rows = make_segments()
    output = quiet_trainer(tmp_path, tiny_maskformer(), trainer_kwargs=keywords, **settings).predict(Rows(rows))
    masks, classes = output.label_ids
    assert [mask.shape for mask in masks] == [(1 + number % 2, SIZE, SIZE) for number in range(IMAGES)]
    assert [mask.max() for mask in masks] == [0, 1, 0, 1, 0]
    assert [labels.tolist() for labels in classes] == [list(range(1 + number % 2)) for number in range(IMAGES)]


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
