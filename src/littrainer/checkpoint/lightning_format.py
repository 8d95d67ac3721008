"""A Trainer's training as a checkpoint of Lightning: its loops, its optimizers, its data module."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from littrainer.callbacks.state import TrainerState
from littrainer.checkpoint.layout import (
    OPTIMIZER_NAME,
    RESUME_RECORD_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    TRAINER_STATE_NAME,
    resume_record_name,
)
from littrainer.checkpoint.reader import find_random_states
from littrainer.checkpoint.safe_loading import load_tensors
from littrainer.data.resume.rng import encode_rng_states

# What Lightning asks for when it validates, tests or predicts with a checkpoint.
INITIAL_LOOP_STATES: dict[str, Any] = {"validate_loop": {}, "test_loop": {}, "predict_loop": {}}
# Where Lightning looks for the loss scaling of fp16 in a checkpoint.
LOSS_SCALING = "MixedPrecision"
# Under which name Lightning keeps the state of a `TrainerDataModule`, and the version of what that returns.
DATA_MODULE = "TrainerDataModule"
DATA_VERSION = 1
# Marks a checkpoint of Lightning that a `TransformersModule` has written.
MARK = "transformers_module"
MARK_VERSION = 1


@dataclass
class TrainingStates:
    """Where a training stands, without the weights of its model.

    Parameters:
        state: steps, epochs and logs.
        optimizer, schedule, scaling: what their `state_dict` returns, if there is one.
        record: what `littrainer_resume.pt` holds; None if transformers wrote the checkpoint.
        random_states: where random generators stand, as `rng_state.pth` holds it.
        further_ranks: of each process but the first one its `random_states`, and as `data` its place in the data.
    """

    state: TrainerState
    optimizer: Any = None
    schedule: Any = None
    scaling: Any = None
    record: dict[str, Any] | None = None
    random_states: dict[str, Any] | None = None
    further_ranks: dict[int, dict[str, Any]] = field(default_factory=dict)


def load_training_states(folder: Path) -> TrainingStates | None:
    """Read what a Trainer wrote to a checkpoint, ours or transformers'; None if a folder has a model alone."""
    if not (folder / TRAINER_STATE_NAME).is_file():
        return None

    def read(name: str) -> Any:
        return load_tensors(folder / name) if (folder / name).is_file() else None

    random_states = find_random_states(folder)
    return TrainingStates(
        TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME)),
        optimizer=read(OPTIMIZER_NAME),
        schedule=read(SCHEDULER_NAME),
        scaling=read(SCALER_NAME),
        record=read(RESUME_RECORD_NAME),
        random_states=random_states.get(0),
        further_ranks={
            rank: {"random_states": states, "data": (read(resume_record_name(rank)) or {}).get("data")}
            for rank, states in random_states.items()
            if rank
        },
    )


def build_lightning_checkpoint(states: TrainingStates, accumulate_grad_batches: int = 1) -> dict[str, Any]:
    """Return the checkpoint from which a `lightning.Trainer` goes on, without the weights.

    Parameters:
        accumulate_grad_batches: micro-batches per optimizer step, if the training kept no record of it.
    """
    from lightning.pytorch import __version__ as lightning_version

    counts = _loop_counts(states, accumulate_grad_batches)
    checkpoint: dict[str, Any] = {
        "pytorch-lightning_version": lightning_version,
        "epoch": counts.epoch,
        "global_step": states.state.global_step,
        "loops": {"fit_loop": _fit_loop_state(states.state.global_step, counts), **INITIAL_LOOP_STATES},
        DATA_MODULE: _data_module_state(states, counts),
    }
    record = states.record or {}
    if record.get("lightning_callbacks"):
        checkpoint["callbacks"] = dict(record["lightning_callbacks"])
    # Without one Lightning says that the checkpoint contains only the model.
    if states.optimizer is not None:
        checkpoint["optimizer_states"] = [states.optimizer]
    if states.schedule is not None:
        checkpoint["lr_schedulers"] = [states.schedule]
    if states.scaling is not None:
        checkpoint[LOSS_SCALING] = states.scaling
    return checkpoint


@dataclass(frozen=True)
class LoopCounts:
    """Counts of a fit loop: complete epochs, and micro-batches and optimizer steps of the next epoch."""

    epoch: int
    micro_batches: int
    steps_in_epoch: int
    micro_batches_in_all: int


def _loop_counts(states: TrainingStates, accumulate_grad_batches: int) -> LoopCounts:
    steps = states.state.global_step
    if states.record is not None:
        position, sizes = states.record["position"], states.record["sizes"]
        epoch, micro_batches = position["epoch"], position["micro_batches"]
        if position["epoch_end_is_due"]:
            # What was to be done at the end of the epoch is not Lightning's to make up for.
            epoch, micro_batches = epoch + 1, 0
        steps_in_epoch = -(-micro_batches // sizes["accumulation"])
        before = steps * sizes["accumulation"] - micro_batches if sizes["is_endless"] else epoch * sizes["epoch_length"]
        return LoopCounts(epoch, micro_batches, steps_in_epoch, before + micro_batches)
    epochs = int(states.state.epoch)
    fraction = states.state.epoch - epochs
    # An epoch has the same number of steps throughout, so the fraction tells how many of them this one has had.
    steps_in_epoch = round(steps * fraction / states.state.epoch) if fraction else 0
    return LoopCounts(epochs, steps_in_epoch * accumulate_grad_batches, steps_in_epoch, steps * accumulate_grad_batches)


def _data_module_state(states: TrainingStates, counts: LoopCounts) -> dict[str, Any]:
    record = states.record or {}
    # From it, with the epoch, the random order of an epoch follows.
    seed = (record.get("data") or {}).get("order_seed")
    ranks = {0: {"random_states": states.random_states, "data": record.get("data")}, **states.further_ranks}
    return {
        "version": DATA_VERSION,
        "processes": [
            {
                "epoch": counts.epoch,
                "micro_batches": counts.micro_batches,
                "sizes": record.get("sizes"),
                "data": one["data"],
                "random": None if one["random_states"] is None else encode_rng_states(one["random_states"]),
                "order_seed": None if seed is None else int(seed),
            }
            for _, one in sorted(ranks.items())
        ],
    }


def _fit_loop_state(steps: int, counts: LoopCounts) -> dict[str, Any]:
    epochs, in_epoch = counts.epoch, counts.micro_batches > 0
    begun = epochs + in_epoch
    total, current = _stages(counts.micro_batches_in_all), _stages(counts.micro_batches)
    # Only the stages that Lightning counts for it stand in a progress.
    step = {"total": _counts(steps), "current": _counts(counts.steps_in_epoch)}
    zero = {name: {**counts, "started": counts["ready"]} for name, counts in step.items()}
    epoch = {"ready": begun, "started": begun, "processed": epochs, "completed": epochs}
    return {
        "state_dict": {},
        "epoch_loop.state_dict": {"_batches_that_stepped": steps},
        "epoch_loop.batch_progress": {"total": total, "current": current, "is_last_batch": not in_epoch},
        "epoch_loop.scheduler_progress": step,
        "epoch_loop.automatic_optimization.state_dict": {},
        "epoch_loop.automatic_optimization.optim_progress": {"optimizer": {"step": step, "zero_grad": zero}},
        "epoch_loop.manual_optimization.state_dict": {},
        "epoch_loop.manual_optimization.optim_step_progress": step,
        "epoch_loop.val_loop.state_dict": {},
        "epoch_loop.val_loop.batch_progress": {"total": _stages(0), "current": _stages(0), "is_last_batch": False},
        "epoch_progress": {"total": epoch, "current": epoch},
    }


def _counts(number: int) -> dict[str, int]:
    return {"ready": number, "completed": number}


def _stages(number: int) -> dict[str, int]:
    return {**_counts(number), "started": number, "processed": number}
