"""Reading checkpoints: which one is meant, and the states of trainer, optimizer, schedule and random generators."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from littrainer.callbacks.state import TrainerState
from littrainer.checkpoint.fsdp_files import read_optimizer_state
from littrainer.checkpoint.layout import (
    OPTIMIZER_NAME,
    PREFIX_CHECKPOINT_DIR,
    RANDOM_STATE_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    TRAINER_STATE_NAME,
    get_last_checkpoint,
)
from littrainer.checkpoint.names import ENGINE_PARTS, OPTIMIZER_PARTS, RESUME_RECORD_NAME
from littrainer.checkpoint.random_state import random_state_name, restore_random_states
from littrainer.checkpoint.safe_loading import load_tensors
from littrainer.checkpoint.shards import is_by_name, numbered_for
from littrainer.checkpoint.state_checks import (
    fitted_to_groups,
    optimizer_differences,
    scaler_differences,
    schedule_differences,
)
from littrainer.checkpoint.verification import refuse_damage

if TYPE_CHECKING:
    from littrainer.trainer import Trainer

logger = logging.getLogger(__name__)

NEEDED_TO_RESUME = (TRAINER_STATE_NAME, OPTIMIZER_NAME, SCHEDULER_NAME, RANDOM_STATE_NAME)
# A Trainer's method that a subclass may have its own of -> the files that it reads.
READ_BY = {
    "_load_optimizer_and_scheduler": (OPTIMIZER_NAME, SCHEDULER_NAME),
    "_load_rng_state": (RANDOM_STATE_NAME,),
}
# What a training that pushes its checkpoints to the hub has there, and where a download of it lies.
LAST_CHECKPOINT = "last-checkpoint"
RANDOM_STATES_OF_EACH = "rng_state_*.pth"


def needed_to_resume(trainer: Trainer) -> tuple[str, ...]:
    """Files that a checkpoint has to hold; not those that a subclass reads with a method of its own."""
    its_own = {name for method in trainer._own_methods(*READ_BY) for name in READ_BY[method]}
    return tuple(name for name in NEEDED_TO_RESUME if name not in its_own)


def checkpoint_to_resume(
    resume_from_checkpoint: str | bool | None,
    output_dir: str,
    needed: Sequence[str] = NEEDED_TO_RESUME,
    without: Collection[str] = (),
) -> Path | None:
    """The folder that `train(resume_from_checkpoint=...)` means; None for a fresh start.

    Parameters:
        resume_from_checkpoint: a folder; True for the newest intact one in `output_dir`; or "last-checkpoint" for the
            folder of that name there, which a push to the hub makes, and where there is none for the newest one.
        needed: files without which it cannot be resumed.
        without: names of checkpoints that do not count where the newest one is meant.

    Raises:
        ValueError: there is no checkpoint, it is damaged, or it lacks what an exact resume needs.
    """
    if not resume_from_checkpoint:
        return None
    given: str | bool = resume_from_checkpoint
    if given == LAST_CHECKPOINT and not Path(LAST_CHECKPOINT).is_dir():
        pushed = Path(output_dir) / LAST_CHECKPOINT
        given = str(pushed) if pushed.is_dir() else True
    if given is True:
        newest = get_last_checkpoint(output_dir, without) if Path(output_dir).is_dir() else None
        if newest is None:
            raise ValueError(
                f"No valid checkpoint found in output directory ({output_dir}): resume_from_checkpoint="
                f"{resume_from_checkpoint}, but there is no intact checkpoint-<step> folder. Start without resuming, "
                "or give the checkpoint's folder."
            )
        given = newest
    folder = Path(str(given))
    if not folder.is_dir():
        told = str(given).lower() in ("true", "false")
        raise ValueError(
            f"Can't find a valid checkpoint at {folder}: there is no such folder. "
            + (
                f"{given!r} is text: write {str(given).capitalize()} without quotes."
                if told
                else "Give the path of a checkpoint-<step> folder, or True for the newest one in output_dir."
            )
        )
    missing = [name for name in needed if not _is_there(folder, name)]
    if missing:
        within = next(folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"), None)
        raise ValueError(
            f"Can't find a valid checkpoint at {folder}: {', '.join(missing)} is missing, so it cannot be resumed "
            "exactly. "
            + (
                f"There are checkpoints in it: give one of these, such as {within}."
                if within is not None
                else "Resume from another checkpoint, or load its model with from_pretrained and start a new training."
            )
        )
    refuse_damage(
        folder, "Resume from another checkpoint, or give resume_from_checkpoint=True to take the newest intact one."
    )
    return folder


def _is_there(folder: Path, name: str) -> bool:
    # A training with several processes has a file of random states for each.
    if name == RANDOM_STATE_NAME and any(folder.glob(RANDOM_STATES_OF_EACH)):
        return True
    if name == OPTIMIZER_NAME and any(any(folder.glob(pattern)) for pattern in OPTIMIZER_PARTS):
        return True
    # DeepSpeed's engine keeps a schedule that it steps by itself.
    if name == SCHEDULER_NAME and any(folder.glob(ENGINE_PARTS)):
        return True
    return (folder / name).is_file()


def processes_that_wrote(folder: Path) -> int:
    """Number of processes that wrote a checkpoint together; without a record its files of random states tell."""
    record = load_tensors(folder / RESUME_RECORD_NAME) if (folder / RESUME_RECORD_NAME).is_file() else {}
    if "sizes" in record:
        return int(record["sizes"]["world_size"])
    return len(list(folder.glob(RANDOM_STATES_OF_EACH))) or 1


def read_state(folder: Path) -> TrainerState:
    """The trainer state of a checkpoint.

    The best checkpoint is looked for beside this one, since people move and copy the folder of a run; one that no
    longer exists is forgotten.

    Raises:
        ValueError: the file is no trainer state, or counts no steps.
    """
    state = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))
    if state.global_step < 0:
        raise ValueError(
            f"{folder / TRAINER_STATE_NAME} has global_step={state.global_step}, which is no number of optimizer "
            "steps. Resume from another checkpoint."
        )
    if state.best_model_checkpoint is None:
        return state
    recorded = Path(state.best_model_checkpoint)
    beside = folder.parent / recorded.name
    if beside.is_dir() and not (recorded.is_dir() and recorded.samefile(beside)):
        state.best_model_checkpoint = str(beside)
    elif not recorded.is_dir():
        logger.warning("The best checkpoint so far, %s, is gone; it is not loaded.", state.best_model_checkpoint)
        state.best_model_checkpoint = None
    return state


def load_optimizer(trainer: Trainer, folder: Path) -> None:
    """Load the state of the optimizer.

    Raises:
        ValueError: the file is damaged, could run code, or holds the state of another optimizer.
    """
    optimizer: Any = trainer.optimizer
    path, state = read_optimizer_state(folder)
    if is_by_name(state):
        state = numbered_for(trainer.model, optimizer, state)
    refuse_other_optimizer(path, trainer, state)
    optimizer.load_state_dict(state)


def refuse_other_optimizer(path: Path, trainer: Trainer, state: Any) -> None:
    """Refuse a state, with the numbers of parameters, that is not one of this training's optimizer.

    Parameters:
        path: where it was read, for the error.

    Raises:
        ValueError: it is that of another optimizer.
    """
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    _refuse(path, "optimizer", optimizer_differences(trainer.optimizer, state, names))


def load_schedule(trainer: Trainer, folder: Path) -> None:
    """Load the state of the schedule.

    Raises:
        ValueError: the file is damaged, could run code, or holds the state of another schedule.
    """
    if getattr(trainer.lr_scheduler, "is_kept_by_engine", False):
        return
    state = fitted_to_groups(load_tensors(folder / SCHEDULER_NAME), len(trainer.optimizer.param_groups))
    _refuse(folder / SCHEDULER_NAME, "schedule", schedule_differences(trainer.lr_scheduler, state))
    trainer.lr_scheduler.load_state_dict(state)


def load_scaler(trainer: Trainer, folder: Path) -> None:
    """Load the state of the loss scaling of fp16, where both the checkpoint and this training have one.

    Raises:
        ValueError: the file is damaged, could run code, or holds something else.
    """
    scaler = trainer.accelerator.scaler
    if scaler is None or not (folder / SCALER_NAME).is_file():
        return
    state = load_tensors(folder / SCALER_NAME)
    _refuse(folder / SCALER_NAME, "loss scaling", scaler_differences(scaler, state))
    scaler.load_state_dict(state)


def load_random_states(folder: Path, args: Any = None) -> None:
    """Put the random number generators where the checkpoint left them.

    Parameters:
        args: training arguments, which say which of several processes this is.

    Raises:
        ValueError: the file is damaged, could run code, or holds something else.
    """
    name = RANDOM_STATE_NAME if args is None else random_state_name(args)
    if (folder / name).is_file():
        restore_random_states(folder / name)
    elif args is None or processes_that_wrote(folder) == args.world_size:
        # Of another number of processes the resume has told.
        logger.warning("%s has no %s. Random numbers go on from the seed.", folder, name)


def _refuse(path: Path, what: str, differences: list[str]) -> None:
    if differences:
        raise ValueError(
            f"{path} does not fit the {what} of this training: {'; '.join(differences)}. Set up model and arguments as "
            "they were when the checkpoint was written, or load its model and start a new training."
        )
