"""Conversion of a Trainer's checkpoint to Lightning's format."""

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

# Needed by Lightning to validate, test or predict.
INITIAL_LOOP_STATES: dict[str, Any] = {"validate_loop": {}, "test_loop": {}, "predict_loop": {}}
LOSS_SCALING = "MixedPrecision"
DATA_MODULE = "TrainerDataModule"
DATA_VERSION = 1
# Key in checkpoints of a `TransformersModule`.
MODULE_METADATA_KEY = "transformers_module"
MODULE_METADATA_VERSION = 1


@dataclass
class TrainingStates:
    """The states of a training without its model's weights.

    Parameters:
        record: content of `littrainer_resume.pt`; None if transformers wrote the checkpoint.
        random_states: content of `rng_state.pth`.
        other_ranks: `random_states` and data position (`data`) of each rank except 0.
    """

    state: TrainerState
    optimizer: Any = None
    schedule: Any = None
    scaling: Any = None
    record: dict[str, Any] | None = None
    random_states: dict[str, Any] | None = None
    other_ranks: dict[int, dict[str, Any]] = field(default_factory=dict)


def load_training_states(folder: Path) -> TrainingStates | None:
    """Load the states in a Trainer's checkpoint; None if the folder has only a model."""
    if not (folder / TRAINER_STATE_NAME).is_file():
        return None

    def load(name: str) -> Any:
        return load_tensors(folder / name) if (folder / name).is_file() else None

    random_states = find_random_states(folder)
    return TrainingStates(
        TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME)),
        optimizer=load(OPTIMIZER_NAME),
        schedule=load(SCHEDULER_NAME),
        scaling=load(SCALER_NAME),
        record=load(RESUME_RECORD_NAME),
        random_states=random_states.get(0),
        other_ranks={
            rank: {"random_states": states, "data": (load(resume_record_name(rank)) or {}).get("data")}
            for rank, states in random_states.items()
            if rank
        },
    )


def build_lightning_checkpoint(states: TrainingStates, accumulate_grad_batches: int = 1) -> dict[str, Any]:
    """Return a checkpoint from which a `lightning.Trainer` resumes, without weights."""
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
    # With an empty list Lightning would report a model-only checkpoint.
    if states.optimizer is not None:
        checkpoint["optimizer_states"] = [states.optimizer]
    if states.schedule is not None:
        checkpoint["lr_schedulers"] = [states.schedule]
    if states.scaling is not None:
        checkpoint[LOSS_SCALING] = states.scaling
    return checkpoint


@dataclass(frozen=True)
class LoopCounts:
    """Complete epochs, and micro-batches and optimizer steps of the next epoch."""

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
            epoch, micro_batches = epoch + 1, 0
        steps_in_epoch = -(-micro_batches // sizes["accumulation"])
        before = steps * sizes["accumulation"] - micro_batches if sizes["is_endless"] else epoch * sizes["epoch_length"]
        return LoopCounts(epoch, micro_batches, steps_in_epoch, before + micro_batches)
    epochs = int(states.state.epoch)
    fraction = states.state.epoch - epochs
    steps_in_epoch = round(steps * fraction / states.state.epoch) if fraction else 0
    return LoopCounts(epochs, steps_in_epoch * accumulate_grad_batches, steps_in_epoch, steps * accumulate_grad_batches)


def _data_module_state(states: TrainingStates, counts: LoopCounts) -> dict[str, Any]:
    record = states.record or {}
    seed = (record.get("data") or {}).get("order_seed")
    ranks = {0: {"random_states": states.random_states, "data": record.get("data")}, **states.other_ranks}
    return {
        "version": DATA_VERSION,
        "processes": [
            {
                "epoch": counts.epoch,
                "micro_batches": counts.micro_batches,
                "sizes": record.get("sizes"),
                "data": states_of_rank["data"],
                "random": encode_rng_states(random)
                if (random := states_of_rank["random_states"]) is not None
                else None,
                "order_seed": None if seed is None else int(seed),
            }
            for _, states_of_rank in sorted(ranks.items())
        ],
    }


def _fit_loop_state(steps: int, counts: LoopCounts) -> dict[str, Any]:
    epochs, in_epoch = counts.epoch, counts.micro_batches > 0
    begun = epochs + in_epoch
    total, current = _stages(counts.micro_batches_in_all), _stages(counts.micro_batches)
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
