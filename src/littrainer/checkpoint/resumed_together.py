"""The checkpoint that several processes resume from: one and the same, and intact on the disk of each."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from littrainer.checkpoint.reader import LAST_CHECKPOINT, checkpoint_to_resume
from littrainer.checkpoint.verification import damage_in
from littrainer.distributed.agreement import are_several, failing_together, from_each, from_first

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments

logger = logging.getLogger(__name__)

SEES_NONE = "finds no such folder"


class _Found(NamedTuple):
    """A checkpoint as the first process sees it.

    Parameters:
        given: its path as it was given; it may be a relative one.
        absolute: its path from the root.
        identity: what tells it from a folder of the same name on another disk.
    """

    given: str
    absolute: str
    identity: tuple[int, int]


def checkpoint_for_all(
    resume_from_checkpoint: str | bool | None, args: TrainingArguments, needed: Sequence[str]
) -> Path | None:
    """As `checkpoint_to_resume`, with one answer for all processes: the first one chooses and verifies.

    Where a node has its checkpoints on a disk of its own, its first process verifies there; a newest one that is
    damaged on any disk is passed over by all.

    Raises:
        ValueError: there is none, it is damaged, or some processes cannot see it; these are named.
    """
    if not are_several():
        return checkpoint_to_resume(resume_from_checkpoint, args.output_dir, needed)
    _refuse_disagreement(from_each(bool(resume_from_checkpoint)))
    takes_the_newest = from_first(resume_from_checkpoint is True or resume_from_checkpoint == LAST_CHECKPOINT)
    passed_over: set[str] = set()
    while True:
        found: _Found | None = None
        with failing_together("looking for the checkpoint to resume from"):
            if args.process_index == 0:
                folder = checkpoint_to_resume(resume_from_checkpoint, args.output_dir, needed, passed_over)
                found = None if folder is None else _Found(str(folder), _absolute(folder), _identity(folder))
        found = from_first(found)
        if found is None:
            return None
        own = _seen_here(found, args)
        problems = from_each(_problem(found, own, args))
        text = " ".join(f"Process {rank} on {problem}" for rank, problem in enumerate(problems) if problem is not None)
        if not text:
            return own
        if not takes_the_newest:
            raise ValueError(f"The checkpoint {found.given} cannot be resumed in all processes. {text}")
        if SEES_NONE in text:
            raise ValueError(
                f"The newest checkpoint of the first process is {found.absolute}. {text} Write checkpoints to a disk "
                "that all nodes share, copy the folder to the others, or train with save_on_each_node=True."
            )
        if args.process_index == 0:
            logger.warning("Passing over the checkpoint %s, which is not intact on all disks. %s", found.given, text)
        passed_over.add(Path(found.absolute).name)


def _refuse_disagreement(resumes: list[bool]) -> None:
    if len(set(resumes)) > 1:
        without = [str(rank) for rank, one in enumerate(resumes) if not one]
        raise ValueError(
            f"Some processes are to resume from a checkpoint, and process {', '.join(without)} is not: give all of "
            "them the same resume_from_checkpoint."
        )


def _identity(folder: Path) -> tuple[int, int]:
    status = os.stat(folder)
    return status.st_ino, status.st_mtime_ns


def _absolute(folder: Path) -> str:
    return os.path.abspath(folder)


def _seen_here(found: _Found, args: TrainingArguments) -> Path | None:
    """The folder as this process sees it: where not each node saves, rather the first process's one than another."""
    paths = [Path(path) for path in (found.given, found.absolute) if Path(path).is_dir()]
    if args.save_on_each_node:
        return paths[0] if paths else None
    return next((path for path in paths if _identity(path) == found.identity), paths[0] if paths else None)


def _problem(found: _Found, own: Path | None, args: TrainingArguments) -> str | None:
    if own is None:
        return f"{socket.gethostname()} {SEES_NONE}."
    if args.local_process_index != 0 or _identity(own) == found.identity:
        return None
    damage = damage_in(own)
    return f"{socket.gethostname()}: {' '.join(damage)}" if damage else None
