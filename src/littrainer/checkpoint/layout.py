"""Names in a checkpoint directory, and which checkpoints there are."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection
from pathlib import Path

from littrainer.checkpoint.names import (
    OPTIMIZER_NAME,
    PREFIX_CHECKPOINT_DIR,
    RANDOM_STATE_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    TRAINER_STATE_NAME,
    TRAINING_ARGS_NAME,
    WEIGHTS_NAME,
)
from littrainer.checkpoint.staging import sequence_of, set_aside_and_delete
from littrainer.checkpoint.verification import damage_in

logger = logging.getLogger(__name__)

__all__ = [
    "OPTIMIZER_NAME",
    "PREFIX_CHECKPOINT_DIR",
    "RANDOM_STATE_NAME",
    "SAFE_WEIGHTS_INDEX_NAME",
    "SAFE_WEIGHTS_NAME",
    "SCALER_NAME",
    "SCHEDULER_NAME",
    "TRAINER_STATE_NAME",
    "TRAINING_ARGS_NAME",
    "WEIGHTS_NAME",
    "checkpoint_step",
    "delete_checkpoint",
    "find_last_checkpoint",
    "get_last_checkpoint",
    "rotate_checkpoints",
    "sort_checkpoints",
]
# Below this spread in seconds modification times say nothing about which checkpoint is older.
SMALLEST_TELLING_SPREAD = 1.0


def checkpoint_step(path: str | Path) -> int | None:
    """The optimizer step in the name of a checkpoint directory; None for any other name."""
    match = re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", Path(path).name)
    return int(match.group(1)) if match else None


def make_output_dir(folder: str) -> None:
    """Make the folder of a run, unless there is one.

    Raises:
        OSError: it cannot be made.
    """
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        reason = "is a file" if os.path.isfile(folder) else f"cannot be made ({error.strerror})"
        for link in (Path(folder), *Path(folder).parents):
            if link.is_symlink() and not link.exists():
                reason = f"cannot be made: {link} is a link to {os.readlink(link)}, which is not there"
        raise OSError(
            error.errno,
            f"output_dir={folder!r} {reason}. Give the path of a folder that can be written to",
            error.filename,
        ) from None


def get_last_checkpoint(folder: str | Path, without: Collection[str] = ()) -> str | None:
    """The newest intact checkpoint in a folder, or None where there is none.

    Newer ones that are damaged are passed over with a warning that names the damaged files.

    Parameters:
        folder: an output folder, which holds the `checkpoint-<step>` folders.
        without: names of checkpoints that do not count.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    found, damaged = find_last_checkpoint(folder, without)
    for name, damage in damaged.items():
        going_on = f"{found} is the newest intact one." if found else "There is no intact one before it."
        logger.warning("Passing over the damaged checkpoint %s: %s %s", name, " ".join(damage), going_on)
    return found


def find_last_checkpoint(folder: str | Path, without: Collection[str] = ()) -> tuple[str | None, dict[str, list[str]]]:
    """The intact checkpoint with the highest step, and those with a higher one that are damaged.

    Parameters:
        without: names of checkpoints that do not count.

    Returns:
        the checkpoint's path, or None; and what is damaged in each that was passed over, by its path.
    """
    steps = {
        entry: checkpoint_step(entry)
        for entry in Path(folder).iterdir()
        if entry.is_dir() and entry.name not in without
    }
    found = {step: entry for entry, step in steps.items() if step is not None}
    damaged: dict[str, list[str]] = {}
    for step in sorted(found, reverse=True):
        path = os.path.join(folder, found[step].name)
        damage = damage_in(found[step])
        if not damage:
            return path, damaged
        damaged[path] = damage
    return None, damaged


def sort_checkpoints(
    output_dir: str | Path,
    checkpoint_prefix: str = PREFIX_CHECKPOINT_DIR,
    use_mtime: bool = False,
    best_model_checkpoint: str | None = None,
) -> list[str]:
    """Checkpoint directories, the oldest first.

    Parameters:
        output_dir: the folder that holds them.
        checkpoint_prefix: what stands before the step in their names.
        use_mtime: order by when they were written, as their manifests say, or their modification times where one has no
            manifest and the times tell them apart; else by step.
        best_model_checkpoint: moved to the last place but one, out of the way of rotation.
    """
    name = re.compile(rf"{re.escape(checkpoint_prefix)}-(\d+)")
    steps: dict[str, int] = {}
    for entry in Path(output_dir).glob(f"{checkpoint_prefix}-*"):
        match = name.fullmatch(entry.name)
        if match and entry.is_dir():
            steps[str(entry)] = int(match.group(1))
    ordered = sorted(steps, key=lambda path: steps[path])
    if use_mtime and len(ordered) > 1:
        ordered = _by_writing(ordered)
    best = str(Path(best_model_checkpoint)) if best_model_checkpoint is not None else None
    if best in ordered[:-1]:
        ordered.remove(best)
        ordered.insert(len(ordered) - 1, best)
    return ordered


def _by_writing(by_step: list[str]) -> list[str]:
    # A clock that is set back must not make a new checkpoint an old one.
    sequences = {path: sequence_of(Path(path)) for path in by_step}
    places = {path: sequence for path, sequence in sequences.items() if sequence is not None}
    if len(places) == len(by_step):
        return sorted(by_step, key=lambda path: places[path])
    times = {path: os.path.getmtime(path) for path in by_step}
    if max(times.values()) - min(times.values()) < SMALLEST_TELLING_SPREAD:
        return by_step
    return sorted(by_step, key=lambda path: times[path])


def rotate_checkpoints(
    output_dir: str | Path,
    save_total_limit: int | None = None,
    best_model_checkpoint: str | None = None,
    use_mtime: bool = False,
    checkpoint_prefix: str = PREFIX_CHECKPOINT_DIR,
    newest: str | None = None,
    in_background: bool = False,
) -> None:
    """Delete the oldest checkpoints beyond `save_total_limit`; the newest and the best one always stay.

    Parameters:
        save_total_limit: checkpoints to keep; None or 0 keeps all.
        newest: the checkpoint that was written last, where that is known.
        in_background: free their room while this returns; they are gone from their places when it does.
    """
    if not save_total_limit or save_total_limit < 0:
        return
    ordered = sort_checkpoints(output_dir, checkpoint_prefix, use_mtime)
    kept = {*ordered[-1:]} if newest is None else {str(Path(newest))}
    if best_model_checkpoint is not None:
        kept.add(str(Path(best_model_checkpoint)))
    surplus = len(ordered) - max(save_total_limit, len(kept))
    for path in [path for path in ordered if path not in kept][: max(surplus, 0)]:
        delete_checkpoint(path, in_background)


def delete_checkpoint(path: str, in_background: bool = False) -> None:
    """Delete one checkpoint directory; what cannot be deleted is named in a warning, and training goes on."""
    logger.info(f"Deleting older checkpoint [{path}] due to args.save_total_limit")
    try:
        set_aside_and_delete(Path(path), in_background)
    except OSError as error:
        logger.warning("The older checkpoint %s could not be deleted: %s. Delete it by hand.", path, error)
