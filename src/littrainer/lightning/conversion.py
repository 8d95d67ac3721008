"""Checkpoints of a Trainer as files of Lightning, and back, without a training at hand."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from littrainer.checkpoint.lightning_format import StatesLeftOut
from littrainer.checkpoint.lightning_io import TransformersCheckpointIO
from littrainer.lightning.hyper_parameters import (
    MARK,
    VERSION,
    hyper_parameters_of,
    kept_in,
    shown_hyper_parameters,
)
from littrainer.lightning.module import TransformersModule
from littrainer.lightning.module_arguments import for_a_trainer
from littrainer.lightning.trainer_format import read_checkpoint, write_trainer_folder

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments

UNFINISHED = ".unfinished"


def checkpoint_to_lightning(
    folder: str | Path,
    file: str | Path,
    model: nn.Module | None = None,
    args: TrainingArguments | dict[str, Any] | None = None,
    *,
    accumulate_grad_batches: int = 1,
) -> Path:
    """Make a .ckpt of a checkpoint that a Trainer wrote, for `fit(ckpt_path=...)` without a plugin.

    Parameters:
        folder: the checkpoint, ours or transformers'.
        file: where the .ckpt is written.
        model: what the checkpoint holds the weights of; by default the model that its configuration describes. The
            weights are loaded into it.
        args: what `TransformersModule.load_from_checkpoint` makes the module with.
        accumulate_grad_batches: micro-batches per optimizer step in the training that wrote a checkpoint of
            transformers; only needed where it was written in the middle of an epoch.

    Returns:
        the file.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: it is damaged.
        RuntimeError: its weights are another model's.
    """
    source, target = Path(folder), Path(file)
    if not source.is_dir():
        raise FileNotFoundError(f"There is no checkpoint folder {source}.")
    module = TransformersModule(_model_of_folder(source) if model is None else model, args)
    plugin = TransformersCheckpointIO(module, accumulate_grad_batches=accumulate_grad_batches)
    checkpoint = plugin.load_checkpoint(source)
    for name, value in list(checkpoint.items()):
        if isinstance(value, StatesLeftOut):
            # Lightning has words of its own for a file with a model alone.
            del checkpoint[name]
        elif isinstance(value, list):
            # As a plain list, which names no class of ours.
            checkpoint[name] = value[:]
    own = hyper_parameters_of(module.model, module.args)
    checkpoint[MARK] = {"version": VERSION, **checkpoint.get(MARK, {}), "hyper_parameters": own}
    checkpoint[module.CHECKPOINT_HYPER_PARAMS_KEY] = shown_hyper_parameters(TransformersModule, module.args, None)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(target.name + UNFINISHED)
    try:
        torch.save(checkpoint, unfinished)
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)
    return target


def _model_of_folder(folder: Path) -> str:
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{folder} has no config.json, which would say how its model is made: give the model, as "
            "checkpoint_to_lightning(folder, file, model)."
        )
    return str(folder)


def checkpoint_from_lightning(
    file: str | Path,
    folder: str | Path,
    model: nn.Module | None = None,
    args: TrainingArguments | None = None,
) -> Path:
    """Make a folder that `from_pretrained` loads, and a Trainer resumes from, of a .ckpt of a `TransformersModule`.

    Parameters:
        file: the .ckpt, or a folder of `TransformersCheckpointIO`.
        folder: where the checkpoint is written; a Trainer finds it by itself under `checkpoint-<step>`.
        model: what the file holds the weights of; by default the model that it describes.
        args: those of the training that goes on; by default those of the module.

    Returns:
        the folder.

    Raises:
        FileNotFoundError: there is no such file.
        FileExistsError: there is something where the folder is to be written.
        ValueError: it is no checkpoint of a `TransformersModule`, or holds a model alone.
        RuntimeError: its weights are another model's.
    """
    source, target = Path(file), Path(folder)
    if not source.exists():
        raise FileNotFoundError(f"There is no checkpoint {source}.")
    if target.exists():
        raise FileExistsError(f"There is a {target} already. Delete it, or name another folder.")
    checkpoint = read_checkpoint(source)
    described = kept_in(checkpoint, TransformersModule)
    if model is None and described.get("model") is None:
        raise ValueError(
            f"{source} does not say how its model is made: give the model, as checkpoint_from_lightning(file, folder, "
            "model)."
        )
    module = TransformersModule(described["model"] if model is None else model, described.get("args"))
    arguments = for_a_trainer(module.args) if args is None else args
    write_trainer_folder(checkpoint, target, module.model, arguments, str(source))
    return target
