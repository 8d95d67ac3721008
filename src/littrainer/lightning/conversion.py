"""Conversion between checkpoints of a Trainer and of a `TransformersModule`."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from littrainer.callbacks.state import TrainerState
from littrainer.checkpoint.atomic_write import delete_folder, write_folder_atomically
from littrainer.checkpoint.layout import (
    LIGHTNING_STATE_NAME,
    OPTIMIZER_NAME,
    RANDOM_STATE_NAME,
    RESUME_RECORD_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    TRAINER_STATE_NAME,
    TRAINING_ARGS_NAME,
    rank_file,
    resume_record_name,
)
from littrainer.checkpoint.lightning_format import DATA_VERSION, LOSS_SCALING, MODULE_METADATA_KEY
from littrainer.checkpoint.run_record import write_arguments
from littrainer.checkpoint.safe_loading import load_tensors
from littrainer.checkpoint.weights import match_to_model, read_weights, refuse_mismatched_weights, write_weights
from littrainer.checkpoint.writer import CheckpointWriter
from littrainer.data.resume.position import DataPosition
from littrainer.data.resume.rng import decode_rng_states, get_rng_states, set_rng_states
from littrainer.distributed.collectives import raise_on_all_ranks
from littrainer.lightning.arguments import to_trainer_arguments
from littrainer.loop.resuming import POSITION_FIELDS, RECORD_VERSION, get_compared_arguments
from littrainer.runtime.seeds import set_seed

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.callbacks.trainer_context import TrainerContext

logger = logging.getLogger(__name__)

PREFIX = "model."
DATA_STATE_KEYS = {"version", "processes"}
NEW_TRAINING = "Load its model (TransformersModule.load_from_checkpoint) and start a new training."
# The Hub gets no folder with this prefix.
FOLDER_PREFIX = ".littrainer_from"


def checkpoint_to_lightning(
    folder: str | Path,
    file: str | Path,
    model: nn.Module | None = None,
    args: TrainingArguments | dict[str, Any] | None = None,
    *,
    accumulate_grad_batches: int = 1,
) -> Path:
    """Write a .ckpt from a Trainer's checkpoint, for `fit(ckpt_path=...)` without a plugin.

    Parameters:
        folder: the checkpoint, ours or transformers'.
        file: the .ckpt to write.
        model: the model of the checkpoint, into which its weights are loaded; by default as its configuration says.
        args: arguments of the module that `TransformersModule.load_from_checkpoint` makes.
        accumulate_grad_batches: micro-batches per optimizer step; needed for a checkpoint of transformers from the
            middle of an epoch.

    Returns:
        the file.

    Raises:
        FileNotFoundError: the folder does not exist.
        ValueError: the checkpoint is damaged.
        RuntimeError: the weights are another model's.

    Examples:
        >>> from littrainer import checkpoint_to_lightning
        >>> checkpoint_to_lightning(checkpoint, "first.ckpt", model=model).name
        'first.ckpt'
    """
    # Keeps Lightning's import out of a Trainer.
    from littrainer.checkpoint.lightning_io import TransformersCheckpointIO
    from littrainer.lightning.model_source import checkpoint_metadata, get_displayed_hyper_parameters
    from littrainer.lightning.module import TransformersModule

    source, target = Path(folder), Path(file)
    if not source.is_dir():
        raise FileNotFoundError(f"There is no checkpoint folder {source}.")
    if model is None and not (source / "config.json").is_file():
        raise ValueError(
            f"{source} has no config.json, which describes the model: give the model, as "
            "checkpoint_to_lightning(folder, file, model)."
        )
    module = TransformersModule(str(source) if model is None else model, args)
    plugin = TransformersCheckpointIO(module, accumulate_grad_batches=accumulate_grad_batches)
    checkpoint = plugin.load_checkpoint(source)
    checkpoint[MODULE_METADATA_KEY] = {
        **checkpoint.get(MODULE_METADATA_KEY, {}),
        **checkpoint_metadata(module.model, module.args),
    }
    checkpoint[module.CHECKPOINT_HYPER_PARAMS_KEY] = get_displayed_hyper_parameters(
        TransformersModule, module.args, None
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(target.name + ".unfinished")
    try:
        torch.save(checkpoint, unfinished)
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)
    return target


def checkpoint_from_lightning(
    file: str | Path,
    folder: str | Path,
    model: nn.Module | None = None,
    args: TrainingArguments | None = None,
) -> Path:
    """Write a folder for `from_pretrained` and for a Trainer to resume from, out of a `TransformersModule`'s .ckpt.

    Parameters:
        file: the .ckpt, or a folder of `TransformersCheckpointIO`.
        folder: the folder to write; a Trainer finds it under `checkpoint-<step>`.
        model: the model of the checkpoint; by default the model that the file describes.
        args: the arguments of the resumed training; by default the module's.

    Returns:
        the folder.

    Raises:
        FileNotFoundError: the file does not exist.
        FileExistsError: the folder exists.
        ValueError: the file is no checkpoint of a `TransformersModule`, or has nothing but the model.
        RuntimeError: the weights are another model's.

    Examples:
        >>> from littrainer import checkpoint_from_lightning, checkpoint_to_lightning
        >>> file = checkpoint_to_lightning(checkpoint, "first.ckpt", model=model)
        >>> folder = checkpoint_from_lightning(file, "converted/checkpoint-2", model=model)
    """
    from littrainer.lightning.model_source import init_kwargs_in_checkpoint
    from littrainer.lightning.module import TransformersModule

    source, target = Path(file), Path(folder)
    if not source.exists():
        raise FileNotFoundError(f"There is no checkpoint {source}.")
    if target.exists():
        raise FileExistsError(f"There is a {target} already. Delete it, or name another folder.")
    checkpoint = LightningCheckpoint(source)
    init_kwargs = init_kwargs_in_checkpoint(checkpoint.content, TransformersModule)
    if model is None and init_kwargs.get("model") is None:
        raise ValueError(
            f"{source} does not say how its model is made: give the model, as checkpoint_from_lightning(file, folder, "
            "model)."
        )
    module = TransformersModule(init_kwargs["model"] if model is None else model, init_kwargs.get("args"))
    checkpoint.write_trainer_folder(target, module.model, to_trainer_arguments(module.args) if args is None else args)
    return target


# ---- Checkpoints of Lightning in a Trainer ---------------------------------------------------------------------------


@contextlib.contextmanager
def convert_lightning_checkpoint(trainer: TrainerContext, resume_from_checkpoint: Any) -> Iterator[Any]:
    """Yield the checkpoint to resume, for a checkpoint of Lightning a temporary folder of a Trainer."""
    if not isinstance(resume_from_checkpoint, (str, Path)) or not is_lightning_checkpoint(Path(resume_from_checkpoint)):
        yield resume_from_checkpoint
        return
    source = Path(resume_from_checkpoint)
    folder = Path(trainer.args.output_dir) / f"{FOLDER_PREFIX}-{source.name}"
    with raise_on_all_ranks(f"reading {source}"):
        if trainer.args.process_index == 0:
            LightningCheckpoint(source).write_trainer_folder(folder, trainer.model, trainer.args)
    try:
        yield str(folder)
    finally:
        if trainer.args.process_index == 0:
            delete_folder(folder)


def is_lightning_checkpoint(path: Path) -> bool:
    if path.is_dir():
        has_trainer_state = (path / TRAINER_STATE_NAME).is_file()
        return not has_trainer_state and ((path / LIGHTNING_STATE_NAME).is_file() or _is_distributed(path))
    return path.is_file()


def _is_distributed(folder: Path) -> bool:
    return (folder / ".metadata").is_file() or (folder / "checkpoint" / "mp_rank_00_model_states.pt").is_file()


class LightningCheckpoint:
    """A checkpoint of a `TransformersModule`, loaded without running code.

    Raises:
        ValueError: the checkpoint is damaged, could run code, or is from another module.
    """

    def __init__(self, path: Path):
        self.path = path
        self.content: dict[str, Any] = self._load()
        self.metadata: dict[str, Any] = self.content[MODULE_METADATA_KEY]
        # By rank; empty without a `TrainerDataModule`.
        self.positions: list[DataPosition] = []
        for value in self.content.values():
            if isinstance(value, dict) and value.keys() == DATA_STATE_KEYS and value["version"] == DATA_VERSION:
                self.positions = [DataPosition.load_fields(saved) for saved in value["processes"]]

    def _load(self) -> dict[str, Any]:
        path = self.path
        if path.is_dir() and _is_distributed(path):
            raise ValueError(
                f"{path} holds a sharded model, as ModelParallelStrategy and FSDPStrategy write it. Consolidate it "
                f"with `python -m lightning.pytorch.utilities.consolidate_checkpoint {path}`, or save with "
                "save_distributed_checkpoint=False or state_dict_type='full'."
            )
        content = load_tensors(path / LIGHTNING_STATE_NAME if path.is_dir() else path)
        if path.is_dir() and isinstance(content, dict):
            weights = {f"{PREFIX}{name}": value for name, value in read_weights(path).items()}
            content["state_dict"] = {**weights, **content.pop("further_weights", {})}
        if not isinstance(content, dict) or not {"pytorch-lightning_version", "state_dict"} <= set(content):
            raise ValueError(
                f"{path} is no checkpoint of Lightning: it has no pytorch-lightning_version and state_dict. A Trainer "
                "resumes from a checkpoint-<step> folder, or from a .ckpt that Lightning wrote of a TransformersModule."
            )
        if MODULE_METADATA_KEY not in content:
            names = ", ".join(sorted({name.partition(".")[0] for name in content["state_dict"]})) or "nothing"
            raise ValueError(
                f"{path} is a checkpoint of another LightningModule than TransformersModule (its weights: {names}), "
                "and a Trainer cannot find the model's weights in it. Load the model with that module, and start a "
                "new training."
            )
        return content

    def write_trainer_folder(self, folder: Path, model: nn.Module, args: TrainingArguments) -> None:
        """Write atomically a folder that a Trainer can resume."""
        files, state = self._files(args), self._trainer_state(args)
        weights, differences = match_to_model(model, self._model_weights())
        refuse_mismatched_weights(model, self.path, differences, to_resume=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with write_folder_atomically(folder) as temporary:
            write_weights(model, temporary, weights)
            write_arguments(args, temporary / TRAINING_ARGS_NAME)
            CheckpointWriter(temporary).write_objects(files)
            (temporary / TRAINER_STATE_NAME).write_text(state.to_json(), "utf-8")

    def _model_weights(self) -> dict[str, Any]:
        weights = self.content["state_dict"]
        unsupported = sorted(name for name in weights if not name.startswith(PREFIX))
        if unsupported:
            raise ValueError(
                f"{self.path} has other weights than the model's, which a Trainer does not train: "
                f"{', '.join(unsupported[:8])}. Make them a part of the model. {NEW_TRAINING}"
            )
        return {name.removeprefix(PREFIX): value for name, value in weights.items()}

    def _files(self, args: TrainingArguments) -> dict[str, Any]:
        content = self.content
        if "optimizer_states" not in content or "lr_schedulers" not in content:
            raise ValueError(
                f"{self.path} holds a model alone (save_weights_only=True), and a training cannot resume from it. "
                f"{NEW_TRAINING}"
            )
        optimizers, schedules = content["optimizer_states"], content["lr_schedulers"]
        if len(optimizers) != 1 or len(schedules) > 1:
            raise ValueError(
                f"{self.path} has {len(optimizers)} optimizers and {len(schedules)} schedules, and a Trainer has one "
                f"of each. {NEW_TRAINING}"
            )
        files = {OPTIMIZER_NAME: optimizers[0], SCHEDULER_NAME: schedules[0] if schedules else None}
        if content.get(LOSS_SCALING) is not None:
            files[SCALER_NAME] = content[LOSS_SCALING]
        first, *further_positions = self.positions or [DataPosition(0)]
        if first.sizes is not None:
            files[RESUME_RECORD_NAME] = self._resume_record(first, args)
        if first.random is None:
            logger.warning(
                "%s does not hold the state of random numbers, which a TrainerDataModule keeps: they continue "
                "from seed=%d.",
                self.path,
                args.seed,
            )
        random_states = _states_of_seed(args.seed) if first.random is None else decode_rng_states(first.random)
        files[rank_file(0) if further_positions else RANDOM_STATE_NAME] = random_states
        for rank, position in enumerate(further_positions, 1):
            rank_states = None if position.random is None else decode_rng_states(position.random)
            files[rank_file(rank)] = rank_states or random_states
            files[resume_record_name(rank)] = {"version": RECORD_VERSION, "data": _data_with_order(position)}
        return files

    def _resume_record(self, position: DataPosition, args: TrainingArguments) -> dict[str, Any]:
        sizes = dict(position.sizes or {})
        accumulation = self.metadata.get("accumulate_grad_batches")
        return {
            "version": RECORD_VERSION,
            "position": position.dump_fields(*POSITION_FIELDS),
            "sizes": {"accumulation": accumulation, **sizes, "is_endless": sizes["epoch_length"] is None},
            "arguments": get_compared_arguments(args),
            "rank": 0,
            "data": _data_with_order(position),
            "lightning_callbacks": dict(self.content.get("callbacks") or {}),
            "schedule_is_replaced": False,
            "lightning_additions": {},
        }

    def _trainer_state(self, args: TrainingArguments) -> TrainerState:
        position = self.positions[0] if self.positions else None
        sizes = None if position is None else position.sizes
        length = self.metadata.get("batches_per_epoch") or math.inf
        if position is not None and sizes is not None:
            epoch = position.epoch + position.micro_batches / (sizes["epoch_length"] or length)
        else:
            loop = self.content["loops"]["fit_loop"]
            batches, begun = loop["epoch_loop.batch_progress"], loop["epoch_progress"]["current"]["started"]
            # The processed epochs include an interrupted epoch.
            fraction = 1.0 if batches["is_last_batch"] else min(batches["current"]["processed"] / length, 1.0)
            epoch = begun - 1 + fraction
        state = TrainerState(global_step=int(self.content["global_step"]), epoch=epoch)
        steps, epochs = self.metadata.get("max_steps") or 0, self.metadata.get("max_epochs") or 0
        state.max_steps = int(steps if 0 < steps < math.inf else max(args.max_steps, 0))
        state.num_train_epochs = int(epochs if epochs > 0 else math.ceil(args.num_train_epochs))
        state.compute_steps(args, state.max_steps)
        state.train_batch_size = args.per_device_train_batch_size if sizes is None else sizes["micro_batch"]
        return state


def _data_with_order(position: DataPosition) -> dict[str, Any] | None:
    """Return the data's progress with its order, which the seed must not change."""
    data, seed = position.data, position.order_seed
    return data if data is None or seed is None else {**data, "order_seed": seed, "order_is_kept": True}


def _states_of_seed(seed: int) -> dict[str, Any]:
    before = get_rng_states()
    with torch.random.fork_rng():
        set_seed(seed)
        states = get_rng_states()
    set_rng_states(before)
    return states
