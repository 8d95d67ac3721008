"""One evaluation, as each side's users write it: the loss, and for classifiers accuracy over all logits."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate

from .jobs import Job, accuracy
from .sides import Side
from .trainings import Prepared, lightning_settings, trainer_arguments

BATCH_SIZE = 8


def prepared_evaluation(side: Side, job: Job, batches: int, folder: str) -> Prepared:
    """All that stands before an evaluation; calling it evaluates, and may be done again and again."""
    samples = job.samples(batches * BATCH_SIZE)
    if side.library == "torch":
        return raw_evaluation(job, samples)
    if side.library == "lightning":
        return lightning_evaluation(job, samples, folder)
    return trainer_evaluation(side.library, job, samples, folder)


def loader(samples: Any) -> DataLoader[Any]:
    return DataLoader(samples, batch_size=BATCH_SIZE, collate_fn=default_collate)


def share_of_right_ones(logits: list[torch.Tensor], labels: list[torch.Tensor]) -> float:
    return float(np.mean(torch.cat(logits).numpy().argmax(-1) == torch.cat(labels).numpy()))


def raw_evaluation(job: Job, samples: Any) -> Prepared:
    model, own_loader = job.model(), loader(samples)

    def evaluate() -> dict[str, float]:
        model.eval()
        losses, logits, labels = [], [], []
        with torch.no_grad():
            for batch in own_loader:
                found = model(**batch)
                losses.append(found["loss"])
                if job.classifies:
                    logits.append(found["logits"])
                    labels.append(batch["labels"])
        metrics = {"loss": float(torch.stack(losses).mean())}
        return {**metrics, "accuracy": share_of_right_ones(logits, labels)} if job.classifies else metrics

    return evaluate


def lightning_evaluation(job: Job, samples: Any, folder: str) -> Prepared:
    import lightning.pytorch as pl

    inner = job.model()

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = inner
            self.logits: list[torch.Tensor] = []
            self.labels: list[torch.Tensor] = []

        def validation_step(self, batch: dict[str, torch.Tensor], batch_index: int) -> None:
            found = self.model(**batch)
            self.log("loss", found["loss"], batch_size=BATCH_SIZE)
            if job.classifies:
                self.logits.append(found["logits"])
                self.labels.append(batch["labels"])

        def on_validation_epoch_end(self) -> None:
            if job.classifies:
                self.log("accuracy", share_of_right_ones(self.logits, self.labels))
                self.logits.clear()
                self.labels.clear()

    module, own_loader = Model(), loader(samples)
    trainer = pl.Trainer(**lightning_settings(folder))
    return lambda: trainer.validate(module, own_loader, verbose=False)


def trainer_evaluation(library: str, job: Job, samples: Any, folder: str) -> Prepared:
    names = importlib.import_module(library)
    arguments = trainer_arguments(
        names, folder, per_device_eval_batch_size=BATCH_SIZE, prediction_loss_only=not job.classifies
    )
    trainer = names.Trainer(
        model=job.model(),
        args=arguments,
        eval_dataset=samples,
        data_collator=default_collate,
        compute_metrics=accuracy if job.classifies else None,
    )
    return lambda: trainer.evaluate()
