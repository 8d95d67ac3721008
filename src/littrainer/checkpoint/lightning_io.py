"""Lightning CheckpointIO plugins for transformers' checkpoint format, with Lightning's state in an extra file."""

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

from littrainer.checkpoint.atomic_write import delete_atomically, write_folder_atomically
from littrainer.checkpoint.checksums import MANIFEST_NAME
from littrainer.checkpoint.layout import LIGHTNING_STATE_NAME, TRAINER_STATE_NAME
from littrainer.checkpoint.lightning_format import build_lightning_checkpoint, load_training_states
from littrainer.checkpoint.manager import CheckpointManager, SaveRequest
from littrainer.checkpoint.safe_loading import load_tensors, refuse_unsafe
from littrainer.checkpoint.verification import inspect_checkpoint
from littrainer.checkpoint.weights import load_weights, write_weights
from littrainer.distributed.collectives import is_distributed, raise_on_all_ranks

EXTRA_WEIGHTS = "further_weights"
# Entries that a Trainer's checkpoint stores in other files.
TRAINER_FILE_ENTRIES = ("optimizer_states", "lr_schedulers")
ADVICE = (
    "Keep tensors, numbers, text and containers of them in Lightning's state, and leave out other hyper-parameters "
    "with save_hyperparameters(ignore=[...])."
)


class TransformersCheckpointIO(CheckpointIO):
    """A plugin with which `lightning.Trainer(plugins=[...])` writes and resumes checkpoints in transformers' format.

    Parameters:
        model: the model, or the LightningModule that has it as an attribute. Its class and configuration are written;
            the weights come from the training.
        processing_class: tokenizer or processor, saved with the model.
        attribute: the LightningModule's attribute that is the model.
        max_shard_size: bytes, or text such as "5GB", above which weights are sharded into several files.
        accumulate_grad_batches: micro-batches per optimizer step of the training, needed only for a checkpoint that
            transformers wrote in the middle of an epoch.

    Examples:
        >>> import lightning
        >>> from littrainer import TransformersCheckpointIO, TransformersModule
        >>> module = TransformersModule(model)
        >>> trainer = lightning.Trainer(plugins=[TransformersCheckpointIO(module)], logger=False)
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
        """Write a folder, which replaces an earlier folder when it is complete.

        Parameters:
            checkpoint: Lightning's checkpoint.
            path: the folder.
            storage_options: not supported.

        Raises:
            TypeError: storage options are given.
            ValueError: the path is not local, the model is missing, or the state could not be loaded safely.
        """
        if storage_options is not None:
            raise TypeError("TransformersCheckpointIO takes no storage_options: it writes to local folders.")
        folder = _require_local_path(path)
        weights, state = self._weights_and_state(checkpoint)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with write_folder_atomically(folder) as temporary:
            write_weights(self._model(), temporary, weights, self.max_shard_size)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(temporary)
            torch.save(state, temporary / LIGHTNING_STATE_NAME)
            refuse_unsafe(temporary / LIGHTNING_STATE_NAME, ADVICE)

    def _weights_and_state(self, checkpoint: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        prefix, state_dict = f"{self.attribute}.", checkpoint["state_dict"]
        weights = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
        if not weights:
            attributes = ", ".join(sorted({name.partition(".")[0] for name in state_dict})) or "none"
            raise ValueError(
                f"The LightningModule has no weights below {self.attribute!r} (it has: {attributes}): give "
                "TransformersCheckpointIO(..., attribute=...) the name under which it carries the model."
            )
        state = {name: _to_plain(value) for name, value in checkpoint.items() if name != "state_dict"}
        extra = {name: value for name, value in state_dict.items() if not name.startswith(prefix)}
        return weights, {**state, EXTRA_WEIGHTS: extra}

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return Lightning's checkpoint from a folder of this plugin or of a Trainer, and load the model's weights.

        Only tensors, numbers, text and containers of them are loaded.

        Parameters:
            path: the folder.
            map_location, weights_only: ignored; states are loaded to the CPU, as if weights_only=True.

        Raises:
            FileNotFoundError: there is no such folder.
            ValueError: the path is not local or is a file, or the folder is damaged.
            RuntimeError: the weights are another model's.
        """
        folder = _require_local_path(path)
        if folder.is_file():
            raise ValueError(
                f"{folder} is a file, Lightning's own format, and TransformersCheckpointIO reads folders. Resume from "
                "it without this plugin."
            )
        if not folder.is_dir():
            raise FileNotFoundError(f"There is no checkpoint folder {folder}. TransformersCheckpointIO reads folders.")
        if any((folder / name).is_file() for name in (MANIFEST_NAME, TRAINER_STATE_NAME)):
            inspect_checkpoint(folder).refuse_damage("Resume from another one.")
        states = load_training_states(folder)
        checkpoint: dict[str, Any] = {"pytorch-lightning_version": lightning_version}
        if states is not None:
            checkpoint = build_lightning_checkpoint(states, self.accumulate_grad_batches)
        if (folder / LIGHTNING_STATE_NAME).is_file():
            checkpoint.update(load_tensors(folder / LIGHTNING_STATE_NAME))
        extra = checkpoint.pop(EXTRA_WEIGHTS, {})
        model = self._model()
        load_weights(model, folder, to_resume=True)
        weights = {f"{self.attribute}.{name}": value for name, value in model.state_dict().items()}
        return {**checkpoint, "state_dict": {**weights, **extra}}

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete a checkpoint: a folder, or a file in Lightning's own format.

        Parameters:
            path: the folder or file.

        Raises:
            ValueError: the path is not local, or the folder is no checkpoint.
        """
        folder = _require_local_path(path)
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
                "TransformersCheckpointIO has no model: give the model, or the LightningModule that carries it, as "
                "TransformersCheckpointIO(model)."
            )
        return model


class TrainerCheckpointIO(TransformersCheckpointIO):
    """The plugin in littrainer's Trainer, for saves by Lightning callbacks."""

    def __init__(self, model: nn.Module, checkpoints: CheckpointManager, make_request: Callable[[], SaveRequest]):
        super().__init__(model)
        self.checkpoints, self.make_request = checkpoints, make_request

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a folder as the Trainer does, in all processes together."""
        folder, request = _require_local_path(path), self.make_request()
        state: dict[str, Any] = {}
        with raise_on_all_ranks(f"collecting {folder}"):
            if request.args.should_save:
                entries = {name: value for name, value in checkpoint.items() if name not in TRAINER_FILE_ENTRIES}
                state = {LIGHTNING_STATE_NAME: self._weights_and_state(entries)[1]}
                folder.parent.mkdir(parents=True, exist_ok=True)
        self.checkpoints.record_best_checkpoint(request)
        self.checkpoints.write(request, folder, extra_objects=state, advice=ADVICE)


def make_strategy_save_on_all_ranks(strategy: Any) -> None:
    """Let a `TrainerCheckpointIO` save in all processes; Lightning's strategies would call it only on rank 0."""
    plugin = strategy.checkpoint_io
    if isinstance(plugin, TrainerCheckpointIO) and is_distributed():
        strategy.save_checkpoint = plugin.save_checkpoint


def add_checkpoint_io(
    plugins: list[Any], model: nn.Module, checkpoints: CheckpointManager, make_request: Callable[[], SaveRequest]
) -> list[Any]:
    if any(isinstance(plugin, CheckpointIO) for plugin in plugins):
        return plugins
    return [*plugins, TrainerCheckpointIO(model, checkpoints, make_request)]


def _require_local_path(path: str | Path) -> Path:
    text = os.fspath(path)
    if "://" in text:
        raise ValueError(
            f"{text} is not on the local disk, and TransformersCheckpointIO writes and reads local folders only. "
            "Copy the folder, or save to one that is mounted."
        )
    return Path(text)


def _to_plain(value: Any) -> Any:
    """Convert a value to types that `weights_only` loading accepts."""
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, Mapping):
        return {_to_plain(key): _to_plain(item) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(map(_to_plain, value))
    if isinstance(value, enum.Enum):
        return _to_plain(value.value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value
