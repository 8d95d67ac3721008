from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from torch.utils.data import DataLoader

from littrainer.loop.plan import plan_training
from tests.scenarios.data import Rows, SizedStream, Stream, vector_rows
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import quiet_arguments, quiet_trainer

# Rows, accumulation, epochs, max_steps.
SIZES = [
    (18, 1, 3, -1),
    (18, 2, 3, -1),
    (18, 3, 2, -1),
    (18, 9, 2, -1),
    (16, 4, 1, -1),
    (18, 1, 0.5, -1),
    (18, 2, 1.25, -1),
    (18, 2, 2.0, -1),
    (1, 1, 1, -1),
    (18, 1, 3, 7),
    (18, 2, 3, 3),
    (18, 2, 3, 4),
    (18, 2, 3, 1),
]


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A Trainer of ours and one of transformers', both with 4 samples per micro-batch."""
    folder = tmp_path_factory.mktemp("plan")
    theirs = transformers.Trainer(
        model=VectorClassifier(), args=quiet_arguments(folder, transformers.TrainingArguments)
    )
    return quiet_trainer(folder), theirs


def plans(trainers: tuple[Any, Any], loader: Any, accumulation: int, epochs: float, max_steps: int) -> list[Any]:
    results = []
    for trainer in trainers:
        trainer.args.gradient_accumulation_steps = accumulation
        trainer.args.num_train_epochs, trainer.args.max_steps = epochs, max_steps
        results.append(tuple(trainer.set_initial_training_values(trainer.args, loader)))
    return results


@pytest.mark.parametrize(("rows", "accumulation", "epochs", "max_steps"), SIZES)
@pytest.mark.parametrize("kind", [Rows, SizedStream])
def test_a_training_is_as_long_as_in_transformers(
    trainers: tuple[Any, Any], kind: Any, rows: int, accumulation: int, epochs: float, max_steps: int
) -> None:
    loader: Any = DataLoader(kind(vector_rows(rows)), batch_size=4)
    ours, theirs = plans(trainers, loader, accumulation, epochs, max_steps)
    assert ours == theirs


@pytest.mark.parametrize(("accumulation", "max_steps"), [(1, 5), (3, 4)])
def test_a_stream_is_planned_as_in_transformers(trainers: tuple[Any, Any], accumulation: int, max_steps: int) -> None:
    loader: Any = DataLoader(Stream(vector_rows(4)), batch_size=4)
    ours, theirs = plans(trainers, loader, accumulation, 3, max_steps)
    assert ours == theirs


def test_a_stream_without_max_steps_has_no_length(trainers: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="max_steps"):
        plans(trainers[:1], DataLoader(Stream([])), 1, 3, -1)


def test_fewer_samples_than_a_batch_are_named_as_the_reason_where_incomplete_batches_are_dropped(
    tmp_path: Path,
) -> None:
    trainer = quiet_trainer(tmp_path, rows=3, dataloader_drop_last=True)
    with pytest.raises(ValueError, match=r"3 samples.*batch of 4.*dataloader_drop_last=True"):
        trainer.train()
    assert not trainer.is_in_train


def test_an_empty_custom_loader_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="empty"):
        plan_training(quiet_trainer(tmp_path), [], 8, len)


# Epochs, max_steps, surplus steps, and the epochs and steps after a resume; an epoch has five steps.
SURPLUS = [(3, -1, 2, 3, 17), (1.5, -1, -3, 2, 5), (3, 12, 4, 2, 12), (3, 12, -4, 4, 12), (3, 12, 0, 3, 12)]


@pytest.mark.parametrize(("epochs", "max_steps", "surplus_steps", "new_epochs", "new_steps"), SURPLUS)
def test_a_plan_includes_surplus_steps(
    trainers: tuple[Any, Any], epochs: float, max_steps: int, surplus_steps: int, new_epochs: int, new_steps: int
) -> None:
    trainer, _ = trainers
    loader: Any = DataLoader(Rows(vector_rows(18)), batch_size=4)
    plans(trainers, loader, 1, epochs, max_steps)
    plan = trainer.set_initial_training_values(trainer.args, loader).add_surplus_steps(surplus_steps, trainer.args)
    assert (plan.num_train_epochs, plan.max_steps) == (new_epochs, new_steps)
