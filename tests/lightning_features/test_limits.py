"""`limit_*_batches` and `overfit_batches`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from littrainer import Trainer
from tests.scenarios.data import Rows, Stream, vector_rows
from tests.scenarios.metrics import accuracy
from tests.scenarios.trainers import StepwiseTrainer, quiet_trainer

IN_ORDER: dict[str, Any] = {"train_sampling_strategy": "sequential", "num_train_epochs": 2}
LIMIT = "limit_train_batches"
EACH_STEP: dict[str, Any] = {"logging_strategy": "steps", "logging_steps": 1}


def losses(trainer: Trainer, name: str = "loss") -> list[tuple[float, float]]:
    return [(entry["epoch"], entry[name]) for entry in trainer.state.log_history if name in entry]


def make_limited_trainer(folder: Path, number: int, **changes: Any) -> Trainer:
    return quiet_trainer(
        folder, trainer_kwargs={"train_dataset": Rows(vector_rows(20)[:number])}, **{**EACH_STEP, **changes}
    )


@pytest.mark.parametrize(("kind", "limit"), [(Trainer, 3), (StepwiseTrainer, 0.65)])
def test_a_limited_epoch_is_an_epoch_of_less_data(tmp_path: Path, kind: type[Trainer], limit: float) -> None:
    changes = {**IN_ORDER, "gradient_accumulation_steps": 2, "kind": kind}
    short = make_limited_trainer(tmp_path, 12, **changes)
    limited = make_limited_trainer(tmp_path, 20, **changes, lightning={LIMIT: limit})
    outputs = [trainer.train() for trainer in (short, limited)]
    assert losses(limited) == losses(short) and [output.global_step for output in outputs] == [4, 4]
    plan, expected = (trainer.training_run.plan for trainer in (limited, short))  # type: ignore[union-attr]
    assert plan == expected


def test_a_limited_epoch_resumes_at_its_position(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"lightning": {"limit_train_batches": 3}, "num_train_epochs": 3, **EACH_STEP}
    saving = {"save_strategy": "steps", "save_steps": 4, "save_total_limit": None}
    uninterrupted = quiet_trainer(tmp_path, rows=20, **changes, **saving)
    uninterrupted.train()
    resumed = quiet_trainer(tmp_path, rows=20, **changes, **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert losses(resumed) == losses(uninterrupted) and len(losses(uninterrupted)) == 9


def test_a_limited_stream_is_read_from_the_beginning_in_each_epoch(tmp_path: Path) -> None:
    stream = quiet_trainer(
        tmp_path,
        trainer_kwargs={"train_dataset": Stream(vector_rows(20))},
        max_steps=5,
        lightning={"limit_train_batches": 2},
        lr_scheduler_type="constant",
        learning_rate=1e-12,
        **EACH_STEP,
    )
    stream.train()
    values = [loss for _, loss in losses(stream)]
    assert values[0] == pytest.approx(values[2]) == pytest.approx(values[4]) and values[0] != pytest.approx(values[1])


@pytest.mark.parametrize("limit", [2, 0.7])
def test_a_limited_evaluation_uses_the_first_samples(tmp_path: Path, limit: float) -> None:
    rows = vector_rows(7, seed=1)
    options = {"compute_metrics": accuracy}
    limited = quiet_trainer(
        tmp_path, trainer_kwargs=options, lightning={"limit_val_batches": limit}, eval_strategy="epoch", max_steps=2
    )
    limited.train()
    metrics = limited.evaluate()
    output = limited.evaluation_loop(limited.get_eval_dataloader(), "Evaluation")
    limited.args.lightning = None
    short = limited.evaluate(Rows(rows[:6]))
    assert {name: short[name] for name in ("eval_loss", "eval_accuracy")} == {
        name: metrics[name] for name in ("eval_loss", "eval_accuracy")
    }
    assert metrics["eval_loss"] == losses(limited, "eval_loss")[0][1]
    assert output.num_samples == 6 and len(output.predictions) == 6


@pytest.mark.parametrize(
    ("limits", "samples"),
    [
        ({"limit_test_batches": 2}, 6),
        ({"limit_predict_batches": 1}, 3),
        ({"limit_test_batches": 2, "limit_predict_batches": 0.4}, 3),
        ({"limit_val_batches": 1}, 7),
        ({"limit_test_batches": 1.0}, 7),
        ({"limit_predict_batches": 50}, 7),
    ],
)
def test_a_prediction_stops_at_the_smaller_limit(tmp_path: Path, limits: dict[str, float], samples: int) -> None:
    trainer = quiet_trainer(tmp_path, lightning=limits)
    predicted = trainer.predict(trainer.eval_dataset)
    assert len(predicted.predictions) == len(predicted.label_ids) == samples  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"limit_train_batches": 2.5}, "'limit_train_batches': 2.5} is neither"),
        ({"limit_val_batches": -1}, "neither a whole number"),
        ({"limit_predict_batches": True}, "neither a whole number"),
        ({"limit_train_batches": 0}, r"leaves nothing for training: leave train\(\) out"),
        ({"limit_val_batches": 0.0}, 'set eval_strategy="no"'),
        ({"overfit_batches": 1.5}, "'overfit_batches': 1.5}"),
        ({"fast_dev_run": -1}, "no number of batches"),
        ({"fast_dev_run": "yes"}, "no number of batches"),
    ],
)
def test_an_invalid_limit_is_refused_by_the_constructor(tmp_path: Path, keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quiet_trainer(tmp_path, lightning=keywords)


def test_a_fraction_below_a_batch_or_of_unknown_length_is_an_error(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, rows=20, lightning={"limit_train_batches": 0.1}, max_steps=1)
    with pytest.raises(ValueError, match=r"0.1} of 5 batches is less than one: give at least 0.2"):
        trainer.train()
    stream = {"train_dataset": Stream(vector_rows(8))}
    trainer = quiet_trainer(tmp_path, trainer_kwargs=stream, lightning={"limit_train_batches": 0.5}, max_steps=1)
    with pytest.raises(ValueError, match="length is not known: give a number of batches"):
        trainer.train()


# ---- Overfitting -----------------------------------------------------------------------------------------------------


def test_overfitting_uses_the_same_batches_in_each_epoch_and_in_evaluations(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"lr_scheduler_type": "constant", "learning_rate": 1e-12, **EACH_STEP}
    trainer = quiet_trainer(
        tmp_path, rows=20, lightning={"overfit_batches": 2}, num_train_epochs=3, eval_strategy="epoch", **settings
    )
    trainer.train()
    values = [loss for _, loss in losses(trainer)]
    first = make_limited_trainer(tmp_path, 8, train_sampling_strategy="sequential", num_train_epochs=1, **settings)
    first.train()
    assert values == pytest.approx([loss for _, loss in losses(first)] * 3) and values[0] != pytest.approx(values[1])
    assert losses(trainer, "eval_loss")[0][1] == pytest.approx(
        trainer.evaluate(Rows(vector_rows(7, seed=1)[:6]))["eval_loss"]
    )


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_overridden_loader_must_not_shuffle(tmp_path: Path, shuffle: bool) -> None:
    class LoaderTrainer(Trainer):
        def get_train_dataloader(self) -> Any:
            rows = [{"x": row["x"], "labels": torch.tensor(row["labels"])} for row in vector_rows(12)]
            return DataLoader(Rows(rows), batch_size=4, shuffle=shuffle)

    trainer = quiet_trainer(tmp_path, kind=LoaderTrainer, lightning={"overfit_batches": 2}, num_train_epochs=1)
    if shuffle:
        with pytest.raises(ValueError, match=r"draws another order for each \(RandomSampler\): .* shuffle=False"):
            trainer.train()
    else:
        assert trainer.train().global_step == 2
