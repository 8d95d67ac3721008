"""The files of a checkpoint, written immediately, or collected so that a background save writes them later."""

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


class CheckpointWriter:
    """A folder to which the Trainer's save methods write: a checkpoint's staging folder, or any other folder.

    Parameters:
        manifest: ManifestBuilder of a checkpoint; None in processes other than the elected writer, and for a folder
            that is no checkpoint.

    Attributes:
        is_deferred: values are collected for `write_deferred`.
        defers_shards: shards are collected for `write_collected_shards`.
    """

    def __init__(self, folder: Path, manifest: ManifestBuilder | None = None) -> None:
        self.folder, self.manifest = folder, manifest
        self.is_deferred = self.defers_shards = False
        self.deferred: list[tuple[Any, Callable[[Any], object]]] = []
        self.shards: dict[str, Any] = {}

    def write_model(self, model: nn.Module, state_dict: dict[str, Any] | None = None) -> None:
        logger.info(f"Saving model checkpoint to {self.folder}")
        if self.is_deferred and can_write_copied_weights(model):
            weights = model.state_dict() if state_dict is None else state_dict
            self.deferred.append((weights, functools.partial(self._write_weights, model)))
        else:
            self._write_weights(model, state_dict)

    def write_objects(self, objects: dict[str, Any]) -> None:
        """Write objects by torch.save; the keys are file names."""
        if self.is_deferred:
            self.deferred.append((objects, self._write_objects))
        else:
            self._write_objects(objects)

    def write_trainer_state(self, text: str) -> None:
        write = functools.partial((self.folder / TRAINER_STATE_NAME).write_text, encoding="utf-8")
        if self.is_deferred:
            self.deferred.append((text, write))
        else:
            write(text)

    def write_shards(self, states: dict[str, Any]) -> None:
        """Write or collect this process's shards of states, whose keys are folder names; all processes call this."""
        self.shards.update(states)
        for name in states:
            # Folders are made before the collective write, in which the others would wait for a failed process.
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        if not self.defers_shards:
            self.write_collected_shards()

    def write_collected_shards(self, group: Any = None) -> None:
        """Write this process's shards, and wait for those of all processes."""
        from littrainer.checkpoint import sharded_files

        for name, state in self.shards.items():
            sharded_files.write_shards(self.folder / name, state, group)
        self.shards = {}

    def write_deferred(self) -> None:
        for value, write in self.deferred:
            write(value)
        self.deferred = []

    def _write_weights(self, model: nn.Module, state_dict: dict[str, Any] | None) -> None:
        write_weights(model, str(self.folder), state_dict)
        if self.manifest is not None:
            self.manifest.add_large_files()

    def _write_objects(self, objects: dict[str, Any]) -> None:
        for name, value in objects.items():
            torch.save(value, self.folder / name)
            if self.manifest is not None and os.path.getsize(self.folder / name) >= MIN_LARGE_FILE_BYTES:
                self.manifest.add_large_files()


def write_tokenizer_and_args(folder: str | Path, args: TrainingArguments, processing_class: Any) -> None:
    if processing_class is not None:
        processing_class.save_pretrained(folder)
    write_arguments(args, os.path.join(folder, TRAINING_ARGS_NAME))
