"""The process that writes the checkpoints of a disk, and the files of processes that write into another folder.

By default the first process writes the checkpoints, and with `save_on_each_node` the first one of each node. A path
does not show whether two processes mean the same folder: nodes may share a disk or not, and a path may differ
between processes, for instance if a script puts the time into it. So processes look for each other's probe files.
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

from littrainer.checkpoint.atomic_write import RANK_SUFFIX, STAGING_DIR, delete_folder, remove_if_empty
from littrainer.checkpoint.checksums import list_files
from littrainer.checkpoint.store import make_unwritable_error
from littrainer.distributed.collectives import all_gather_object, barrier, is_distributed, raise_on_all_ranks

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments

logger = logging.getLogger(__name__)

PROBE_PREFIX = ".littrainer_disk_"
# Another node's file may take so long to be visible on a shared disk.
MAX_FILE_DELAY_S = 1.0


class WriterRole(NamedTuple):
    """The role of this process in writing checkpoints.

    Parameters:
        writer: the process that writes the checkpoints of this process's disk; None if this process sees none.
        is_writer: whether it is this process.
        has_own_folder: whether this process writes its files into another folder, and sends them to the writer.
        some_have_own_folder: whether any process does.
    """

    writer: int | None
    is_writer: bool
    has_own_folder: bool
    some_have_own_folder: bool


def elect_writer(args: TrainingArguments, run_dir: Path) -> WriterRole:
    """Find out which process writes the checkpoints of this folder, which is made; all processes call this together."""
    if not is_distributed():
        return WriterRole(0, args.should_save, False, False)
    rank = args.process_index
    may_write = args.should_save or rank == 0
    probe = run_dir / f"{PROBE_PREFIX}{uuid.uuid4().hex}"
    try:
        with raise_on_all_ranks(f"preparing {run_dir} for checkpoints"):
            if may_write:
                try:
                    run_dir.mkdir(parents=True, exist_ok=True)
                    probe.touch()
                except OSError as error:
                    raise make_unwritable_error(run_dir, error) from error
        probes = {
            other: name for other, name in enumerate(all_gather_object(probe.name if may_write else None)) if name
        }
        writer = _find_first_visible(run_dir, probes)
        is_writer = writer == rank
        has_own_folder = writer is None or (may_write and not is_writer)
        roles = all_gather_object((is_writer, has_own_folder))
        if not any(other_is_writer for other_is_writer, _ in roles):
            raise RuntimeError(
                f"{run_dir} was deleted or moved while {len(roles)} processes were preparing it for checkpoints, so "
                "none of them could write one. Let the script delete earlier results in one process, before the "
                "Trainer is made, and start again."
            )
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    # No process may list the folder while there are probes in it.
    barrier()
    if args.should_save and not is_writer:
        logger.warning(
            "save_on_each_node=True, and process %d writes to the same disk as process %s: one of them writes the "
            "checkpoints. Leave save_on_each_node at False if nodes share a disk.",
            rank,
            writer,
        )
    return WriterRole(writer, is_writer, has_own_folder, any(has_own for _, has_own in roles))


def _find_first_visible(run_dir: Path, probes: dict[int, str]) -> int | None:
    first = min(probes)
    deadline = time.monotonic() + MAX_FILE_DELAY_S
    while not (run_dir / probes[first]).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return next((rank for rank, name in probes.items() if (run_dir / name).exists()), None)


@contextlib.contextmanager
def make_staging_folder(final: Path, rank: int) -> Iterator[Path]:
    """Make the folder in which a process writes its part of a checkpoint, and delete it after the block."""
    folder = final.parent / STAGING_DIR / f"{final.name}{RANK_SUFFIX}{rank}"
    delete_folder(folder)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        remove_if_empty(folder.parent)


def send_to_writer(folder: Path, role: WriterRole, action: str) -> None:
    """Send the files that each process wrote into its folder to the process that completes the checkpoint."""
    names = all_gather_object(sorted(list_files(folder)))
    contents: dict[str, bytes] = {}
    with raise_on_all_ranks(action):
        if role.has_own_folder:
            existing = set(names[role.writer or 0])
            contents = {name: (folder / name).read_bytes() for name in list_files(folder) if name not in existing}
    sent = all_gather_object((role.writer or 0, contents))
    with raise_on_all_ranks(action):
        for receiver, files in sent if role.is_writer else ():
            for name, content in files.items() if receiver == role.writer else ():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)
