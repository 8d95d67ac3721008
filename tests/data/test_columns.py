from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch.utils.data import default_collate

from littrainer import Trainer
from littrainer.data.columns import drop_extra_columns
from tests.scenarios.data import Rows, Stream, vector_rows
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import quiet_arguments, quiet_trainer


def table() -> Dataset:
    return Dataset.from_dict({"input_ids": [[1], [2]], "text": ["a", "b"], "labels": [0, 1], "id": [7, 8]})


def test_a_dataset_without_any_accepted_column_is_refused() -> None:
    with pytest.raises(ValueError, match=r"(?s)evaluation set.*Linear.*input_ids, text.*pixel_values") as caught:
        drop_extra_columns(table(), ["pixel_values"], torch.nn.Linear(1, 1), "Evaluation")
    assert "remove_unused_columns=False" in str(caught.value)


WEIGHTED = [{**row, "weight": 0.5, "text": "a"} for row in vector_rows(6)]
FORMS: dict[str, Callable[[], Any]] = {
    "rows": lambda: Rows(WEIGHTED),
    "stream": lambda: Stream(WEIGHTED),
    "datasets": lambda: Dataset.from_list([{**row, "x": row["x"].tolist()} for row in WEIGHTED]),
}


class WeightingTrainer(Trainer):
    """Trainer whose loss uses a column that forward does not accept."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs["weight"]
        return super().compute_loss(model, inputs, *args, **kwargs)


def weighing_collator(rows: list[dict[str, Any]]) -> Any:
    batch = default_collate([{**row, "x": torch.as_tensor(row["x"])} for row in rows])
    return {**batch, "labels": batch["labels"] * len([row["weight"] for row in rows])}


def stacking_collator(rows: list[dict[str, Any]]) -> Any:
    return default_collate([{**row, "x": torch.as_tensor(row["x"])} for row in rows])


# Form of the data, workers, call of the Trainer, and data named in the note.
CALLS: list[tuple[str, int, Callable[[Any], Any], str]] = [
    *((form, 0, lambda trainer: trainer.train(), "training set") for form in FORMS),
    *(("rows", workers, lambda trainer: trainer.evaluate(), "evaluation set") for workers in (0, 1)),
    ("datasets", 1, lambda trainer: trainer.evaluate(), "evaluation set"),
    ("rows", 0, lambda trainer: trainer.predict(trainer.eval_dataset), "test set"),
]


def make_trainer(
    folder: Path, data: Any, kind: type[Trainer] = Trainer, collator: Any = stacking_collator, **changes: Any
) -> Any:
    keywords = {"train_dataset": data, "eval_dataset": data, "data_collator": collator}
    return quiet_trainer(folder, kind=kind, trainer_kwargs=keywords, **{"max_steps": 1, **changes})


def find_column_notes(error: BaseException) -> list[str]:
    """Return the notes on columns."""
    return [note for note in getattr(error, "__notes__", []) if "remove_unused_columns" in note]


@pytest.mark.parametrize(("kind", "collator"), [(WeightingTrainer, stacking_collator), (Trainer, weighing_collator)])
@pytest.mark.parametrize(("form", "workers", "call", "location"), CALLS)
def test_a_missing_dropped_column_is_explained(
    tmp_path: Path, kind: type[Trainer], collator: Any, form: str, workers: int, call: Any, location: str
) -> None:
    with pytest.raises(KeyError) as caught:
        call(make_trainer(tmp_path, FORMS[form](), kind, collator, dataloader_num_workers=workers))
    assert workers or caught.value.args == ("weight",)
    (note,) = find_column_notes(caught.value)
    assert f"remove_unused_columns has left 'weight' out of the {location}: " in note
    assert "VectorClassifier.forward takes x, labels, label, label_ids, and the other" in note
    assert "were dropped (text, weight)" in note and "remove_unused_columns=False" in note


def test_an_argument_behind_kwargs_that_was_dropped_is_explained(tmp_path: Path) -> None:
    class Hiding(VectorClassifier):
        def forward(self, labels: Any = None, **inputs: Any) -> Any:
            return super().forward(labels=labels, **{name: inputs[name] for name in inputs if name == "x"})

    args = quiet_arguments(tmp_path, max_steps=1)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'") as caught:
        Trainer(Hiding(), args, train_dataset=Rows(vector_rows(4))).train()
    (note,) = find_column_notes(caught.value)
    assert "has left 'x' out of the training set: Hiding.forward takes labels, label, label_ids, and the other" in note


@pytest.mark.parametrize("missing", ["other", 7, ("weight",)])
def test_an_unrelated_error_gets_no_note(tmp_path: Path, missing: Any) -> None:
    def collator(rows: list[dict[str, Any]]) -> Any:
        raise KeyError(missing)

    with pytest.raises(KeyError) as caught:
        make_trainer(tmp_path, FORMS["rows"](), collator=collator).train()
    assert find_column_notes(caught.value) == []


@pytest.mark.parametrize("form", FORMS)
def test_signature_columns_names_the_columns_to_keep(tmp_path: Path, form: str) -> None:
    columns = ["x", "labels", "weight"]
    trainer = make_trainer(tmp_path, FORMS[form](), signature_columns=columns)
    for loader in (trainer.get_train_dataloader(), trainer.get_eval_dataloader()):
        assert sorted(next(iter(loader))) == sorted(columns)
    # An override of the method, as libraries have it, does not replace the argument.
    trainer._signature_columns = ["x"]
    assert trainer._get_signature_columns() == columns


def test_a_column_that_signature_columns_leaves_out_is_named_in_the_error(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, FORMS["rows"](), WeightingTrainer, signature_columns=["x", "labels"])
    with pytest.raises(KeyError) as caught:
        trainer.train()
    assert any("signature_columns=['x', 'labels'] has left 'weight' out" in note for note in caught.value.__notes__)


def test_signature_columns_with_unknown_or_useless_names_are_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, FORMS["datasets"](), signature_columns=["x", "labels", "wieght"])
    with pytest.raises(ValueError, match=r"names 'wieght', and the training set has no such column .*'weight'"):
        trainer.get_train_dataloader()
    # Data for evaluation may have fewer columns.
    assert sorted(next(iter(trainer.get_eval_dataloader()))) == ["labels", "x"]
    for changes in ({"signature_columns": []}, {"signature_columns": ["x"], "remove_unused_columns": False}):
        with pytest.raises(ValueError, match=r"signature_columns=.*leave it out"):
            quiet_arguments(tmp_path, **changes)
