"""The same jobs in a Trainer and in a plain `lightning.Trainer`, and their curves."""

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
# Six micro-batches of up to 4 rows: with 4 micro-batches per optimizer step, the second step has two.
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
    """A model and its data.

    Parameters:
        make_rows: returns a number of rows from a seed.
        rows: number of training rows.
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
    """The numbers of each optimizer step and evaluation, and the last weights."""

    losses: list[float] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    eval_losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    weights: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def numbers(self) -> torch.Tensor:
        """All numbers in a vector."""
        flat = [torch.tensor(values).flatten() for values in self.weights.values()]
        logged = [*self.losses, *self.learning_rates, *self.eval_losses, *self.accuracies]
        return torch.cat([torch.tensor(logged), *flat])


def get_weights(model: Any) -> dict[str, list[Any]]:
    return {name: value.tolist() for name, value in model.state_dict().items()}


# With warm-up, weight decay, and a short last batch.
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
MAX_NORM = 0.6


def train_with_trainer(folder: Path, job: Job, accumulation: int, **changes: Any) -> Curve:
    set_seed(0)
    running = {"num_train_epochs": EPOCHS, "gradient_accumulation_steps": accumulation, "max_grad_norm": MAX_NORM}
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

    def get_logged(name: str) -> list[float]:
        return [entry[name] for entry in trainer.state.log_history if name in entry]

    # Lightning's logs have single precision.
    accuracies = [torch.tensor(value).item() for value in get_logged("eval_accuracy")]
    return Curve(
        get_logged("loss"), get_logged("learning_rate"), get_logged("eval_loss"), accuracies, get_weights(trainer.model)
    )


class CurveRecorder(pl.Callback):
    """A callback that records a curve."""

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
        self.curve.weights = get_weights(pl_module.model)


def train_with_lightning(job: Job, accumulation: int, data: Data, processes: int = 1, **changes: Any) -> Curve:
    """Train in a plain `lightning.Trainer`.

    Parameters:
        data: returns the data keywords of `fit`.
        changes: arguments of the module, in addition to `ARGUMENTS`.
    """
    set_seed(0)
    args = {**ARGUMENTS, **changes}
    module = TransformersModule(job.model(), args, compute_metrics=job.compute_metrics)
    recorder = CurveRecorder()
    running: dict[str, Any] = {"max_epochs": EPOCHS, "accumulate_grad_batches": accumulation, "log_every_n_steps": 1}
    devices: dict[str, Any] = {"devices": processes, "strategy": "ddp" if processes > 1 else "auto"}
    trainer = pl.Trainer(**running, **devices, **QUIET, gradient_clip_val=MAX_NORM, callbacks=[recorder])
    # As in a Trainer's constructor.
    set_seed(SEED)
    trainer.fit(module, **data(job, args))
    return recorder.curve


def data_module(job: Job, args: dict[str, Any]) -> dict[str, Any]:
    module = TrainerDataModule(job.training_rows, job.evaluation_rows, args=args, data_collator=pad_tokens)
    return {"datamodule": module}


def plain_loaders(job: Job, args: dict[str, Any]) -> dict[str, Any]:
    """Return plain loaders, in the order of `train_sampling_strategy="sequential"`."""
    make = partial(DataLoader, collate_fn=pad_tokens)
    return {
        "train_dataloaders": make(job.training_rows, batch_size=4),
        "val_dataloaders": make(job.evaluation_rows, batch_size=3),
    }
