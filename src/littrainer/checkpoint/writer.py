"""The files of a checkpoint in transformers' directory format, written at once or from copies in a thread."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from littrainer.checkpoint.atomic_write import rewrite_staging_paths
from littrainer.checkpoint.checksums import MIN_LARGE_FILE_BYTES, ManifestBuilder
from littrainer.checkpoint.layout import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from littrainer.checkpoint.run_record import write_arguments
from littrainer.checkpoint.weights import can_write_copied_weights, write_weights

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments

logger = logging.getLogger(__name__)
logger.addFilter(rewrite_staging_paths)


class StagedCheckpoint:
    """The files of a checkpoint, or of any other folder, as the Trainer's methods write them.

    Parameters:
        folder: the folder in which they are written.
        manifest: gets each file as soon as it is complete; None if another process or nobody lists them.

    Attributes:
        is_deferred: only collect what `write_deferred` writes.
        defers_shards: likewise for the parts that all processes write together.
        deferred: values to write, which refer to tensors that training changes, each with the function that writes it.
        parts: what all processes write together, by the folder's name.
    """

    def __init__(self, folder: Path, manifest: ManifestBuilder | None = None) -> None:
        self.folder, self.manifest = folder, manifest
        self.is_deferred = self.defers_shards = False
        self.deferred: list[tuple[Any, Callable[[Any], object]]] = []
        self.parts: dict[str, Any] = {}

    def write_model(self, model: nn.Module, state_dict: dict[str, Any] | None = None) -> None:
        """Write weights and configuration, loadable with `from_pretrained`.

        Parameters:
            state_dict: weights to write; the model's own by default.
        """
        logger.info(f"Saving model checkpoint to {self.folder}")
        if self.is_deferred and can_write_copied_weights(model):
            weights = model.state_dict() if state_dict is None else state_dict
            self.deferred.append((weights, functools.partial(self._write_weights, model)))
        else:
            self._write_weights(model, state_dict)

    def write_objects(self, objects: dict[str, Any]) -> None:
        """Write objects with torch.save, by file name."""
        self._write(objects, self._write_objects)

    def write_trainer_state(self, text: str) -> None:
        """Write trainer_state.json."""
        self._write(text, functools.partial((self.folder / TRAINER_STATE_NAME).write_text, encoding="utf-8"))

    def write_shards(self, states: dict[str, Any]) -> None:
        """Write this process's parts of states, by the folder's name; all processes call this."""
        self.parts.update(states)
        for name in states:
            # A process that failed to do so later would leave the others waiting for its part.
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        if not self.defers_shards:
            self.write_collected_shards()

    def write_collected_shards(self, group: Any = None) -> None:
        """Write this process's parts; those of all exist when this returns.

        Parameters:
            group: the process group in which they agree; by default that of the training.
        """
        from littrainer.checkpoint import sharded_files

        for name, state in self.parts.items():
            sharded_files.write_shards(self.folder / name, state, group)
        self.parts = {}

    def write_deferred(self) -> None:
        """Write what was collected."""
        for value, write in self.deferred:
            write(value)
        self.deferred = []

    def _write(self, value: Any, write: Callable[[Any], object]) -> None:
        if self.is_deferred:
            self.deferred.append((value, write))
        else:
            write(value)

    def _write_weights(self, model: nn.Module, state_dict: dict[str, Any] | None) -> None:
        write_weights(model, str(self.folder), state_dict)
        self._list_large_files()

    def _write_objects(self, objects: dict[str, Any]) -> None:
        for name, value in objects.items():
            torch.save(value, self.folder / name)
            if os.path.getsize(self.folder / name) >= MIN_LARGE_FILE_BYTES:
                self._list_large_files()

    def _list_large_files(self) -> None:
        if self.manifest is not None:
            self.manifest.add_large_files()


def write_tokenizer_and_args(folder: str | Path, args: TrainingArguments, processing_class: Any) -> None:
    """Write what belongs to a model except its weights: the processing class, if there is one, and the arguments."""
    if processing_class is not None:
        processing_class.save_pretrained(folder)
    write_arguments(args, os.path.join(folder, TRAINING_ARGS_NAME))
