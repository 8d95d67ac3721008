"""The killed run, as a plain Lightning program: `lightning.Trainer` with a ModelCheckpoint, then ckpt_path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader


class Module(lightning.LightningModule):
    """A model whose forward returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.model(**batch)["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=5e-5)


class Checkpoints(ModelCheckpoint):
    """Names its files as the folders of a Trainer are named, and reports each that is complete."""

    FILE_EXTENSION = ""

    def __init__(self, report: Callable[[int], object], **keywords: Any) -> None:
        super().__init__(filename="checkpoint-{step}", auto_insert_metric_name=False, **keywords)
        self.report = report

    def _save_checkpoint(self, trainer: lightning.Trainer, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        self.report(trainer.global_step)


def train(
    model: nn.Module,
    samples: list[dict[str, torch.Tensor]],
    folder: Path,
    report: Callable[[int], object],
    *,
    steps: int,
    save_steps: int,
    kept: int,
) -> None:
    """Train `model` for `steps` optimizer steps, from the newest checkpoint in `folder` where there is one."""
    saving = Checkpoints(
        report, dirpath=folder, every_n_train_steps=save_steps, monitor="step", mode="max", save_top_k=kept
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=steps,
        callbacks=[saving],
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    found = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    loader = DataLoader(samples, batch_size=4, shuffle=True)  # type: ignore[arg-type]
    trainer.fit(Module(model), loader, ckpt_path=found[-1] if found else None)
