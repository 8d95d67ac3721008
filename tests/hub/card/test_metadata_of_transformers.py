"""The same script leaves the metadata that transformers' Trainer leaves, but for our tag."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import transformers
from huggingface_hub import ModelCard

import littrainer
from tests.scenarios.data import token_rows
from tests.scenarios.models import tiny_bert_classifier
from tests.scenarios.trainers import quiet_arguments

SIDES = {"transformers": transformers, "littrainer": littrainer}


def metadata_of(side: str, folder: Path, given: dict[str, Any], base_model: str) -> dict[str, Any]:
    library = SIDES[side]
    rows = datasets.Dataset.from_list(token_rows(8, longest=3), split="validation")
    rows.info.builder_name, rows.info.config_name = "glue", "mrpc"
    model = tiny_bert_classifier()
    model.config._name_or_path = base_model
    args = quiet_arguments(
        folder / "my-model", library.TrainingArguments, max_steps=4, eval_strategy="steps", eval_steps=2
    )
    trainer = library.Trainer(
        model, args, train_dataset=rows, eval_dataset=rows, compute_metrics=lambda _: {"accuracy": 0.5, "fluency": 2.0}
    )
    trainer.train()
    trainer.create_model_card(**given)
    found: dict[str, Any] = ModelCard.load(folder / "my-model" / "README.md").data.to_dict()
    found["tags"] = [tag for tag in found["tags"] if tag != "littrainer"]
    return found


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"language": ["en", "de"], "license": "mit", "tags": ["mine"], "model_name": "name"},
        {"finetuned_from": "org/other", "tasks": "text-classification", "dataset_tags": "glue", "dataset": "GLUE"},
        {"dataset_tags": ["glue"], "dataset": ["GLUE MRPC"], "dataset_args": ["mrpc"], "tasks": ["fill-mask"]},
    ],
    ids=["nothing given", "entries", "one of each", "lists"],
)
def test_metadata_are_those_of_transformers(tmp_path: Path, given: dict[str, Any]) -> None:
    ours, theirs = (metadata_of(side, tmp_path / side, given, "org/base") for side in ("littrainer", "transformers"))
    assert ours == theirs


def test_another_dataset_that_is_named_does_not_get_the_configuration_of_the_one_at_hand(tmp_path: Path) -> None:
    given = {"dataset_tags": "imdb", "dataset": "IMDB"}
    ours, theirs = (metadata_of(side, tmp_path / side, given, "org/base") for side in ("littrainer", "transformers"))
    assert ours["model-index"][0]["results"][0]["dataset"] == {"name": "IMDB", "type": "imdb"}
    assert theirs["model-index"][0]["results"][0]["dataset"]["config"] == "mrpc"
