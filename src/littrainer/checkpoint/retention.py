"""Rotation and thinning of older checkpoints after a save."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from littrainer.checkpoint.atomic_write import delete_folder
from littrainer.checkpoint.checksums import (
    DamagedManifest,
    fsync_paths,
    read_manifest,
    read_manifest_or_empty,
    write_manifest,
)
from littrainer.checkpoint.layout import OPTIMIZER_FOLDER, PREFIX_CHECKPOINT_DIR, checkpoint_folder
from littrainer.checkpoint.store import get_store

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.callbacks.state import TrainerState

logger = logging.getLogger(__name__)

RESUME_FILE = re.compile(  # deleted by thinning
    rf"(optimizer|scheduler|scaler)\.(pt|bin)|rng_state(_\d+)?\.pth|littrainer_resume(_\d+)?\.pt|{OPTIMIZER_FOLDER}"
)
# Modification times closer together than this do not show which checkpoint is older.
MIN_TIME_SPREAD_S = 1.0


def sort_checkpoints(
    output_dir: str | Path,
    checkpoint_prefix: str = PREFIX_CHECKPOINT_DIR,
    use_mtime: bool = False,
    best_model_checkpoint: str | None = None,
) -> list[str]:
    """Return checkpoint directories, the oldest first.

    Parameters:
        output_dir: the folder that contains them.
        checkpoint_prefix: the part of their names before the step.
        use_mtime: sort by the order of writing, which manifests record; if a manifest is missing, by modification time,
            or by step if these times are too close. If False, sort by step.
        best_model_checkpoint: moved to the second to last position, so that rotation does not delete it.
    """
    pattern = re.compile(rf"{re.escape(checkpoint_prefix)}-(\d+)")
    steps: dict[str, int] = {}
    with contextlib.suppress(OSError), os.scandir(output_dir) as entries:
        for entry in entries:
            if (match := pattern.fullmatch(entry.name)) and entry.is_dir():
                steps[str(Path(output_dir, entry.name))] = int(match.group(1))
    ordered = sorted(steps, key=steps.__getitem__)
    if use_mtime and len(ordered) > 1:
        ordered = _sort_by_writing(ordered)
    best = None if best_model_checkpoint is None else str(Path(best_model_checkpoint))
    if best in ordered[:-1]:
        ordered.remove(best)
        ordered.insert(len(ordered) - 1, best)
    return ordered


def _sort_by_writing(by_step: list[str]) -> list[str]:
    # Sequence numbers do not depend on the clock.
    sequences = {path: read_manifest_or_empty(Path(path)).sequence for path in by_step}
    times: dict[str, float] = {}
    for path in by_step:
        # A user may delete a checkpoint meanwhile.
        with contextlib.suppress(FileNotFoundError):
            times[path] = os.path.getmtime(path)
    if all(sequences[path] is not None for path in times):
        return sorted(times, key=lambda path: sequences[path] or 0)
    if max(times.values()) - min(times.values()) < MIN_TIME_SPREAD_S:
        return list(times)
    return sorted(times, key=times.__getitem__)


def rotate_checkpoints(
    output_dir: str | Path,
    save_total_limit: int | None = None,
    best_model_checkpoint: str | None = None,
    use_mtime: bool = False,
    checkpoint_prefix: str = PREFIX_CHECKPOINT_DIR,
    newest: str | None = None,
    protected: Collection[str] = (),
) -> None:
    """Delete the oldest checkpoints beyond `save_total_limit`, except the newest, the best and the newest finite.

    Parameters:
        save_total_limit: checkpoints to keep; None or 0 keeps all.
    """
    if not save_total_limit or save_total_limit < 0:
        return
    ordered = sort_checkpoints(output_dir, checkpoint_prefix, use_mtime)
    counted = {*ordered[-1:]} if newest is None else {str(Path(newest))}
    if best_model_checkpoint is not None:
        counted.add(str(Path(best_model_checkpoint)))
    surplus = len(ordered) - max(save_total_limit, len(counted))
    finite = get_last_resumable(ordered if newest is None else [*ordered, str(Path(newest))])
    store = get_store(output_dir)
    for path in [path for path in ordered if path not in counted][: max(surplus, 0)]:
        if path != finite and path not in protected:
            store.delete(path)


def get_last_resumable(ordered: Sequence[str]) -> str | None:
    """Return the last checkpoint that is neither thinned nor known to be non-finite."""
    for path in reversed(ordered):
        manifest = read_manifest_or_empty(Path(path))
        if not manifest.is_thinned and manifest.weights_are_finite is not False and os.path.isdir(path):
            return path
    return None


def find_best_checkpoints(args: TrainingArguments, state: TrainerState, run_dir: str) -> list[str]:
    """Return the `save_total_limit_best` best checkpoints, in ties the earlier."""
    name = f"eval_{(args.metric_for_best_model or 'loss').removeprefix('eval_')}"
    sign = -1 if args.greater_is_better else 1
    values = {int(entry["step"]): sign * float(entry[name]) for entry in state.log_history if name in entry}
    folders = {step: checkpoint_folder(run_dir, step) for step, value in values.items() if not math.isnan(value)}
    ranked = sorted((step for step in folders if folders[step].is_dir()), key=lambda step: (values[step], step))
    return [str(folders[step]) for step in ranked[: args.save_total_limit_best]]


def thin_checkpoint(folder: Path) -> None:
    """Reduce a checkpoint to its weights; skip links and checkpoints without a manifest."""
    try:
        manifest = None if folder.is_symlink() else read_manifest(folder)
        # Files come from the folder: if thinning was interrupted, the manifest lacks files that are still present.
        surplus = [entry for entry in folder.iterdir() if RESUME_FILE.fullmatch(entry.name)]
        if manifest is None or not surplus:
            return
        if not manifest.is_thinned:
            logger.info("Thinning the older checkpoint %s to its weights (keep_optimizer_states)", folder)
            files = manifest.files.items()
            remaining = {name: record for name, record in files if not RESUME_FILE.fullmatch(name.split("/")[0])}
            write_manifest(folder, remaining, manifest.sequence, manifest.weights_are_finite, is_thinned=True)
            fsync_paths(folder)
        for entry in surplus:
            delete_folder(entry)
    except (OSError, DamagedManifest) as error:
        logger.warning("The older checkpoint %s could not be thinned to its weights: %s.", folder, error)
