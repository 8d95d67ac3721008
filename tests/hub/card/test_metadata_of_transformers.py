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

SIDES = {"littrainer": littrainer, "transformers": transformers}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The same training under both sides."""
    found = []
    for side, library in SIDES.items():
        rows = datasets.Dataset.from_list(token_rows(8, longest=3), split="validation")
        rows.info.builder_name, rows.info.config_name = "glue", "mrpc"
        model = tiny_bert_classifier()
        model.config._name_or_path = "org/base"
        folder = tmp_path_factory.mktemp(side) / "my-model"
        trainer = library.Trainer(
            model,
            quiet_arguments(folder, library.TrainingArguments, max_steps=4, eval_strategy="steps", eval_steps=2),
            train_dataset=rows,
            eval_dataset=rows,
            compute_metrics=lambda _: {"accuracy": 0.5, "fluency": 2.0},
        )
        trainer.train()
        found.append(trainer)
    return found


def metadata_of(trainer: Any, given: dict[str, Any]) -> dict[str, Any]:
    card = Path(trainer.args.output_dir, "README.md")
    card.unlink(missing_ok=True)
    trainer.create_model_card(**given)
    found: dict[str, Any] = ModelCard.load(card).data.to_dict()
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
def test_metadata_are_those_of_transformers(trained: list[Any], given: dict[str, Any]) -> None:
    ours, theirs = (metadata_of(trainer, given) for trainer in trained)
    assert ours == theirs


def test_another_dataset_that_is_named_does_not_get_the_configuration_of_the_one_at_hand(
    trained: list[Any],
) -> None:
    given = {"dataset_tags": "imdb", "dataset": "IMDB"}
    ours, theirs = (metadata_of(trainer, given) for trainer in trained)
    assert ours["model-index"][0]["results"][0]["dataset"] == {"name": "IMDB", "type": "imdb"}
    assert theirs["model-index"][0]["results"][0]["dataset"]["config"] == "mrpc"
