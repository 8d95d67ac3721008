"""Checkpoints of a Trainer as those of a `lightning.Trainer` with a `TransformersModule`, and back."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from littrainer.callbacks.state import TrainerState
from littrainer.checkpoint.atomic_write import delete_folder, staged_folder
from littrainer.checkpoint.layout import (
    LIGHTNING_STATE_NAME,
    OPTIMIZER_NAME,
    RANDOM_STATE_NAME,
    RESUME_RECORD_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    TRAINER_STATE_NAME,
    TRAINING_ARGS_NAME,
    resume_record_name,
)
from littrainer.checkpoint.lightning_format import (
    DATA_VERSION,
    LOSS_SCALING,
    MARK,
    MARK_VERSION,
    TrainingStates,
)
from littrainer.checkpoint.random_state import capture_random_states, rank_file, set_random_states, states_of_portable
from littrainer.checkpoint.run_record import write_arguments
from littrainer.checkpoint.safe_loading import load_tensors
from littrainer.checkpoint.weights import fitted, read_weights, refuse_other_weights, write_weights
from littrainer.checkpoint.writer import write_files
from littrainer.distributed.agreement import failing_together
from littrainer.errors.seeds import set_seed
from littrainer.lightning.arguments import for_a_trainer
from littrainer.training.resuming import RECORD_VERSION, Position, compared_arguments

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments

logger = logging.getLogger(__name__)

# Begins the names of the model's weights in a `TransformersModule`.
PREFIX = "model."
# What the state of a `TrainerDataModule` has, under whatever name its class goes.
PARTS_OF_DATA_STATE = {"version", "processes"}
NEW_TRAINING = "Load its model (TransformersModule.load_from_checkpoint) and start a new training."
# How the folder's name begins. Nothing that begins so is pushed to the Hub, should the process be killed.
FOLDER = ".littrainer_from"


def checkpoint_to_lightning(
    folder: str | Path,
    file: str | Path,
    model: nn.Module | None = None,
    args: TrainingArguments | dict[str, Any] | None = None,
    *,
    accumulate_grad_batches: int = 1,
) -> Path:
    """Make a .ckpt from a checkpoint that a Trainer wrote, for `fit(ckpt_path=...)` without a plugin.

    Parameters:
        folder: the checkpoint, ours or transformers'.
        file: the .ckpt to write.
        model: what the checkpoint holds the weights of; by default the model that its configuration describes. The
            weights are loaded into it.
        args: what `TransformersModule.load_from_checkpoint` makes the module with.
        accumulate_grad_batches: micro-batches per optimizer step in the training that wrote a checkpoint of
            transformers; only needed if it was written in the middle of an epoch.

    Returns:
        the file.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: it is damaged.
        RuntimeError: its weights are another model's.
    """
    # A Trainer imports this file, and Lightning only when it trains.
    from littrainer.checkpoint.lightning_io import TransformersCheckpointIO
    from littrainer.lightning.model_source import hyper_parameters_of, shown_hyper_parameters
    from littrainer.lightning.module import TransformersModule

    source, target = Path(folder), Path(file)
    if not source.is_dir():
        raise FileNotFoundError(f"There is no checkpoint folder {source}.")
    if model is None and not (source / "config.json").is_file():
        raise ValueError(
            f"{source} has no config.json, which would say how its model is made: give the model, as "
            "checkpoint_to_lightning(folder, file, model)."
        )
    module = TransformersModule(str(source) if model is None else model, args)
    plugin = TransformersCheckpointIO(module, accumulate_grad_batches=accumulate_grad_batches)
    checkpoint = plugin.load_checkpoint(source)
    own = hyper_parameters_of(module.model, module.args)
    checkpoint[MARK] = {"version": MARK_VERSION, **checkpoint.get(MARK, {}), "hyper_parameters": own}
    checkpoint[module.CHECKPOINT_HYPER_PARAMS_KEY] = shown_hyper_parameters(TransformersModule, module.args, None)
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
    """Make a folder that `from_pretrained` loads, and a Trainer resumes from, out of a `TransformersModule`'s .ckpt.

    Parameters:
        file: the .ckpt, or a folder of `TransformersCheckpointIO`.
        folder: the folder to write; a Trainer finds it by itself under `checkpoint-<step>`.
        model: what the file holds the weights of; by default the model that it describes.
        args: the arguments of the training that goes on; by default the module's.

    Returns:
        the folder.

    Raises:
        FileNotFoundError: there is no such file.
        FileExistsError: the folder is there already.
        ValueError: it is no checkpoint of a `TransformersModule`, or holds a model alone.
        RuntimeError: its weights are another model's.
    """
    from littrainer.lightning.model_source import kept_in
    from littrainer.lightning.module import TransformersModule

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


# ---- A Trainer resumes what Lightning wrote --------------------------------------------------------------------------


@contextlib.contextmanager
def checkpoint_of_trainer(trainer: Any, resume_from_checkpoint: Any) -> Iterator[Any]:
    """What `train()` resumes from, as a folder of a Trainer if it is something of Lightning's.

    That is a .ckpt, or a folder of `TransformersCheckpointIO`. The folder is made in `output_dir`, and gone when
    training has ended.

    Raises:
        ValueError: it is no checkpoint of a TransformersModule, or of another model.
    """
    if not isinstance(resume_from_checkpoint, (str, Path)) or not is_lightnings(Path(resume_from_checkpoint)):
        yield resume_from_checkpoint
        return
    source = Path(resume_from_checkpoint)
    folder = Path(trainer.args.output_dir) / f"{FOLDER}-{source.name}"
    with failing_together(f"reading {source}"):
        if trainer.args.process_index == 0:
            write_trainer_folder(read_checkpoint(source), folder, trainer.model, trainer.args, str(source))
    try:
        yield str(folder)
    finally:
        if trainer.args.process_index == 0:
            delete_folder(folder)


def is_lightnings(path: Path) -> bool:
    """Whether a path is a checkpoint that Lightning wrote, and no Trainer: a file, or a folder of our plugin alone."""
    if path.is_dir():
        is_trainers = (path / TRAINER_STATE_NAME).is_file()
        return not is_trainers and ((path / LIGHTNING_STATE_NAME).is_file() or _is_distributed(path))
    return path.is_file()


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What Lightning wrote, from a file or from a folder of `TransformersCheckpointIO`; loaded as weights only.

    Raises:
        ValueError: it is damaged, could run code, or is no checkpoint of a `TransformersModule`.
    """
    if path.is_dir():
        if _is_distributed(path):
            raise ValueError(
                f"{path} holds a model in parts, as ModelParallelStrategy and FSDPStrategy write it. Put them together "
                f"with `python -m lightning.pytorch.utilities.consolidate_checkpoint {path}`, or save with "
                "save_distributed_checkpoint=False or state_dict_type='full'."
            )
        checkpoint = load_tensors(path / LIGHTNING_STATE_NAME)
        if isinstance(checkpoint, dict):
            weights = {f"{PREFIX}{name}": value for name, value in read_weights(path).items()}
            checkpoint["state_dict"] = {**weights, **checkpoint.pop("further_weights", {})}
    else:
        checkpoint = load_tensors(path)
    _check_is_ours(checkpoint, str(path))
    return checkpoint


def _is_distributed(folder: Path) -> bool:
    return (folder / ".metadata").is_file() or (folder / "checkpoint" / "mp_rank_00_model_states.pt").is_file()


def _check_is_ours(checkpoint: Any, source: str) -> None:
    is_lightnings_own = isinstance(checkpoint, dict) and {"pytorch-lightning_version", "state_dict"} <= set(checkpoint)
    if not is_lightnings_own:
        raise ValueError(
            f"{source} is no checkpoint of Lightning: it has no pytorch-lightning_version and state_dict. A Trainer "
            "resumes from a checkpoint-<step> folder, or from a .ckpt that Lightning wrote of a TransformersModule."
        )
    if MARK not in checkpoint:
        names = ", ".join(sorted({name.partition(".")[0] for name in checkpoint["state_dict"]})) or "nothing"
        raise ValueError(
            f"{source} is a checkpoint of another LightningModule than TransformersModule (its weights: {names}), and "
            "a Trainer cannot tell which weights are the model's. Load the model with that module, and start a new "
            "training."
        )


def model_weights(checkpoint: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The weights of the model in a checkpoint, under its own names.

    Raises:
        ValueError: there are other weights too, which a Trainer does not train.
    """
    weights = checkpoint["state_dict"]
    others = sorted(name for name in weights if not name.startswith(PREFIX))
    if others:
        raise ValueError(
            f"{source} has other weights than the model's, which a Trainer does not train: {', '.join(others[:8])}. "
            f"Make them a part of the model. {NEW_TRAINING}"
        )
    return {name.removeprefix(PREFIX): value for name, value in weights.items()}


def states_of(checkpoint: Mapping[str, Any], args: TrainingArguments, source: str) -> TrainingStates:
    """Where the training stands that wrote a checkpoint of Lightning.

    Parameters:
        args: arguments of the training that goes on; logs, evaluations and checkpoints are due as they say.
        source: where the checkpoint comes from, for errors.

    Raises:
        ValueError: it holds a model alone, or the states of several optimizers or schedules.
    """
    if "optimizer_states" not in checkpoint or "lr_schedulers" not in checkpoint:
        raise ValueError(
            f"{source} holds a model alone (save_weights_only=True), and a training cannot go on from it. "
            f"{NEW_TRAINING}"
        )
    optimizers, schedules = checkpoint["optimizer_states"], checkpoint["lr_schedulers"]
    if len(optimizers) != 1 or len(schedules) > 1:
        raise ValueError(
            f"{source} has {len(optimizers)} optimizers and {len(schedules)} schedules, and a Trainer has one of each. "
            f"{NEW_TRAINING}"
        )
    facts, processes = checkpoint[MARK], _places_in_data(checkpoint)
    first = processes[0] if processes else None
    steps = int(checkpoint["global_step"])
    state = TrainerState(global_step=steps, epoch=_epochs(checkpoint, first, facts))
    state.max_steps, state.num_train_epochs = _length(facts, args)
    state.compute_steps(args, state.max_steps)
    state.train_batch_size = args.per_device_train_batch_size
    record = None
    if first is not None and first["sizes"] is not None:
        sizes = first["sizes"]
        state.train_batch_size = sizes["micro_batch"]
        accumulation, is_endless = facts.get("accumulate_grad_batches"), sizes["epoch_length"] is None
        record = {
            "version": RECORD_VERSION,
            "position": vars(Position(first["epoch"], first["micro_batches"])),
            "sizes": {"accumulation": accumulation, **sizes, "is_endless": is_endless},
            "arguments": compared_arguments(args),
            "rank": 0,
            "data": _data(first),
            "lightning_callbacks": dict(checkpoint.get("callbacks") or {}),
            "schedule_is_replaced": False,
            "lightning_additions": {},
        }
    return TrainingStates(
        state,
        optimizer=optimizers[0],
        schedule=schedules[0] if schedules else None,
        scaling=checkpoint.get(LOSS_SCALING),
        record=record,
        random_states=_random_states(first),
        further_ranks={
            rank: {"data": _data(one), "random_states": _random_states(one)}
            for rank, one in enumerate(processes[1:], 1)
        },
    )


def _data(place: Mapping[str, Any]) -> dict[str, Any] | None:
    """How far the data was read, with the order that it had there, whatever the seed is here."""
    data, seed = place["data"], place.get("order_seed")
    return data if data is None or seed is None else {**data, "order_seed": seed, "order_is_kept": True}


def _places_in_data(checkpoint: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a `TrainerDataModule` has kept for each process; nothing if there was none."""
    for value in checkpoint.values():
        if isinstance(value, dict) and value.keys() == PARTS_OF_DATA_STATE and value["version"] == DATA_VERSION:
            return list(value["processes"])
    return []


def _random_states(place: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if place is None or place["random"] is None else states_of_portable(place["random"])


def _epochs(checkpoint: Mapping[str, Any], place: Mapping[str, Any] | None, facts: Mapping[str, Any]) -> float:
    if place is not None and place["sizes"] is not None:
        length = place["sizes"]["epoch_length"] or facts.get("batches_per_epoch") or math.inf
        return place["epoch"] + place["micro_batches"] / length
    loop = checkpoint["loops"]["fit_loop"]
    batches, length = loop["epoch_loop.batch_progress"], facts.get("batches_per_epoch") or math.inf
    # Lightning counts an interrupted epoch as processed, so those count that have begun.
    begun, done = loop["epoch_progress"]["current"]["started"], batches["current"]["processed"]
    return float(begun) if batches["is_last_batch"] else begun - 1 + min(done / length, 1.0)


def _length(facts: Mapping[str, Any], args: TrainingArguments) -> tuple[int, int]:
    steps, epochs = facts.get("max_steps") or 0, facts.get("max_epochs") or 0
    steps = steps if 0 < steps < math.inf else max(args.max_steps, 0)
    return int(steps), int(epochs if epochs > 0 else math.ceil(args.num_train_epochs))


def write_trainer_folder(
    checkpoint: Mapping[str, Any], folder: Path, model: nn.Module, args: TrainingArguments, source: str
) -> None:
    """Write a checkpoint of Lightning as the folder that a Trainer resumes from; it appears complete or not at all.

    Parameters:
        model: what the checkpoint holds the weights of.
        args: arguments of the training that goes on.
        source: where the checkpoint comes from, for errors.

    Raises:
        ValueError: it cannot be resumed from.
        RuntimeError: its weights are another model's.
        OSError: the folder cannot be written.
    """
    states = states_of(checkpoint, args, source)
    weights, differences = fitted(model, model_weights(checkpoint, source))
    refuse_other_weights(model, Path(source), differences, to_resume=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with staged_folder(folder) as staged:
        write_weights(model, staged, weights)
        write_arguments(args, staged / TRAINING_ARGS_NAME)
        write_files(_files(states, args, source), staged)
        (staged / TRAINER_STATE_NAME).write_text(states.state.to_json(), "utf-8")


def _files(states: TrainingStates, args: TrainingArguments, source: str) -> dict[str, Any]:
    files = {OPTIMIZER_NAME: states.optimizer, SCHEDULER_NAME: states.schedule}
    if states.scaling is not None:
        files[SCALER_NAME] = states.scaling
    if states.record is not None:
        files[RESUME_RECORD_NAME] = states.record
    first = states.random_states
    if first is None:
        logger.warning(
            "%s does not hold the state of random numbers, which a TrainerDataModule keeps: they go on from seed=%d.",
            source,
            args.seed,
        )
        first = _states_of_seed(args.seed)
    files[rank_file(0) if states.further_ranks else RANDOM_STATE_NAME] = first
    for rank, one in states.further_ranks.items():
        files[rank_file(rank)] = one["random_states"] or first
        files[resume_record_name(rank)] = {"version": RECORD_VERSION, "data": one["data"]}
    return files


def _states_of_seed(seed: int) -> dict[str, Any]:
    before = capture_random_states()
    with torch.random.fork_rng():
        set_seed(seed)
        states = capture_random_states()
    set_random_states(before)
    return states
