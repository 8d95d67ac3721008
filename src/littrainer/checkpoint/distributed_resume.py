"""The choice of the checkpoint that all processes resume from."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import os
import socket
import zlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from littrainer.checkpoint.checksums import MANIFEST_NAME, list_files, readable_manifest
from littrainer.checkpoint.layout import (
    OPTIMIZER_NAME,
    PREFIX_CHECKPOINT_DIR,
    RANDOM_STATE_NAME,
    SCHEDULER_NAME,
    TRAINER_STATE_NAME,
    checkpoint_step,
)
from littrainer.checkpoint.remote import download_checkpoint, download_newest
from littrainer.checkpoint.store import get_store
from littrainer.checkpoint.verification import (
    damage_in,
    find_last_intact,
    find_missing,
    refuse_damage,
)
from littrainer.distributed.collectives import (
    all_gather_object,
    broadcast_object,
    is_distributed,
    raise_on_all_ranks,
    run_with_keepalive,
)
from littrainer.distributed.environment import TRAININGS, get_reports_folder, rank
from littrainer.runtime.atomic_files import write_atomically
from littrainer.runtime.remote_folder import get_remote_url, local_folder

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments

logger = logging.getLogger(__name__)

NEEDED_TO_RESUME = (TRAINER_STATE_NAME, OPTIMIZER_NAME, SCHEDULER_NAME, RANDOM_STATE_NAME)
# Overridable method of the Trainer -> files that it reads.
FILES_READ_BY_METHOD = {
    "_load_optimizer_and_scheduler": (OPTIMIZER_NAME, SCHEDULER_NAME),
    "_load_rng_state": (RANDOM_STATE_NAME,),
}
# `resume_from_checkpoint="auto"`: the newest intact checkpoint, or a fresh start.
AUTO = "auto"
LAST_CHECKPOINT = "last-checkpoint"  # pushed to the Hub
NO_SUCH_FOLDER = "finds no such folder"
_trainings = itertools.count()


def get_last_checkpoint(folder: str | Path, without: Collection[str] = ()) -> str | None:
    """Return the intact checkpoint with the highest step in a folder from which training can resume, or None.

    Damaged and non-finite checkpoints are skipped with a warning. If the folder mirrors a URL, the newest checkpoint
    there is downloaded first.

    Parameters:
        folder: an output folder with `checkpoint-<step>` folders, or its URL.
        without: names of checkpoints to skip.

    Raises:
        FileNotFoundError: there is no such folder.
        RemoteFolderError: an object at the URL could not be read.
    """
    folder = local_folder(os.fspath(folder))
    if get_remote_url(folder) is not None:
        without = {*without, *download_newest(folder, without)}
    return find_last_intact(folder, without)


def choose_checkpoint(
    resume_from_checkpoint: str | bool | None, args: TrainingArguments, needed: Sequence[str]
) -> Path | None:
    """Return rank 0's choice in all processes. A choice that is damaged on any disk is skipped, or refused if named."""
    if not is_distributed():
        return find_checkpoint_to_resume(resume_from_checkpoint, args.output_dir, needed)
    resumes = all_gather_object(bool(resume_from_checkpoint))
    if len(set(resumes)) > 1:
        raise ValueError(
            "Some processes resume from a checkpoint, and process "
            f"{', '.join(str(rank) for rank, does in enumerate(resumes) if not does)} does not: give all of them the "
            "same resume_from_checkpoint."
        )
    is_newest_requested = broadcast_object(resume_from_checkpoint in (True, LAST_CHECKPOINT, AUTO))
    skipped: set[str] = set()

    def choose() -> Path | None:
        if args.process_index != 0:
            return None
        return find_checkpoint_to_resume(resume_from_checkpoint, args.output_dir, needed, skipped)

    while True:
        chosen: list[Path | None] = []
        with raise_on_all_ranks("looking for the checkpoint to resume from"):
            run_with_keepalive(lambda: chosen.append(choose()))  # noqa: B023
            identity = None if chosen[0] is None else _identity(chosen[0])
        folder, identity = broadcast_object((chosen[0], identity))
        if folder is None or identity is None:
            return None
        if get_remote_url(folder) is not None:
            fetch = functools.partial(download_checkpoint, folder)
            with raise_on_all_ranks(f"downloading {folder}"):
                run_with_keepalive(fetch if args.local_process_index == 0 else lambda: None)
        problems = all_gather_object(_problem(folder, identity, args))
        text = " ".join(f"Process {rank} on {problem}" for rank, problem in enumerate(problems) if problem is not None)
        if not text:
            return folder
        if not is_newest_requested:
            raise ValueError(f"The checkpoint {folder} cannot be resumed in all processes. {text}")
        if NO_SUCH_FOLDER in text:
            raise ValueError(
                f"The newest checkpoint of the first process is {os.path.abspath(folder)}. {text} Write checkpoints to "
                "a disk that all nodes share, copy the folder to the others, or train with save_on_each_node=True."
            )
        if args.process_index == 0:
            logger.warning("Passing over the checkpoint %s, which is not intact on all disks. %s", folder, text)
        skipped.add(folder.name)


def find_restart_checkpoint(resume_from_checkpoint: str | bool | None, output_dir: str) -> str | bool | None:
    """Return the newest checkpoint since the first start by `littrainer run`, or else the script's value.

    Trainings are identified by their order in the script, so all processes call this at each training.
    """
    if get_reports_folder() is None or TRAININGS not in os.environ:
        return resume_from_checkpoint
    number = str(next(_trainings))
    with raise_on_all_ranks("looking for the checkpoint to continue from"):
        if rank() == 0:
            file = Path(os.environ[TRAININGS])
            trainings = json.loads(file.read_text("utf-8")) if file.is_file() else {}
            folders: dict[str, dict[str, list[int]]] = trainings.setdefault(number, {})
            for folder, before in reversed(folders.items()):
                now = identify_checkpoints(folder)
                earlier = {name for name in before if now.get(name) == before[name]}
                newest = find_last_intact(folder, earlier) if now else None
                if newest is not None:
                    logger.warning("Started again, and goes on from the checkpoint %s.", newest)
                    resume_from_checkpoint = newest
                    break
            folders.setdefault(os.path.abspath(output_dir), identify_checkpoints(output_dir))
            write_atomically(file, json.dumps(trainings))
    return broadcast_object(resume_from_checkpoint)


def identify_checkpoints(folder: str | Path) -> dict[str, list[int]]:
    """Return the checkpoints in a folder, and the CRC-32 of each manifest, or inode and time without a manifest."""
    identities = {path: [*_identity(path)] for path in Path(folder).glob("*") if checkpoint_step(path) is not None}
    for path in identities:
        with contextlib.suppress(OSError):
            identities[path] = [zlib.crc32((path / MANIFEST_NAME).read_bytes())]
    return {path.name: identity for path, identity in identities.items()}


def _identity(folder: Path) -> tuple[int, int]:
    status = os.stat(folder)
    return status.st_ino, status.st_mtime_ns


def _problem(folder: Path, identity: tuple[int, int], args: TrainingArguments) -> str | None:
    if not folder.is_dir():
        return f"{socket.gethostname()} {NO_SUCH_FOLDER}."
    if args.local_process_index != 0 or _identity(folder) == identity:
        return None
    damage = damage_in(folder)
    return f"{socket.gethostname()}: {' '.join(damage)}" if damage else None


def get_required_files(overridden: Collection[str]) -> tuple[str, ...]:
    optional = {name for method in overridden for name in FILES_READ_BY_METHOD[method]}
    return tuple(name for name in NEEDED_TO_RESUME if name not in optional)


def find_checkpoint_to_resume(
    resume_from_checkpoint: str | bool | None,
    output_dir: str,
    needed: Sequence[str] = NEEDED_TO_RESUME,
    without: Collection[str] = (),
) -> Path | None:
    """Return the folder that `train(resume_from_checkpoint=...)` means; None for a fresh start.

    Parameters:
        resume_from_checkpoint: a folder or its URL, True, "auto" or "last-checkpoint".
        needed: files without which a checkpoint cannot be resumed.
        without: names to skip when looking for the newest.
    """
    if not resume_from_checkpoint:
        return None
    path: str | bool = resume_from_checkpoint
    if path == LAST_CHECKPOINT and not Path(LAST_CHECKPOINT).is_dir():
        pushed = Path(output_dir) / LAST_CHECKPOINT
        path = str(pushed) if pushed.is_dir() else True
    starts_if_none = path == AUTO and not Path(AUTO).is_dir()
    if path is True or starts_if_none:
        newest = get_last_checkpoint(output_dir, without) if Path(output_dir).is_dir() else None
        if newest is None and starts_if_none:
            return None
        if newest is None:
            raise ValueError(
                f"No valid checkpoint found in output directory ({get_remote_url(output_dir) or output_dir}): "
                f"resume_from_checkpoint={resume_from_checkpoint}, but there is no intact checkpoint-<step> folder. "
                "Start without resuming, or give the checkpoint's folder."
            )
        path = newest
    folder = Path(local := local_folder(str(path)))
    if local != str(path):
        download_checkpoint(folder)
    if not folder.is_dir():
        advice = "Give the path of a checkpoint-<step> folder, or True for the newest one in output_dir."
        if str(path).lower() in ("true", "false"):
            advice = f"{path!r} is text: write {str(path).capitalize()} without quotes."
        raise ValueError(
            f"Can't find a valid checkpoint at {get_remote_url(folder) or folder}: there is no such folder. {advice}"
        )
    manifest = readable_manifest(folder)
    if manifest.is_thinned:
        raise ValueError(
            f"The checkpoint {folder} was thinned to its weights (keep_optimizer_states), so training cannot resume "
            f"from it. Resume from {get_last_checkpoint(folder.parent) or 'a complete one'}, or load its model with "
            "from_pretrained."
        )
    if missing := find_missing(set(list_files(folder, with_links=True)), needed):
        advice = "Resume from another checkpoint, or load its model with from_pretrained and start a new training."
        if (inner := next(folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"), None)) is not None:
            advice = f"There are checkpoints in it: give one of these, such as {inner}."
        raise ValueError(
            f"Can't find a valid checkpoint at {folder}: {', '.join(missing)} is missing, so it cannot be resumed "
            f"exactly. {advice}"
        )
    refuse_damage(
        folder, "Resume from another checkpoint, or give resume_from_checkpoint=True to take the newest intact one."
    )
    if manifest.weights_are_finite is False:
        advice = "Training does not repair them; resume_from_checkpoint=True takes the newest finite checkpoint."
        logger.warning("Weights or optimizer states in %s are not finite. %s", folder, advice)
    if (remote := get_store(folder.parent).remote) is not None:
        remote.on_resume(folder.name)
    return folder
