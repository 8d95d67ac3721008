"""The two sides of a comparison: transformers' own Trainer, and ours in either optimization mode."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tests.fidelity.record import Record, build_record, watching_callback
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Row, Rows, vector_rows
from tests.scenarios.models import VectorClassifier

ORACLE = "transformers"
OURS = "littrainer"
MODES = ("automatic", "manual")

FOREIGN_MODULES = {
    ORACLE: ("littrainer", "lightning", "pytorch_lightning"),
    OURS: ("transformers.trainer",),
}
"""What a side's process must not have imported, since then it could have seen the other side."""

QUIET_RUN: dict[str, Any] = {
    "output_dir": "out",
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 3,
    "num_train_epochs": 2,
    "learning_rate": 0.01,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    # Runs on the CPU see no GPU; runs on a simulated GPU see it.
    "use_cpu": not torch.cuda.is_available(),
}


class Side:
    """The library under test: `side.Trainer`, `side.TrainingArguments` and every other public name.

    Parameters:
        name: `ORACLE` or `OURS`, the module the names come from.
        mode: "automatic" hands out the plain Trainer. "manual" hands out a subclass whose training_step
            only calls its parent's, which makes ours run under Lightning's manual optimization.
        folder: the run's working directory.
    """

    def __init__(self, name: str, mode: str, folder: Path) -> None:
        self.name = name
        self.mode = mode
        self.folder = folder
        self.names: ModuleType = importlib.import_module(name)
        self.watcher = watching_callback(self.names.TrainerCallback)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.names, name)

    @property
    def Trainer(self) -> Any:
        """The side's Trainer class."""
        return self._select_mode(self.names.Trainer)

    @property
    def Seq2SeqTrainer(self) -> Any:
        """The side's Seq2SeqTrainer class."""
        return self._select_mode(self.names.Seq2SeqTrainer)

    @property
    def ExportableState(self) -> Any:
        """The side's ExportableState, which transformers has in the module of its callbacks."""
        return importlib.import_module("transformers.trainer_callback" if self.name == ORACLE else OURS).ExportableState

    def _select_mode(self, Base: Any) -> Any:
        if self.mode == "automatic":
            return Base

        class StepwiseTrainer(Base):
            def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
                return super().training_step(model, inputs, num_items_in_batch)

        return StepwiseTrainer

    def arguments(self, **changes: Any) -> Any:
        """TrainingArguments of a short run that logs each step and saves nothing, with `changes` on top."""
        return self.names.TrainingArguments(**{**QUIET_RUN, **changes})

    def seq2seq_arguments(self, **changes: Any) -> Any:
        """Seq2SeqTrainingArguments of such a run."""
        return self.names.Seq2SeqTrainingArguments(**{**QUIET_RUN, **changes})

    def vector_trainer(
        self,
        model: Any = None,
        *,
        rows: int = 18,
        eval_rows: int = 7,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        kind: Any = None,
        compute_metrics: Any = None,
        callbacks: Iterable[Any] = (),
        trainer_kwargs: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> Any:
        """Return a Trainer that classifies vectors, with the watcher after its callbacks.

        Parameters:
            model: The model, by default a VectorClassifier.
            rows: Number of rows to train on, unless there is a `train_dataset`.
            eval_rows: Number of rows to evaluate on, unless there is an `eval_dataset`.
            kind: The class, by default the side's Trainer.
            trainer_kwargs: Further keywords of the Trainer.
            changes: Arguments.
        """
        return (kind or self.Trainer)(
            model=VectorClassifier() if model is None else model,
            args=self.arguments(**changes),
            train_dataset=Rows(vector_rows(rows)) if train_dataset is None else train_dataset,
            eval_dataset=Rows(vector_rows(eval_rows, seed=1)) if eval_dataset is None else eval_dataset,
            compute_metrics=compute_metrics,
            callbacks=[*callbacks, self.watcher],
            **(trainer_kwargs or {}),
        )

    def token_trainer(
        self,
        model: Any,
        make_rows: Callable[..., list[Row]],
        *,
        rows: int = 10,
        eval_rows: int = 5,
        trainer_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> Any:
        """Return such a Trainer over rows of tokens, which are padded; `others` are as in `vector_trainer`."""
        return self.vector_trainer(
            model,
            train_dataset=Rows(make_rows(rows)),
            eval_dataset=Rows(make_rows(eval_rows, seed=1)),
            trainer_kwargs={"data_collator": pad_tokens, **(trainer_kwargs or {})},
            **others,
        )

    def train(self, trainer: Any, **changes: Any) -> Record:
        """Train once and record it."""
        return self.record(trainer, trainer.train(), **changes)

    def record(
        self, trainer: Any, *outputs: Any, predictions: Any = None, extra: dict[str, Any] | None = None
    ) -> Record:
        """The record of a finished run.

        Parameters:
            trainer: The Trainer, after its last call.
            outputs: What its methods returned (TrainOutput, metrics), in order.
            predictions: What predict() returned.
            extra: Further values to compare.
        """
        return build_record(trainer, outputs, self.watcher, self.folder, predictions, extra or {})

    def foreign_modules(self) -> list[str]:
        """Modules of the other side that this process has imported; anything here makes the comparison void."""
        return [name for name in FOREIGN_MODULES[self.name] if name in sys.modules]
