"""One checkpoint written by several processes: each its part, and it appears when all are there, or not at all.

By default the first process writes the checkpoints, and with `save_on_each_node` the first one of each node. A path
does not show whether two processes mean the same folder: nodes may share a disk or not, and a path may differ
between processes, for instance if a script puts the time into it. So it is tried out, once for each folder.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from littrainer.checkpoint.atomic_write import (
    PART,
    UNFINISHED_DIR,
    StagedCheckpoint,
    delete_folder,
    naming_full_disk,
    staged_checkpoint,
)
from littrainer.checkpoint.checksums import files_in
from littrainer.distributed.agreement import are_several, failing_together, from_each, wait_for_each_other

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments

logger = logging.getLogger(__name__)

TOKEN = ".littrainer_disk_"
# How long another node's file may take to be seen on a shared disk.
SECONDS_UNTIL_A_FILE_IS_SEEN = 1.0


# ---- Which process writes on which disk ------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where this process's checkpoints lie.

    Parameters:
        leader: the process that writes the checkpoints of this process's disk; None if this process sees none.
        leads: whether it is this process.
        has_own_folder: whether this process writes its files into another folder, and sends them to the leader.
        some_have_own_folder: whether any process does.
    """

    leader: int | None
    leads: bool
    has_own_folder: bool
    some_have_own_folder: bool


def place_of(args: TrainingArguments, run_dir: Path) -> Place:
    """Find out where this process's checkpoints lie, in a folder that is made; all processes call this together.

    Raises:
        OSError: it cannot be written to.
        RuntimeError: it has been deleted meanwhile.
    """
    if not are_several():
        return Place(0, args.should_save, False, False)
    known: dict[str, Place] = vars(args).setdefault("_checkpoint_places", {})
    if str(run_dir) not in known:
        rank = args.process_index
        known[str(run_dir)] = place = _tried_out(run_dir, rank, args.should_save or rank == 0)
        if args.should_save and not place.leads:
            logger.warning(
                "save_on_each_node=True, and process %d writes to the same disk as process %s: one of them writes the "
                "checkpoints. Leave save_on_each_node at False if nodes share a disk.",
                rank,
                place.leader,
            )
    return known[str(run_dir)]


def leads(args: TrainingArguments, run_dir: str | Path) -> bool:
    """Return whether this process writes, and deletes, the checkpoints of its disk."""
    return place_of(args, Path(run_dir)).leads


def not_writable(run_dir: Path, error: OSError) -> OSError:
    """Return the error for a folder of checkpoints that cannot be written to."""
    return OSError(
        error.errno,
        f"No checkpoint can be written to {run_dir} ({error.strerror}). Give an output_dir that can be written to, or "
        "train with save_strategy='no'",
        str(run_dir),
    )


def _tried_out(run_dir: Path, rank: int, writes: bool) -> Place:
    token = run_dir / f"{TOKEN}{uuid.uuid4().hex}"
    try:
        with failing_together(f"preparing {run_dir} for checkpoints"):
            if writes:
                try:
                    run_dir.mkdir(parents=True, exist_ok=True)
                    token.touch()
                except OSError as error:
                    raise not_writable(run_dir, error) from error
        tokens = {other: name for other, name in enumerate(from_each(token.name if writes else None)) if name}
        leader = _first_seen(run_dir, tokens)
        leads = leader == rank
        has_own_folder = leader is None or (writes and not leads)
        found = from_each((leads, has_own_folder))
        if not any(one_leads for one_leads, _ in found):
            raise RuntimeError(
                f"{run_dir} was deleted or moved while {len(found)} processes were preparing it for checkpoints, so "
                "none of them could write one. Let the script delete earlier results in one process, before the "
                "Trainer is made, and start again."
            )
    finally:
        with contextlib.suppress(OSError):
            token.unlink()
    # Nobody goes on to look into the folder while tokens are in it.
    wait_for_each_other()
    return Place(leader, leads, has_own_folder, any(has_own for _, has_own in found))


def _first_seen(run_dir: Path, tokens: dict[int, str]) -> int | None:
    first = min(tokens)
    deadline = time.monotonic() + SECONDS_UNTIL_A_FILE_IS_SEEN
    while not (run_dir / tokens[first]).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return next((rank for rank, name in tokens.items() if (run_dir / name).exists()), None)


# ---- One checkpoint of all processes ---------------------------------------------------------------------------------


@contextlib.contextmanager
def parts_of_checkpoint(
    args: TrainingArguments, final: Path, unfinished: contextlib.ExitStack
) -> Iterator[StagedCheckpoint]:
    """Write a checkpoint as `staged_checkpoint` does, each process its part, up to where all parts are written.

    Parameters:
        unfinished: closing it completes the checkpoint.

    Raises:
        OSError: the disk is full; the error names the checkpoint and the file.
        FailedElsewhere: another process could not write its part, which its error says.
    """
    if not are_several():
        yield unfinished.enter_context(staged_checkpoint(final))
        return
    writing = f"writing {final}"
    place = place_of(args, final.parent)
    with contextlib.ExitStack() as own_folder:
        with failing_together(writing):
            if place.leads:
                part = unfinished.enter_context(staged_checkpoint(final))
            elif place.has_own_folder:
                part = StagedCheckpoint(own_folder.enter_context(_folder_for_part(final, args.process_index)))
            else:
                part = StagedCheckpoint(final.parent / UNFINISHED_DIR / final.name)
        # Before the others hear of it.
        with failing_together(writing), naming_full_disk(part.folder, final):
            yield part
        if place.some_have_own_folder:
            _bring(part.folder, place, writing)


@contextlib.contextmanager
def _folder_for_part(final: Path, rank: int) -> Iterator[Path]:
    unfinished = final.parent / UNFINISHED_DIR
    folder = unfinished / f"{final.name}{PART}{rank}"
    delete_folder(folder)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            unfinished.rmdir()


def _bring(folder: Path, place: Place, writing: str) -> None:
    """Send what processes wrote into other folders to the process that completes their checkpoint."""
    names = from_each(sorted(files_in(folder)))
    contents: dict[str, bytes] = {}
    with failing_together(writing):
        if place.has_own_folder:
            there = set(names[place.leader or 0])
            contents = {name: (folder / name).read_bytes() for name in files_in(folder) if name not in there}
    brought = from_each((place.leader or 0, contents))
    with failing_together(writing):
        for receiver, files in brought if place.leads else ():
            for name, content in files.items() if receiver == place.leader else ():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)
