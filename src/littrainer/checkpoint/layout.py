"""Names in a checkpoint directory, and which checkpoints there are."""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path

logger = logging.getLogger(__name__)

PREFIX_CHECKPOINT_DIR = "checkpoint"
WEIGHTS_NAME = "pytorch_model.bin"
SAFE_WEIGHTS_NAME = "model.safetensors"
SAFE_WEIGHTS_INDEX_NAME = "model.safetensors.index.json"
TRAINER_STATE_NAME = "trainer_state.json"
TRAINING_ARGS_NAME = "training_args.bin"
OPTIMIZER_NAME = "optimizer.pt"
SCHEDULER_NAME = "scheduler.pt"
SCALER_NAME = "scaler.pt"
RANDOM_STATE_NAME = "rng_state.pth"

# Below this spread in seconds modification times say nothing about which checkpoint is older.
SMALLEST_TELLING_SPREAD = 1.0


def checkpoint_step(path: str | Path) -> int | None:
    """The optimizer step in the name of a checkpoint directory; None for any other name."""
    match = re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", Path(path).name)
    return int(match.group(1)) if match else None


def get_last_checkpoint(folder: str | Path) -> str | None:
    """The checkpoint with the highest step in a folder, or None where there is none."""
    steps = {entry: checkpoint_step(entry) for entry in Path(folder).iterdir() if entry.is_dir()}
    found = {step: entry for entry, step in steps.items() if step is not None}
    return os.path.join(folder, found[max(found)].name) if found else None


def sort_checkpoints(
    output_dir: str | Path,
    checkpoint_prefix: str = PREFIX_CHECKPOINT_DIR,
    use_mtime: bool = False,
    best_model_checkpoint: str | None = None,
) -> list[str]:
    """Checkpoint directories, the oldest first.

    Parameters:
        checkpoint_prefix: what stands before the step in their names.
        use_mtime: order by modification time where that tells them apart, else by step.
        best_model_checkpoint: moved to the last place but one, out of the way of rotation.
    """
    name = re.compile(rf"{re.escape(checkpoint_prefix)}-(\d+)")
    steps: dict[str, int] = {}
    for entry in Path(output_dir).glob(f"{checkpoint_prefix}-*"):
        match = name.match(entry.name)
        if match and entry.is_dir():
            steps[str(entry)] = int(match.group(1))
    ordered = sorted(steps, key=lambda path: steps[path])
    if use_mtime and len(ordered) > 1:
        times = {path: os.path.getmtime(path) for path in ordered}
        if max(times.values()) - min(times.values()) >= SMALLEST_TELLING_SPREAD:
            ordered.sort(key=lambda path: times[path])
    best = str(Path(best_model_checkpoint)) if best_model_checkpoint is not None else None
    if best in ordered[:-1]:
        ordered.remove(best)
        ordered.insert(len(ordered) - 1, best)
    return ordered


def rotate_checkpoints(
    output_dir: str | Path,
    save_total_limit: int | None = None,
    best_model_checkpoint: str | None = None,
    use_mtime: bool = False,
    checkpoint_prefix: str = PREFIX_CHECKPOINT_DIR,
) -> None:
    """Delete the oldest checkpoints beyond `save_total_limit`; the newest and the best one always stay.

    Parameters:
        save_total_limit: checkpoints to keep; None or 0 keeps all.
    """
    if not save_total_limit or save_total_limit < 0:
        return
    ordered = sort_checkpoints(output_dir, checkpoint_prefix, use_mtime)
    kept = {*ordered[-1:]}
    if best_model_checkpoint is not None:
        kept.add(str(Path(best_model_checkpoint)))
    surplus = len(ordered) - max(save_total_limit, len(kept))
    for path in [path for path in ordered if path not in kept][: max(surplus, 0)]:
        delete_checkpoint(path)


def delete_checkpoint(path: str) -> None:
    """Delete one checkpoint directory; what cannot be deleted is named in a warning, and training goes on."""
    logger.info("Deleting the older checkpoint %s (save_total_limit).", path)
    try:
        shutil.rmtree(path)
    except OSError as error:
        logger.warning("The older checkpoint %s could not be deleted: %s. Delete it by hand.", path, error)
