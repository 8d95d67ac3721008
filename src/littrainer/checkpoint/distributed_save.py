"""The process that writes a disk's checkpoints, and the transfer of other processes' files to it.

Equal paths may be on different disks, so candidates for the writer make probe files, which all processes look for.
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
MAX_FILE_DELAY_S = 1.0


class WriterRole(NamedTuple):
    """The role of a process in writing checkpoints.

    Parameters:
        writer_rank: rank of the writer of this disk's checkpoints, if any.
    """

    writer_rank: int | None
    is_writer: bool
    sends_files: bool
    any_sends_files: bool


def elect_writer(args: TrainingArguments, run_dir: Path) -> WriterRole:
    """Elect the writer of a folder's checkpoints; each candidate makes the folder."""
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
        writer_rank = _find_first_visible(run_dir, probes)
        is_writer = writer_rank == rank
        sends_files = writer_rank is None or (may_write and not is_writer)
        roles = all_gather_object((is_writer, sends_files))
        if not any(other_is_writer for other_is_writer, _ in roles):
            raise RuntimeError(
                f"{run_dir} was deleted or moved while {len(roles)} processes were preparing it for checkpoints, so "
                "none of them could write one. Let the script delete earlier results in one process, before the "
                "Trainer is made, and start again."
            )
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    # No process may list the folder while it has probe files.
    barrier()
    if args.should_save and not is_writer:
        logger.warning(
            "save_on_each_node=True, and process %d writes to the same disk as process %s: only the latter writes "
            "checkpoints. Leave save_on_each_node at False if nodes share a disk.",
            rank,
            writer_rank,
        )
    return WriterRole(writer_rank, is_writer, sends_files, any(sends for _, sends in roles))


def _find_first_visible(run_dir: Path, probes: dict[int, str]) -> int | None:
    first = min(probes)
    deadline = time.monotonic() + MAX_FILE_DELAY_S
    while not (run_dir / probes[first]).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return next((rank for rank, name in probes.items() if (run_dir / name).exists()), None)


@contextlib.contextmanager
def make_staging_folder(final: Path, rank: int) -> Iterator[Path]:
    folder = final.parent / STAGING_DIR / f"{final.name}{RANK_SUFFIX}{rank}"
    delete_folder(folder)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        remove_if_empty(folder.parent)


def gather_files_to_writer(folder: Path, role: WriterRole, action: str) -> None:
    names = all_gather_object(sorted(list_files(folder)))
    contents: dict[str, bytes] = {}
    with raise_on_all_ranks(action):
        if role.sends_files:
            existing = set(names[role.writer_rank or 0])
            contents = {name: (folder / name).read_bytes() for name in list_files(folder) if name not in existing}
    sent = all_gather_object((role.writer_rank or 0, contents))
    with raise_on_all_ranks(action):
        for receiver, files in sent if role.is_writer else ():
            for name, content in files.items() if receiver == role.writer_rank else ():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)
