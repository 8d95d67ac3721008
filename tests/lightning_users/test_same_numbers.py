"""A plain `lightning.Trainer` with a TransformersModule trains to the losses and weights of a Trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.lightning_users.curves import (
    EPOCHS,
    JOBS,
    MICRO_BATCHES,
    Curve,
    Job,
    data_module,
    plain_loaders,
    train_with_lightning,
    train_with_trainer,
)

each_job = pytest.mark.parametrize("job", JOBS.values(), ids=JOBS.keys())
# With 4, epochs have a window of four micro-batches and a window of two.
each_accumulation = pytest.mark.parametrize("accumulation", [1, 4])


def check_extent(curve: Curve, accumulation: int) -> None:
    """Check the numbers of optimizer steps and evaluations, and that the model has learned."""
    steps = EPOCHS * -(-MICRO_BATCHES // accumulation)
    assert len(curve.losses) == len(curve.learning_rates) == steps
    assert len(curve.eval_losses) == EPOCHS
    assert len(set(curve.losses)) == steps and len(set(curve.eval_losses)) == EPOCHS


@each_accumulation
@each_job
def test_with_the_trainers_data_numbers_are_equal_bit_for_bit(tmp_path: Path, job: Job, accumulation: int) -> None:
    ours = train_with_trainer(tmp_path, job, accumulation)
    check_extent(ours, accumulation)
    assert train_with_lightning(job, accumulation, data_module) == ours


def test_arguments_that_change_the_loss_change_it_as_in_a_trainer(tmp_path: Path) -> None:
    changes = {"label_smoothing_factor": 0.3, "neftune_noise_alpha": 50.0}
    job = JOBS["language model"]
    ours = train_with_trainer(tmp_path, job, 4, **changes)
    assert train_with_lightning(job, 4, data_module, **changes) == ours
    for name in changes:
        assert train_with_lightning(job, 4, data_module, **{**changes, name: 0}).losses != ours.losses


@each_accumulation
@each_job
def test_with_plain_loaders_numbers_are_equal_within_rounding(tmp_path: Path, job: Job, accumulation: int) -> None:
    # SGD depends on the scale of gradients, AdamW does not.
    sgd = {"optim": "sgd", "optim_args": "momentum=0.9", "learning_rate": 0.5}
    ours = train_with_trainer(tmp_path, job, accumulation, train_sampling_strategy="sequential", **sgd)
    check_extent(ours, accumulation)
    lightning = train_with_lightning(job, accumulation, plain_loaders, **sgd)
    check_extent(lightning, accumulation)
    torch.testing.assert_close(lightning.numbers, ours.numbers, rtol=1e-5, atol=1e-6)
