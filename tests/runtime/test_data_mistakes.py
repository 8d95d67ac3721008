"""Errors for data whose labels or columns do not fit the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import LightningModule

from littrainer import Trainer
from tests.scenarios.data import Rows, tiny_tokenizer, vector_rows
from tests.scenarios.models import VectorClassifier, tiny_bert_classifier
from tests.scenarios.trainers import quiet_trainer

TOKENS = {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1]}
NUMBER_THEM = "dataset.class_encode_column("


def renamed(row: dict[str, Any], **names: str) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in row.items()}


# Situation -> a sample, and parts of the error.
MISTAKES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "label is text": ({**TOKENS, "label": "good"}, ["'label' is text ('good')", NUMBER_THEM]),
    "a text for each token": ({**TOKENS, "labels": ["B", "O"]}, ["'labels' is text ('B')", NUMBER_THEM]),
    "label is None": ({**TOKENS, "label": None}, ["'label' is None in the data"]),
    "labels go by another name": (
        {**TOKENS, "length": 3, "target": 1},
        [
            "takes input_ids, ",
            "the data has input_ids, attention_mask, length, target",
            "rename_column('target', 'labels')",
        ],
    ),
    "inputs go by another name": (
        renamed({**TOKENS, "label": 1}, input_ids="ids", attention_mask="mask"),
        ["takes input_ids, ", "the data has ids, mask, label", "rename_column('ids', 'input_ids')"],
    ),
    "all columns go by another name": (
        {"ids": [5], "mask": [1], "target": 1},
        ["none of the data's columns (ids, mask, target)", "takes (input_ids, attention_mask"],
    ),
    "texts were not tokenized": ({"text": "a text", "label": 1}, ["tokenize the dataset first"]),
    "no labels": (TOKENS, ["add labels to the dataset"]),
}


def catch_message(trainer: Trainer, method: str = "train") -> str:
    with pytest.raises((ValueError, TypeError)) as caught:
        getattr(trainer, method)()
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


@pytest.mark.parametrize("situation", MISTAKES)
def test_the_error_names_the_mistake_in_the_data_with_advice(tmp_path: Path, situation: str) -> None:
    row, parts = MISTAKES[situation]
    message = catch_message(
        quiet_trainer(tmp_path, tiny_bert_classifier(), trainer_kwargs={"train_dataset": Rows([row] * 4)})
    )
    assert [part for part in parts if part not in message] == []
    assert ("tokenize the dataset" in message) is (situation == "texts were not tokenized")


@pytest.mark.parametrize(
    ("row", "part"),
    [
        ({**TOKENS, "label": "good"}, "'label' is text ('good'), and labels have to be numbers"),
        ({**TOKENS, "labels": [0, 1, 1]}, "'labels' is a list, which DataCollatorWithPadding does not pad"),
        ({"text": "a text", "label": 1}, "The dataset has text, label, and no tokens: tokenize it first"),
    ],
    ids=["text labels", "labels of tokens", "not tokenized"],
)
def test_a_collator_that_pads_says_the_same(tmp_path: Path, row: dict[str, Any], part: str) -> None:
    longer = {name: [*value, value[-1]] if isinstance(value, list) else value for name, value in row.items()}
    kwargs = {"train_dataset": Rows([row, longer] * 4), "processing_class": tiny_tokenizer()}
    assert part in catch_message(quiet_trainer(tmp_path, tiny_bert_classifier(), trainer_kwargs=kwargs))


class Lit(LightningModule):
    """A LightningModule with a model, whose forward Lightning leaves to a subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.model = VectorClassifier()


def test_a_lightning_module_and_a_model_without_a_head_are_named(tmp_path: Path) -> None:
    message = catch_message(quiet_trainer(tmp_path, Lit()))
    assert "Lit is a LightningModule: train it with lightning.Trainer, or give the Trainer the model in it." in message
    model = tiny_bert_classifier().bert
    rows = Rows([{**TOKENS, "labels": 1}] * 4)
    message = catch_message(quiet_trainer(tmp_path, model, trainer_kwargs={"train_dataset": rows}))
    assert "BertModel has no head, and so no loss: load the class of a task, such as" in message


def test_a_best_metric_without_labels_names_them_as_the_reason(tmp_path: Path) -> None:
    rows = Rows([{"x": row["x"]} for row in vector_rows(4)])
    changes: dict[str, Any] = {"eval_strategy": "epoch", "metric_for_best_model": "f1"}
    with pytest.raises(KeyError, match="the eval_dataset seems to have no labels"):
        quiet_trainer(tmp_path, trainer_kwargs={"eval_dataset": rows}, **changes).train()


@pytest.mark.parametrize("method", ["train", "evaluate"])
def test_the_error_names_an_argument_of_a_custom_model_with_another_name_in_the_data(
    tmp_path: Path, method: str
) -> None:
    rows = Rows([renamed(row, x="features") for row in vector_rows(4)])
    message = catch_message(
        quiet_trainer(tmp_path, trainer_kwargs={"train_dataset": rows, "eval_dataset": rows}), method
    )
    assert "VectorClassifier.forward takes x, labels, " in message and "rename_column('features', 'x')" in message


def test_labels_missing_in_an_evaluation_are_searched_in_the_evaluation_data(tmp_path: Path) -> None:
    rows = [renamed(row, labels="target") for row in vector_rows(4)]
    trainer = quiet_trainer(tmp_path, trainer_kwargs={"eval_dataset": Rows(rows)}, label_names=["labels"])
    with pytest.raises(ValueError, match=r"rename_column\('target', 'labels'\)"):
        trainer.compute_loss(trainer.model.eval(), {"x": rows[0]["x"][None]})


def test_the_error_names_a_collator_that_drops_labels(tmp_path: Path) -> None:
    def forgetful(rows: list[Any]) -> Any:
        return {"x": rows[0]["x"][None]}

    assert "data_collator leaves out 'labels'" in catch_message(
        quiet_trainer(tmp_path, trainer_kwargs={"data_collator": forgetful})
    )
