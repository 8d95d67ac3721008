"""The two sides of a comparison: transformers' own Trainer, and ours in either optimization mode."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.fidelity.record import Record, build_record, watching_callback

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
    "use_cpu": True,
}


class Side:
    """Where a scenario takes its names from: `side.Trainer`, `side.TrainingArguments` and every other public name.

    Parameters:
        name: `ORACLE` or `OURS`, the module the names come from.
        mode: "automatic" hands out the plain Trainer. "manual" hands out a subclass with an own training_step that
            only calls its parent's, which makes our engine run under Lightning's manual optimization.
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
        return self._in_mode(self.names.Trainer)

    @property
    def Seq2SeqTrainer(self) -> Any:
        """The side's Seq2SeqTrainer class."""
        return self._in_mode(self.names.Seq2SeqTrainer)

    @property
    def ExportableState(self) -> Any:
        """The side's ExportableState, which transformers has in the module of its callbacks."""
        return importlib.import_module("transformers.trainer_callback" if self.name == ORACLE else OURS).ExportableState

    def _in_mode(self, Base: Any) -> Any:
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
