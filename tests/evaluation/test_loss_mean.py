from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from littrainer import Trainer
from tests.evaluation.test_loop import LossesOf
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, language_rows, vector_rows
from tests.scenarios.models import VectorClassifier, tiny_gpt2
from tests.scenarios.trainers import quiet_trainer

UNEQUAL = [[0, 1, 2, 3], [4], [5, 6]]


def evaluate_in_batches(trainer: Trainer, rows: list[Any], batches: list[list[int]], collate: Any = None) -> float:
    loader = DataLoader(Rows(rows), batch_sampler=batches, collate_fn=collate)  # type: ignore[arg-type]
    trainer.get_eval_dataloader = lambda *_: loader  # type: ignore[method-assign]
    return trainer.evaluate()["eval_loss"]


def compute_full_loss(trainer: Trainer, rows: list[Any]) -> float:
    x, labels = torch.stack([row["x"] for row in rows]), torch.tensor([row["labels"] for row in rows])
    with torch.no_grad():
        return float(trainer.model.eval()(x, labels)["loss"])


@pytest.mark.parametrize("weighting", ["samples", "labels"])
def test_the_mean_does_not_depend_on_batch_sizes(tmp_path: Path, weighting: str) -> None:
    rows = vector_rows(7, seed=1)
    trainer = quiet_trainer(tmp_path, eval_loss_weighting=weighting)
    full_loss = compute_full_loss(trainer, rows)
    assert evaluate_in_batches(trainer, rows, UNEQUAL) == pytest.approx(full_loss, rel=1e-6)
    assert evaluate_in_batches(trainer, rows, [[0], [1, 2, 3, 4, 5, 6]]) == pytest.approx(full_loss, rel=1e-6)
    by_batches = quiet_trainer(tmp_path, trainer.model)
    assert evaluate_in_batches(by_batches, rows, UNEQUAL) != pytest.approx(full_loss, rel=1e-4)


def test_weighted_by_labels_the_loss_of_a_language_model_is_the_mean_over_tokens(tmp_path: Path) -> None:
    rows = [{**row, "labels": [-100, *row["labels"][1:]]} for row in language_rows(7, seed=1)]
    torch.manual_seed(0)
    model = tiny_gpt2()
    keywords = {"data_collator": pad_tokens, "train_dataset": Rows(rows), "eval_dataset": Rows(rows)}
    arguments: Any = {"eval_on_start": True, "learning_rate": 0.0}
    losses = {}
    for weighting in ("samples", "labels"):
        trainer = quiet_trainer(tmp_path, model, trainer_kwargs=keywords, eval_loss_weighting=weighting, **arguments)
        trainer.train()
        losses[weighting] = trainer.state.log_history[0]["eval_loss"]
    batch = pad_tokens(rows)
    with torch.no_grad():
        logits = model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    per_token = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    assert losses["labels"] == pytest.approx(float(per_token), rel=1e-5)
    assert losses["samples"] != pytest.approx(float(per_token), rel=1e-4)


@pytest.mark.parametrize(
    ("weighting", "losses", "filtered", "mean"),
    [
        ("samples", [1.0, 8.0, 2.0], True, (4 * 1 + 8 + 2 * 2) / 7),
        ("samples", [1.0, math.nan, 2.0], True, (4 * 1 + 2 * 2) / 6),
        ("samples", [1.0, math.inf, 2.0], False, math.inf),
        ("samples", [math.nan, math.nan, math.nan], True, math.nan),
        # The default: seven rows in batches of three.
        ("batches", [1.0, math.nan, 4.0], True, 1.75),
        ("batches", [1.0, math.inf, 4.0], True, 1.75),
        ("batches", [math.nan, math.nan, math.nan], True, math.nan),
        ("batches", [1.0, math.inf, 4.0], False, math.inf),
    ],
)
def test_nonfinite_losses_are_filtered_by_logging_nan_inf_filter(
    tmp_path: Path, weighting: str, losses: list[float], filtered: bool, mean: float
) -> None:
    trainer = quiet_trainer(tmp_path, LossesOf(losses), eval_loss_weighting=weighting, logging_nan_inf_filter=filtered)
    by_batches = weighting == "batches"
    loss = trainer.evaluate()["eval_loss"] if by_batches else evaluate_in_batches(trainer, vector_rows(7), UNEQUAL)
    assert loss == pytest.approx(mean, rel=1e-6, nan_ok=True)


def test_a_batch_with_only_ignored_labels_has_no_weight(tmp_path: Path) -> None:
    rows = vector_rows(7, seed=1)
    rows[4]["labels"] = -100
    trainer = quiet_trainer(tmp_path, eval_loss_weighting="labels", logging_nan_inf_filter=False)
    full_loss = compute_full_loss(trainer, [row for row in rows if row["labels"] >= 0])
    assert evaluate_in_batches(trainer, rows, UNEQUAL) == pytest.approx(full_loss, rel=1e-6)
    rows = [{**row, "labels": -100} for row in rows]
    assert math.isnan(evaluate_in_batches(trainer, rows, UNEQUAL))


def test_uncountable_labels_are_weighted_by_samples(tmp_path: Path) -> None:
    class Listed(VectorClassifier):
        def forward(self, x: torch.Tensor, labels: list[int] | None = None) -> Any:
            return super().forward(x, torch.tensor(labels))

    def collate_with_listed_labels(rows: list[Any]) -> dict[str, Any]:
        return {"x": torch.stack([row["x"] for row in rows]), "labels": [row["labels"] for row in rows]}

    rows = vector_rows(7, seed=1)
    listed = quiet_trainer(tmp_path, Listed(), eval_loss_weighting="labels")
    listed.compute_metrics = None
    full_loss = compute_full_loss(listed, rows)
    assert evaluate_in_batches(listed, rows, UNEQUAL, collate_with_listed_labels) == pytest.approx(full_loss, rel=1e-6)
