"""Checkpoints of a `lightning.Trainer` as folders that `from_pretrained` loads, and resuming from those of a Trainer.

A folder holds the model as transformers writes it, and Lightning's state in one file more.
"""

from __future__ import annotations

import argparse
import enum
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch import __version__ as lightning_version
from lightning.pytorch.plugins.io import CheckpointIO
from torch import nn

from littrainer.checkpoint.atomic_write import delete_atomically, staged_folder
from littrainer.checkpoint.checksums import MANIFEST_NAME
from littrainer.checkpoint.layout import LIGHTNING_STATE_NAME, TRAINER_STATE_NAME
from littrainer.checkpoint.lightning_format import build_lightning_checkpoint, load_training_states
from littrainer.checkpoint.manager import CheckpointManager, SavedTraining
from littrainer.checkpoint.safe_loading import load_tensors, refuse_unsafe
from littrainer.checkpoint.verification import refuse_damage
from littrainer.checkpoint.weights import load_weights, write_weights
from littrainer.distributed.collectives import is_distributed, raise_on_all_ranks

# In that file: weights of the LightningModule that are not the model's.
EXTRA_WEIGHTS = "further_weights"
# Parts of Lightning's checkpoint that have other files in a Trainer's.
TRAINER_FILE_ENTRIES = ("optimizer_states", "lr_schedulers")
ADVICE = (
    "Keep tensors, numbers, text and containers of them in Lightning's state, and leave out other hyper-parameters "
    "with save_hyperparameters(ignore=[...])."
)


class TransformersCheckpointIO(CheckpointIO):
    """A plugin that lets `lightning.Trainer(plugins=[...])` write and resume checkpoints in transformers' format.

    Parameters:
        model: the model that a checkpoint holds, or the LightningModule that carries it. Its class and configuration
            are written; the weights come from the training.
        processing_class: tokenizer or processor, saved with the model.
        attribute: the name under which the LightningModule carries the model.
        max_shard_size: bytes, or text such as "5GB", beyond which weights are spread over several files.
        accumulate_grad_batches: micro-batches per optimizer step in the training that wrote a checkpoint of
            transformers; only needed if it was written in the middle of an epoch.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        processing_class: Any = None,
        *,
        attribute: str = "model",
        max_shard_size: int | str | None = None,
        accumulate_grad_batches: int = 1,
    ):
        self.model = model
        self.processing_class = processing_class
        self.attribute = attribute
        self.max_shard_size = max_shard_size
        self.accumulate_grad_batches = accumulate_grad_batches

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a folder; it appears when it is complete, and replaces what is at its place only then.

        Parameters:
            checkpoint: Lightning's checkpoint.
            path: the folder.
            storage_options: none are taken.

        Raises:
            TypeError: storage options are given; there are none.
            ValueError: the path is not local, the model is not known, or the state holds what is not safe to load.
        """
        if storage_options is not None:
            raise TypeError("TransformersCheckpointIO takes no storage_options: it writes to local folders.")
        folder = _local(path)
        weights, state = self._weights_and_state(checkpoint)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with staged_folder(folder) as staged:
            write_weights(self._model(), staged, weights, self.max_shard_size)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(staged)
            torch.save(state, staged / LIGHTNING_STATE_NAME)
            refuse_unsafe(staged / LIGHTNING_STATE_NAME, ADVICE)

    def _weights_and_state(self, checkpoint: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the model's weights under its own names; and Lightning's state, with further weights of the module."""
        prefix, own = f"{self.attribute}.", checkpoint["state_dict"]
        weights = {name.removeprefix(prefix): value for name, value in own.items() if name.startswith(prefix)}
        if not weights:
            known = ", ".join(sorted({name.partition(".")[0] for name in own})) or "none"
            raise ValueError(
                f"The LightningModule has no weights below {self.attribute!r} (it has: {known}): give "
                "TransformersCheckpointIO(..., attribute=...) the name under which it carries the model."
            )
        state = {name: _plain(value) for name, value in checkpoint.items() if name != "state_dict"}
        further = {name: value for name, value in own.items() if not name.startswith(prefix)}
        return weights, {**state, EXTRA_WEIGHTS: further}

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return Lightning's checkpoint, from a folder that this plugin or a Trainer wrote, ours or transformers'.

        The weights are loaded into the model too. Nothing but tensors, numbers, text and containers is ever loaded.

        Parameters:
            path: the folder.
            map_location, weights_only: without effect; loading is to the CPU, and always of weights only.

        Raises:
            FileNotFoundError: there is no such folder.
            ValueError: the path is not local or a file, or the folder is damaged.
            RuntimeError: its weights are another model's.
        """
        folder = _local(path)
        if folder.is_file():
            raise ValueError(
                f"{folder} is a file, as Lightning writes checkpoints by itself, and TransformersCheckpointIO reads "
                "folders. Go on from it without this plugin."
            )
        if not folder.is_dir():
            raise FileNotFoundError(f"There is no checkpoint folder {folder}. TransformersCheckpointIO reads folders.")
        # A folder with a model alone is no checkpoint of either kind, and as good.
        if any((folder / name).is_file() for name in (MANIFEST_NAME, TRAINER_STATE_NAME)):
            refuse_damage(folder, "Resume from another one.")
        states = load_training_states(folder)
        checkpoint: dict[str, Any] = {"pytorch-lightning_version": lightning_version}
        if states is not None:
            checkpoint = build_lightning_checkpoint(states, self.accumulate_grad_batches)
        if (folder / LIGHTNING_STATE_NAME).is_file():
            # A Lightning callback of a Trainer leaves optimizer and schedule to the Trainer, which has files for them.
            checkpoint.update(load_tensors(folder / LIGHTNING_STATE_NAME))
        further = checkpoint.pop(EXTRA_WEIGHTS, {})
        model = self._model()
        load_weights(model, folder, to_resume=True)
        weights = {f"{self.attribute}.{name}": value for name, value in model.state_dict().items()}
        return {**checkpoint, "state_dict": {**weights, **further}}

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete a checkpoint, a folder or a file of Lightning's own format.

        Parameters:
            path: the folder or file.

        Raises:
            ValueError: the path is not local, or a folder that holds no checkpoint.
        """
        folder = _local(path)
        if folder.is_symlink() or folder.is_file():
            folder.unlink()
        elif folder.is_dir():
            if not (folder / LIGHTNING_STATE_NAME).is_file():
                raise ValueError(f"{folder} is not deleted: it has no {LIGHTNING_STATE_NAME}, so it is no checkpoint.")
            delete_atomically(folder)

    def _model(self) -> nn.Module:
        model: Any = self.model
        if isinstance(model, LightningModule):
            if not isinstance(getattr(model, self.attribute, None), nn.Module):
                modules = ", ".join(name for name, _ in model.named_children()) or "none"
                raise ValueError(
                    f"{type(model).__name__} carries no model as {self.attribute!r} (its modules: {modules}): give "
                    "TransformersCheckpointIO(..., attribute=...)."
                )
            model = getattr(model, self.attribute)
        if model is None:
            raise ValueError(
                "TransformersCheckpointIO does not know the model: give it, or the LightningModule that carries it, as "
                "TransformersCheckpointIO(model)."
            )
        return model


class TrainerCheckpointIO(TransformersCheckpointIO):
    """What a Lightning callback inside our Trainer saves with: a checkpoint that the Trainer resumes from too.

    Parameters:
        model: the Trainer's.
        checkpoints: writes the folder.
        training: returns what a checkpoint is written of; an overridden `save_model` writes the model.
    """

    def __init__(self, model: nn.Module, checkpoints: CheckpointManager, training: Callable[[], SavedTraining]):
        super().__init__(model)
        self.checkpoints, self.training = checkpoints, training

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a folder, as the Trainer writes its own; all processes call this together."""
        folder, training = _local(path), self.training()
        state: dict[str, Any] = {}
        with raise_on_all_ranks(f"collecting {folder}"):
            if training.args.should_save:
                # Optimizer and schedule have other files.
                others = {name: value for name, value in checkpoint.items() if name not in TRAINER_FILE_ENTRIES}
                state = {LIGHTNING_STATE_NAME: self._weights_and_state(others)[1]}
                folder.parent.mkdir(parents=True, exist_ok=True)
        self.checkpoints.record_best_checkpoint(training)
        self.checkpoints.write(training, folder, further=state, advice=ADVICE)


def save_on_all_ranks(strategy: Any) -> None:
    """Let all processes write what a Lightning callback saves, since a strategy calls its plugin in the first only."""
    plugin = strategy.checkpoint_io
    if isinstance(plugin, TrainerCheckpointIO) and is_distributed():
        strategy.save_checkpoint = plugin.save_checkpoint


def add_checkpoint_io(
    plugins: list[Any], model: nn.Module, checkpoints: CheckpointManager, training: Callable[[], SavedTraining]
) -> list[Any]:
    """Add the plugin that writes checkpoints to those of a Trainer's `lightning.Trainer`, unless a user's does."""
    if any(isinstance(plugin, CheckpointIO) for plugin in plugins):
        return plugins
    return [*plugins, TrainerCheckpointIO(model, checkpoints, training)]


def _local(path: str | Path) -> Path:
    text = os.fspath(path)
    if "://" in text:
        raise ValueError(
            f"{text} is not on the local disk, and TransformersCheckpointIO writes and reads local folders only. "
            "Copy the folder, or save to one that is mounted."
        )
    return Path(text)


def _plain(value: Any) -> Any:
    """Return values of common kinds as the plain ones they stand for, so that they can be loaded as weights only."""
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(map(_plain, value))
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value
