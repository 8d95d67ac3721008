"""Older checkpoints when a new one is complete: which stay, and which of them can be resumed from."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from littrainer.checkpoint.atomic_write import delete_folder, read_sequence
from littrainer.checkpoint.checksums import (
    DamagedManifest,
    fsync_paths,
    read_manifest,
    readable_manifest,
    write_manifest,
)
from littrainer.checkpoint.layout import OPTIMIZER_FOLDER, PREFIX_CHECKPOINT_DIR, checkpoint_folder
from littrainer.checkpoint.store import get_store

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.callbacks.state import TrainerState

logger = logging.getLogger(__name__)

# A resume needs these in addition to weights and trainer state; DeepSpeed's files hold both in one.
RESUME_FILE = re.compile(
    rf"(optimizer|scheduler|scaler)\.(pt|bin)|rng_state(_\d+)?\.pth|littrainer_resume(_\d+)?\.pt|{OPTIMIZER_FOLDER}"
)
# Modification times that are closer do not show which checkpoint is older.
MIN_TIME_SPREAD_S = 1.0


def sort_checkpoints(
    output_dir: str | Path,
    checkpoint_prefix: str = PREFIX_CHECKPOINT_DIR,
    use_mtime: bool = False,
    best_model_checkpoint: str | None = None,
) -> list[str]:
    """Return checkpoint directories, the oldest first.

    Parameters:
        output_dir: the folder that holds them.
        checkpoint_prefix: their names before the step.
        use_mtime: order by when they were written, as their manifests say, or by modification times if one has no
            manifest and the times tell them apart; else by step.
        best_model_checkpoint: moved to the last place but one, out of the way of rotation.
    """
    pattern = re.compile(rf"{re.escape(checkpoint_prefix)}-(\d+)")
    steps: dict[str, int] = {}
    # As glob does, find nothing in a folder that does not exist or cannot be read.
    with contextlib.suppress(OSError), os.scandir(output_dir) as entries:
        for entry in entries:
            if (match := pattern.fullmatch(entry.name)) and entry.is_dir():
                steps[str(Path(output_dir, entry.name))] = int(match.group(1))
    ordered = sorted(steps, key=lambda path: steps[path])
    if use_mtime and len(ordered) > 1:
        ordered = _sort_by_writing(ordered)
    best = None if best_model_checkpoint is None else str(Path(best_model_checkpoint))
    if best in ordered[:-1]:
        ordered.remove(best)
        ordered.insert(len(ordered) - 1, best)
    return ordered


def _sort_by_writing(by_step: list[str]) -> list[str]:
    # A clock that is set back must not make a new checkpoint an old one.
    sequences, times = {path: read_sequence(path) for path in by_step}, dict[str, float]()
    for path in by_step:
        # A user may delete a checkpoint meanwhile, which is left out.
        with contextlib.suppress(FileNotFoundError):
            times[path] = os.path.getmtime(path)
    if all(sequences[path] is not None for path in times):
        return sorted(times, key=lambda path: sequences[path] or 0)
    if max(times.values()) - min(times.values()) < MIN_TIME_SPREAD_S:
        return list(times)
    return sorted(times, key=lambda path: times[path])


def rotate_checkpoints(
    output_dir: str | Path,
    save_total_limit: int | None = None,
    best_model_checkpoint: str | None = None,
    use_mtime: bool = False,
    checkpoint_prefix: str = PREFIX_CHECKPOINT_DIR,
    newest: str | None = None,
    also_kept: Collection[str] = (),
) -> None:
    """Delete the oldest checkpoints beyond `save_total_limit`; the newest and the best one always stay.

    If the weights of all that would stay are known not to be finite, the newest one before them stays too.

    Parameters:
        save_total_limit: checkpoints to keep; None or 0 keeps all.
        newest: the checkpoint that was written last, if that is known.
        also_kept: further ones that stay, whatever the limit says.
    """
    if not save_total_limit or save_total_limit < 0:
        return
    ordered = sort_checkpoints(output_dir, checkpoint_prefix, use_mtime)
    kept = {*ordered[-1:]} if newest is None else {str(Path(newest))}
    if best_model_checkpoint is not None:
        kept.add(str(Path(best_model_checkpoint)))
    surplus = len(ordered) - max(save_total_limit, len(kept))
    finite = get_newest_finite(ordered if newest is None else [*ordered, str(Path(newest))])
    store = get_store(output_dir)
    for path in [path for path in ordered if path not in kept][: max(surplus, 0)]:
        if path != finite and path not in also_kept:
            store.delete(path)


def get_newest_finite(ordered: Sequence[str]) -> str | None:
    """Return the last checkpoint that exists, is not thinned and not known to be non-finite; None if there is none."""
    for path in reversed(ordered):
        manifest = readable_manifest(Path(path))
        if not manifest.is_thinned and manifest.weights_are_finite is not False and os.path.isdir(path):
            return path
    return None


def prune_checkpoints(args: TrainingArguments, state: TrainerState, run_dir: str, newest: str) -> None:
    """Delete and thin older checkpoints as the arguments ask for; the process that writes them calls this.

    Parameters:
        state: the Trainer's, whose logs say which checkpoints are the best.
        newest: the checkpoint that was written last.
    """
    limit, best, also_kept = args.save_total_limit, state.best_model_checkpoint, []
    if args.save_total_limit_best is not None and (limit is None or limit > 0):
        # The limit counts the newest ones alone.
        also_kept = [*find_best_checkpoints(args, state, run_dir), str(Path(best or ""))]
        limit, best = limit or 1, None
    rotate_checkpoints(run_dir, limit, best, use_mtime=True, newest=newest, also_kept=also_kept)
    if args.keep_optimizer_states is not None:
        ordered = sort_checkpoints(run_dir, use_mtime=True)
        # Whatever the times of folders say.
        ordered = [*(path for path in ordered if path != str(Path(newest))), str(Path(newest))]
        complete = {*ordered[-args.keep_optimizer_states :], get_newest_finite(ordered)}
        for path in ordered:
            if path not in complete:
                thin_checkpoint(Path(path))


def find_best_checkpoints(args: TrainingArguments, state: TrainerState, run_dir: str) -> list[str]:
    """Return the `save_total_limit_best` existing checkpoints with the best `metric_for_best_model`.

    Of equal ones the earlier is better; a checkpoint whose metric is nan has none.
    """
    name = f"eval_{(args.metric_for_best_model or 'loss').removeprefix('eval_')}"
    sign = -1 if args.greater_is_better else 1
    values = {int(entry["step"]): sign * float(entry[name]) for entry in state.log_history if name in entry}
    folders = {step: checkpoint_folder(run_dir, step) for step, value in values.items() if not math.isnan(value)}
    ranked = sorted((step for step in folders if folders[step].is_dir()), key=lambda step: (values[step], step))
    return [str(folders[step]) for step in ranked[: args.save_total_limit_best]]


def delete_all_but_best(args: TrainingArguments, run_dir: str, best: str) -> None:
    """Delete the checkpoints of a folder except the best one, if it is in the folder and no further ones are kept."""
    # If a training was resumed from another folder, or a user has deleted the best one, none would be left here.
    if args.save_total_limit_best is None and Path(best).is_dir() and Path(best).parent.samefile(run_dir):
        for path in sort_checkpoints(run_dir):
            if os.path.realpath(path) != os.path.realpath(best):
                get_store(run_dir).delete(path)


def thin_checkpoint(folder: Path) -> None:
    """Leave a checkpoint its weights; its manifest says first that nothing else is to be expected.

    Links and checkpoints without a manifest, such as those of transformers, are left as they are.
    """
    try:
        manifest = None if folder.is_symlink() else read_manifest(folder)
        # Files that a killed process was about to delete are not in the manifest any more.
        surplus = [entry for entry in folder.iterdir() if RESUME_FILE.fullmatch(entry.name)]
        if manifest is None or not surplus:
            return
        if not manifest.is_thinned:
            logger.info("Thinning the older checkpoint %s to its weights (keep_optimizer_states)", folder)
            files = manifest.files.items()
            left = {name: record for name, record in files if not RESUME_FILE.fullmatch(name.split("/")[0])}
            write_manifest(folder, left, manifest.sequence, manifest.weights_are_finite, is_thinned=True)
            fsync_paths(folder)
        for entry in surplus:
            delete_folder(entry)
    except (OSError, DamagedManifest) as error:
        logger.warning("The older checkpoint %s could not be thinned to its weights: %s.", folder, error)
