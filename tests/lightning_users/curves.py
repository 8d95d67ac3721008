"""The same jobs in our Trainer and in a plain `lightning.Trainer`, and what there is to compare of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from littrainer import Trainer, TrainerDataModule, TransformersModule, set_seed
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Row, Rows, language_rows, token_rows
from tests.scenarios.metrics import accuracy
from tests.scenarios.models import tiny_bert_classifier, tiny_gpt2
from tests.scenarios.trainers import quiet_arguments

Data = Callable[["Job", dict[str, Any]], dict[str, Any]]

EPOCHS = 2
SEED = 11
# Six micro-batches of 4, the last of 2 rows: with 4 of them to an optimizer step, the second step has two.
ROWS = 22
MICRO_BATCHES = 6
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@dataclass(frozen=True)
class Job:
    """A model and what it is trained on.

    Parameters:
        model: makes it.
        make_rows: makes so many rows from a seed.
        rows: how many to train on.
    """

    model: Callable[[], Any]
    make_rows: Callable[[int, int], list[Row]]
    compute_metrics: Callable[[Any], dict[str, float]] | None = None
    rows: int = ROWS

    @property
    def training_rows(self) -> Rows:
        return Rows(self.make_rows(self.rows, 0))

    @property
    def evaluation_rows(self) -> Rows:
        return Rows(self.make_rows(7, 5))


JOBS = {
    "classifier": Job(tiny_bert_classifier, token_rows, accuracy),
    "language model": Job(tiny_gpt2, language_rows),
}


@dataclass
class Curve:
    """What a training showed of itself: one number for each optimizer step or evaluation, and the last weights."""

    losses: list[float] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    eval_losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    weights: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def numbers(self) -> torch.Tensor:
        """All of it in one row."""
        flat = [torch.tensor(values).flatten() for values in self.weights.values()]
        logged = [*self.losses, *self.learning_rates, *self.eval_losses, *self.accuracies]
        return torch.cat([torch.tensor(logged), *flat])


def weights_of(model: Any) -> dict[str, list[Any]]:
    return {name: value.tolist() for name, value in model.state_dict().items()}


# Warm-up, weight decay, and batches whose last one is short.
ARGUMENTS: dict[str, Any] = {
    "learning_rate": 0.02,
    "weight_decay": 0.1,
    "warmup_steps": 2,
    "lr_scheduler_type": "cosine",
    "seed": SEED,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 3,
}
# Some gradients are clipped, and some are not.
LARGEST_NORM = 0.6


def curve_of_our_trainer(folder: Path, job: Job, accumulation: int, **changes: Any) -> Curve:
    set_seed(0)
    running = {"num_train_epochs": EPOCHS, "gradient_accumulation_steps": accumulation, "max_grad_norm": LARGEST_NORM}
    showing = {"logging_strategy": "steps", "logging_steps": 1, "eval_strategy": "epoch"}
    trainer = Trainer(
        job.model(),
        quiet_arguments(folder, **{**running, **showing, **ARGUMENTS, **changes}),
        pad_tokens,
        job.training_rows,
        job.evaluation_rows,
        compute_metrics=job.compute_metrics,
    )
    trainer.train()

    def logged(name: str) -> list[float]:
        return [entry[name] for entry in trainer.state.log_history if name in entry]

    # Lightning keeps what is logged in single precision.
    accuracies = [torch.tensor(one).item() for one in logged("eval_accuracy")]
    return Curve(logged("loss"), logged("learning_rate"), logged("eval_loss"), accuracies, weights_of(trainer.model))


class Watches(pl.Callback):
    """Notes what a `lightning.Trainer` logs and does at each optimizer step and evaluation."""

    def __init__(self) -> None:
        self.curve = Curve()

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self.curve.learning_rates.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if len(self.curve.losses) < trainer.global_step:
            self.curve.losses.append(trainer.logged_metrics["train_loss"].item())

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.curve.eval_losses.append(trainer.callback_metrics["val_loss"].item())
            if "val_accuracy" in trainer.callback_metrics:
                self.curve.accuracies.append(trainer.callback_metrics["val_accuracy"].item())

    def on_fit_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.curve.weights = weights_of(pl_module.model)


def curve_of_lightning(job: Job, accumulation: int, data: Data, processes: int = 1, **changes: Any) -> Curve:
    """Train in a plain `lightning.Trainer`.

    Parameters:
        data: makes what `fit` reads.
        processes: train together, of which this is one.
        changes: arguments of the module, on top of `ARGUMENTS`.
    """
    set_seed(0)
    args = {**ARGUMENTS, **changes}
    module = TransformersModule(job.model(), args, compute_metrics=job.compute_metrics)
    watches = Watches()
    running: dict[str, Any] = {"max_epochs": EPOCHS, "accumulate_grad_batches": accumulation, "log_every_n_steps": 1}
    where: dict[str, Any] = {"devices": processes, "strategy": "ddp" if processes > 1 else "auto"}
    trainer = pl.Trainer(**running, **where, **QUIET, gradient_clip_val=LARGEST_NORM, callbacks=[watches])
    # As a Trainer does when it is made, which is after its model.
    set_seed(SEED)
    trainer.fit(module, **data(job, args))
    return watches.curve


def data_module(job: Job, args: dict[str, Any]) -> dict[str, Any]:
    module = TrainerDataModule(job.training_rows, job.evaluation_rows, args=args, data_collator=pad_tokens)
    return {"datamodule": module}


def plain_loaders(job: Job, args: dict[str, Any]) -> dict[str, Any]:
    """What anybody would write; the rows come in their order, as `train_sampling_strategy="sequential"` has them."""
    make = partial(DataLoader, collate_fn=pad_tokens)
    return {
        "train_dataloaders": make(job.training_rows, batch_size=4),
        "val_dataloaders": make(job.evaluation_rows, batch_size=3),
    }
