"""What stays of older checkpoints when a new one is complete: which folders, and which of them can be resumed from."""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

from littrainer.checkpoint.atomic_write import (
    delete_checkpoint,
    delete_folder,
    newest_healthy_of,
    rotate_checkpoints,
    sort_checkpoints,
)
from littrainer.checkpoint.checksums import DamagedManifest, read_manifest, to_disk, write_manifest
from littrainer.checkpoint.layout import OPTIMIZER_FOLDER, checkpoint_folder

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.callbacks.state import TrainerState

logger = logging.getLogger(__name__)

# What a resume needs besides weights and trainer state, whatever the strategy; DeepSpeed's files hold both in one.
OF_A_RESUME = re.compile(
    rf"(optimizer|scheduler|scaler)\.(pt|bin)|rng_state(_\d+)?\.pth|littrainer_resume(_\d+)?\.pt|{OPTIMIZER_FOLDER}"
)


def tidy_checkpoints(
    args: TrainingArguments, state: TrainerState, run_dir: str, newest: str, in_background: bool = False
) -> None:
    """Delete and thin older checkpoints as the arguments ask for; the process that writes them calls this.

    Parameters:
        state: the Trainer's, whose logs say which checkpoints are the best.
        newest: the checkpoint that was written last.
        in_background: free the room of what is deleted wholly while this returns.
    """
    limit, best, also_kept = args.save_total_limit, state.best_model_checkpoint, []
    if args.save_total_limit_best is not None and (limit is None or limit > 0):
        # The limit counts the newest ones alone.
        also_kept = [*best_checkpoints(args, state, run_dir), str(Path(best or ""))]
        limit, best = limit or 1, None
    rotate_checkpoints(
        run_dir, limit, best, use_mtime=True, newest=newest, in_background=in_background, also_kept=also_kept
    )
    if args.keep_optimizer_states is not None:
        ordered = sort_checkpoints(run_dir, use_mtime=True)
        # Whatever the times of folders say.
        ordered = [*(path for path in ordered if path != str(Path(newest))), str(Path(newest))]
        complete = {*ordered[-args.keep_optimizer_states :], newest_healthy_of(ordered)}
        for path in ordered:
            if path not in complete:
                thin_checkpoint(Path(path))


def best_checkpoints(args: TrainingArguments, state: TrainerState, run_dir: str) -> list[str]:
    """Return the `save_total_limit_best` checkpoints that are there with the best `metric_for_best_model`.

    Of equal ones the earlier is better, and a metric that is not a number is none.
    """
    name = f"eval_{(args.metric_for_best_model or 'loss').removeprefix('eval_')}"
    sign = -1 if args.greater_is_better else 1
    values = {int(entry["step"]): sign * float(entry[name]) for entry in state.log_history if name in entry}
    folders = {step: checkpoint_folder(run_dir, step) for step, value in values.items() if not math.isnan(value)}
    ranked = sorted((step for step in folders if folders[step].is_dir()), key=lambda step: (values[step], step))
    return [str(folders[step]) for step in ranked[: args.save_total_limit_best]]


def delete_all_but_best(args: TrainingArguments, run_dir: str, best: str) -> None:
    """Delete the checkpoints of a folder but for the best one, if that lies there and no further ones are kept."""
    # That of a training resumed from another folder lies there, and none would be left here.
    if args.save_total_limit_best is None and Path(best).parent.samefile(run_dir):
        for folder in sort_checkpoints(run_dir, best_model_checkpoint=best):
            if not Path(folder).samefile(best):
                delete_checkpoint(folder)


def thin_checkpoint(folder: Path) -> None:
    """Leave a checkpoint its weights; its manifest says first that nothing else is to be expected.

    Nothing is done to a link, or to a checkpoint without a manifest, such as one of transformers.
    """
    try:
        manifest = None if folder.is_symlink() else read_manifest(folder)
        # Those that a killed process was about to delete are not in the manifest any more.
        surplus = [entry for entry in folder.iterdir() if OF_A_RESUME.fullmatch(entry.name)]
        if manifest is None or not surplus:
            return
        if not manifest.is_thinned:
            logger.info("Thinning the older checkpoint %s to its weights (keep_optimizer_states)", folder)
            files = {name: one for name, one in manifest.files.items() if not OF_A_RESUME.fullmatch(name.split("/")[0])}
            write_manifest(folder, files, manifest.sequence, manifest.weights_are_finite, is_thinned=True)
            to_disk(folder)
        for entry in surplus:
            delete_folder(entry)
    except (OSError, DamagedManifest) as error:
        logger.warning("The older checkpoint %s could not be thinned to its weights: %s.", folder, error)
