"""A checkpoint's folder appears complete or not at all: it is written elsewhere, sealed, and then renamed.

What is being written, replaced or deleted lies in `.unfinished` in the run's folder, under the checkpoint's own name.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from littrainer.checkpoint.checksums import MANIFEST_NAME, Seal, files_in, readable_manifest, to_disk
from littrainer.checkpoint.layout import PREFIX_CHECKPOINT_DIR, TRAINER_STATE_NAME

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Below this spread in seconds modification times say nothing about which checkpoint is older.
SMALLEST_TELLING_SPREAD = 1.0

UNFINISHED_DIR = ".unfinished"
DELETED = ".deleted"
# Before the rank of one of several processes, which writes its part of a checkpoint there.
PART = ".process"
# Freeing the room of large files takes the system as long as a part of writing them.
_deletions: list[Future[None]] = []
# Asked before a checkpoint is deleted, each with those of which it said that they stay until it says otherwise.
keepers: dict[Callable[[str], bool], set[str]] = {}
FAILED_WRITES_OF_TORCH = ("iostream error", "inline_container.cc", "file write failed")
# Deleted first: nobody takes for whole what has neither of them.
TELLING_FILES = (MANIFEST_NAME, TRAINER_STATE_NAME)
IN_STAGING = re.compile(rf"{re.escape(UNFINISHED_DIR + os.sep)}|(?<=\d){re.escape(PART)}\d+")
# What this package puts into the folder for unfinished ones; anything else there is left alone.
OWN_ENTRY = re.compile(rf".+-\d+({re.escape(DELETED)}|{re.escape(PART)}\d+)?")


class DiskFull(OSError):
    """The disk had no room for a checkpoint; the message names the checkpoint, the file and the room that is left."""


def name_final_folder(record: logging.LogRecord) -> bool:
    """Let a logged message name the final folder of a checkpoint instead of the one where it is written."""
    text = record.getMessage()
    if UNFINISHED_DIR in text:
        record.msg, record.args = IN_STAGING.sub("", text), ()
    return True


@dataclass
class StagedCheckpoint:
    """A checkpoint that is being written, or one process's part of it, which another one seals if `seal` is None."""

    folder: Path
    seal: Seal | None = None


@contextlib.contextmanager
def staged_checkpoint(final: Path) -> Iterator[StagedCheckpoint]:
    """Write a checkpoint in another folder, which takes its place when the block ends without an exception.

    An earlier folder of that name is there until then; after an exception it is as it was.

    Raises:
        OSError: the disk is full; the error names the checkpoint and the file.
    """
    unfinished = final.parent / UNFINISHED_DIR
    folder = unfinished / final.name
    seal, is_complete = Seal(folder), False
    for handler in [*logging.getLogger("transformers").handlers, *logging.getLogger().handlers]:
        handler.addFilter(name_final_folder)
    try:
        with naming_full_disk(folder, final):
            # Their room may be needed.
            delete_kept()
            wait_for_deletions()
            delete_folder(folder)
            folder.mkdir(parents=True)
            yield StagedCheckpoint(folder, seal)
            _carry_over(final, folder)
            others = [sequence_of(final.parent / other) or 0 for other in _folders_in(final.parent) if "-" in other]
            seal.complete(1 + max(others, default=0))
            is_complete = True
            _put_in_place(folder, final)
    except BaseException:
        # The threads may still read what is deleted next.
        seal.close()
        # One that is complete and could not take its place is put there by the next run.
        if final.exists() or not is_complete:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        seal.close()
        with contextlib.suppress(OSError):
            unfinished.rmdir()


@contextlib.contextmanager
def staged_folder(final: Path) -> Iterator[Path]:
    """Yield the folder of `staged_checkpoint` alone."""
    with staged_checkpoint(final) as staged:
        yield staged.folder


@contextlib.contextmanager
def naming_full_disk(folder: Path, final: Path) -> Iterator[None]:
    """Turn an error of the block that comes of a full disk into a DiskFull; `final` is written in `folder`."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, DiskFull) or not _says_disk_is_full(error):
            raise
        raise _disk_full(error, folder, final) from error


def clean_unfinished(run_dir: Path) -> None:
    """Remove what a run that was killed left half-written or half-deleted, and put in its place what was complete.

    Only for a folder that no other run writes to now.
    """
    unfinished = run_dir / UNFINISHED_DIR
    if not unfinished.is_dir():
        return
    for entry in sorted(unfinished.iterdir()):
        match = OWN_ENTRY.fullmatch(entry.name)
        final = run_dir / entry.name
        if match is None:
            continue
        if (
            match[1] is None
            and (entry / MANIFEST_NAME).exists()
            and not any(map(os.path.exists, _telling_files(final)))
        ):
            delete_folder(final)
            os.rename(entry, final)
            logger.warning("%s is complete: a run was stopped when it was about to put it in its place.", final)
            continue
        logger.info("Removing %s, which a run left behind that was stopped while it wrote.", entry)
        try:
            delete_folder(entry)
        except OSError as error:
            logger.warning("%s, left behind by an earlier run, could not be deleted: %s.", entry, error)
    with contextlib.suppress(OSError):
        unfinished.rmdir()


def set_aside_and_delete(folder: Path, in_background: bool = False) -> None:
    """Delete a checkpoint so that no half of it is ever found under its name.

    Parameters:
        in_background: return when it is gone from its place; `wait_for_deletions` waits for the rest.

    Raises:
        OSError: it could not be deleted; in the background that is a warning.
    """
    unfinished = folder.parent / UNFINISHED_DIR
    # Two may have the same name, one after the other.
    wait_for_deletions()
    unfinished.mkdir(exist_ok=True)
    try:
        aside = _set_aside(folder)
        if not in_background:
            delete_folder(aside)
    finally:
        with contextlib.suppress(OSError):
            unfinished.rmdir()
    if in_background:
        _deletions.append(in_thread(functools.partial(_delete_or_warn, aside), f"deleting {folder.name}"))


def wait_for_deletions() -> None:
    """Return when no deletion goes on in the background."""
    for deletion in tuple(_deletions):
        deletion.result()
        with contextlib.suppress(ValueError):
            _deletions.remove(deletion)


def in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Do a piece of work in a new thread; the process does not end before it."""
    executor = ThreadPoolExecutor(1, thread_name_prefix=name)
    work_in_thread = executor.submit(work)
    executor.shutdown(wait=False)
    return work_in_thread


def _delete_or_warn(aside: Path) -> None:
    try:
        delete_folder(aside)
    except OSError as error:
        logger.warning("An older checkpoint, now %s, could not be deleted: %s. Delete it by hand.", aside, error)
    with contextlib.suppress(OSError):
        aside.parent.rmdir()


def delete_folder(path: Path) -> None:
    """Delete a folder, or a link to one, if it is there."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


def _telling_files(folder: Path) -> list[Path]:
    return [folder / name for name in TELLING_FILES]


def _set_aside(folder: Path) -> Path:
    """Move a folder to a place where it is not taken for a checkpoint, and return that place."""
    aside = folder.parent / UNFINISHED_DIR / f"{folder.name}{DELETED}"
    delete_folder(aside)
    try:
        os.rename(folder, aside)
    except OSError as error:
        # A folder in the lower layer of an overlay can only be deleted.
        if error.errno != errno.EXDEV:
            raise
        for path in _telling_files(folder):
            path.unlink(missing_ok=True)
        delete_folder(folder)
    return aside


def _put_in_place(folder: Path, final: Path) -> None:
    aside = None
    try:
        if os.path.lexists(final):
            aside = _set_aside(final)
        os.rename(folder, final)
    except BaseException:
        if aside is not None and aside.exists() and not final.exists():
            os.rename(aside, final)
        raise
    to_disk(final.parent)
    if aside is not None:
        _delete_or_warn(aside)


def _carry_over(earlier: Path, folder: Path) -> None:
    # Files that a user put into the folder that is replaced; those of an earlier checkpoint itself are outdated.
    if not os.path.isdir(earlier):
        return
    manifest = readable_manifest(earlier)
    if manifest.sequence is None and any(map(os.path.exists, _telling_files(earlier))):
        return
    # transformers' CheckpointManager marks the folder so before it saves.
    outdated = {"checkpoint-is-incomplete.txt", *manifest.files}
    for name in files_in(earlier):
        if name not in outdated and not (folder / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(earlier / name, folder / name)


def sequence_of(folder: Path) -> int | None:
    """Return the place of a checkpoint in the order of writing; None if it has no readable manifest."""
    return readable_manifest(folder).sequence


def _folders_in(folder: str | Path) -> list[str]:
    # As glob does, find nothing in a folder that is not there or cannot be read.
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return [entry.name for entry in entries if entry.is_dir()]
    return []


def _disk_full(error: BaseException, folder: Path, final: Path) -> DiskFull:
    files = [folder / name for name in files_in(folder)]
    last = max(files, key=lambda path: path.stat().st_mtime_ns, default=folder)
    if isinstance(error, OSError) and error.filename:
        last = Path(os.fsdecode(error.filename))
    written = sum(path.stat().st_size for path in files)
    free = shutil.disk_usage(final.parent).free
    return DiskFull(
        errno.ENOSPC,
        f"{os.strerror(errno.ENOSPC)}: {final} could not be written beyond {last.name}, after {written:,} bytes "
        f"({free:,} bytes are free). Earlier checkpoints are as they were. Make room, or lower save_total_limit, and "
        "go on with resume_from_checkpoint=True",
        str(final / last.name),
    )


def _says_disk_is_full(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    # safetensors raises its own exceptions with the system's words, torch with these.
    words = f"{error} {error.__context__}"
    if any(os.strerror(number) in words for number in (errno.ENOSPC, errno.EDQUOT)):
        return True
    return isinstance(error, RuntimeError) and any(phrase in words for phrase in FAILED_WRITES_OF_TORCH)


def sort_checkpoints(
    output_dir: str | Path,
    checkpoint_prefix: str = PREFIX_CHECKPOINT_DIR,
    use_mtime: bool = False,
    best_model_checkpoint: str | None = None,
) -> list[str]:
    """Return checkpoint directories, the oldest first.

    Parameters:
        output_dir: the folder that holds them.
        checkpoint_prefix: what stands before the step in their names.
        use_mtime: order by when they were written, as their manifests say, or by modification times if one has no
            manifest and the times tell them apart; else by step.
        best_model_checkpoint: moved to the last place but one, out of the way of rotation.
    """
    name = re.compile(rf"{re.escape(checkpoint_prefix)}-(\d+)")
    steps: dict[str, int] = {}
    for entry in _folders_in(output_dir):
        match = name.fullmatch(entry)
        if match:
            steps[str(Path(output_dir, entry))] = int(match.group(1))
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
    also_kept: Collection[str] = (),
) -> None:
    """Delete the oldest checkpoints beyond `save_total_limit`; the newest and the best one always stay.

    If the weights of all that would stay are known not to be finite, the newest one before them stays too.

    Parameters:
        save_total_limit: checkpoints to keep; None or 0 keeps all.
        newest: the checkpoint that was written last, if that is known.
        in_background: free their room while this returns; they are gone from their places when it does.
        also_kept: further ones that stay, whatever the limit says.
    """
    if not save_total_limit or save_total_limit < 0:
        return
    ordered = sort_checkpoints(output_dir, checkpoint_prefix, use_mtime)
    kept = {*ordered[-1:]} if newest is None else {str(Path(newest))}
    if best_model_checkpoint is not None:
        kept.add(str(Path(best_model_checkpoint)))
    surplus = len(ordered) - max(save_total_limit, len(kept))
    healthy = newest_healthy_of(ordered if newest is None else [*ordered, str(Path(newest))])
    for path in [path for path in ordered if path not in kept][: max(surplus, 0)]:
        if path != healthy and path not in also_kept:
            delete_checkpoint(path, in_background)


def newest_healthy_of(ordered: Sequence[str]) -> str | None:
    """Return the last checkpoint that is not thinned and whose weights are not known to be sick; None if none is."""
    for path in reversed(ordered):
        manifest = readable_manifest(Path(path))
        if not manifest.is_thinned and manifest.weights_are_finite is not False:
            return path
    return None


def delete_checkpoint(path: str, in_background: bool = False) -> None:
    """Delete one checkpoint directory; what cannot be deleted is named in a warning, and training goes on."""
    for keeps, kept in keepers.items():
        if keeps(path):
            kept.add(path)
            return
        kept.discard(path)
    logger.info(f"Deleting older checkpoint [{path}] due to args.save_total_limit")
    try:
        set_aside_and_delete(Path(path), in_background)
    except OSError as error:
        logger.warning("The older checkpoint %s could not be deleted: %s. Delete it by hand.", path, error)


def delete_kept() -> bool:
    """Delete the checkpoints that had to stay and no longer have to; return whether there were any."""
    kept = [path for of_one in keepers.values() for path in of_one]
    for path in kept:
        delete_checkpoint(path)
    return not all(map(os.path.isdir, kept))
