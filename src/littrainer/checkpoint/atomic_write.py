"""Folders of checkpoints appear complete or not at all: they are written in another folder, and then renamed.

A folder that is written, replaced or deleted is in `.unfinished` in the run's folder, under the checkpoint's own name.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from littrainer.checkpoint.checksums import MANIFEST_NAME, ManifestBuilder, fsync_paths, list_files, readable_manifest
from littrainer.checkpoint.layout import TRAINER_STATE_NAME

logger = logging.getLogger(__name__)

STAGING_DIR = ".unfinished"
DELETED_SUFFIX = ".deleted"
# Before the rank of a process that writes its part of a checkpoint into a folder of its own.
RANK_SUFFIX = ".process"
TORCH_WRITE_ERRORS = ("iostream error", "inline_container.cc", "file write failed")
DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
# Deleted first: a folder without both is never taken for a checkpoint.
MARKER_FILES = (MANIFEST_NAME, TRAINER_STATE_NAME)
STAGING_PATH = re.compile(rf"{re.escape(STAGING_DIR + os.sep)}|(?<=\d){re.escape(RANK_SUFFIX)}\d+")
# Entries of this package in `.unfinished`; all others stay.
STAGING_ENTRY = re.compile(rf".+-\d+({re.escape(DELETED_SUFFIX)}|{re.escape(RANK_SUFFIX)}\d+)?")


class DiskFull(OSError):
    """The disk had no space for a checkpoint; the message names the checkpoint, the file and the free space."""


def rewrite_staging_paths(record: logging.LogRecord) -> bool:
    """Let a logged message name the final folder of a checkpoint; a filter, which keeps each record."""
    text = record.getMessage()
    if STAGING_DIR in text:
        record.msg, record.args = STAGING_PATH.sub("", text), ()
    return True


@contextlib.contextmanager
def staged_checkpoint(final: Path) -> Iterator[ManifestBuilder]:
    """Write a checkpoint in the folder of a manifest, which replaces `final` when the block ends without an exception.

    An earlier folder of that name exists until then; after an exception it is unchanged.

    Raises:
        DiskFull: the disk is full.
    """
    unfinished = final.parent / STAGING_DIR
    folder = unfinished / final.name
    builder, is_complete = ManifestBuilder(folder), False
    handlers = [*logging.getLogger("transformers").handlers, *logging.getLogger().handlers]
    # A new object, which another save does not remove.
    log_filter = functools.partial(rewrite_staging_paths)
    for handler in handlers:
        handler.addFilter(log_filter)
    try:
        with explain_full_disk(folder, final):
            delete_folder(folder)
            folder.mkdir(parents=True)
            yield builder
            _copy_user_files(final, folder)
            builder.complete(1 + max((read_sequence(other) or 0 for other in _list_siblings(final)), default=0))
            is_complete = True
            _move_into_place(folder, final)
    except BaseException:
        # The threads may still read the files that are deleted next.
        builder.close()
        # The next run moves a complete folder that could not be renamed.
        if final.exists() or not is_complete:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        for handler in handlers:
            handler.removeFilter(log_filter)
        builder.close()
        remove_if_empty(unfinished)


@contextlib.contextmanager
def staged_folder(final: Path) -> Iterator[Path]:
    """Yield the folder of `staged_checkpoint` alone."""
    with staged_checkpoint(final) as builder:
        yield builder.folder


def clean_staging_dir(run_dir: Path) -> None:
    """Remove what a killed run left half-written or half-deleted, and rename the folders that were complete.

    No other run may write to the folder.
    """
    unfinished = run_dir / STAGING_DIR
    if not unfinished.is_dir():
        return
    for entry in sorted(unfinished.iterdir()):
        match = STAGING_ENTRY.fullmatch(entry.name)
        if match is None:
            continue
        final = run_dir / entry.name
        if match[1] is None and (entry / MANIFEST_NAME).exists() and not _has_marker(final):
            delete_folder(final)
            os.rename(entry, final)
            logger.warning("%s is complete: a run was stopped when it was about to put it in its place.", final)
            continue
        logger.info("Removing %s, which a run left behind that was stopped while it wrote.", entry)
        try:
            delete_folder(entry)
        except OSError as error:
            logger.warning("%s, left behind by an earlier run, could not be deleted: %s.", entry, error)
    remove_if_empty(unfinished)


def move_aside(folder: Path) -> Path:
    """Move a folder to a path at which it is not taken for a checkpoint, and return the path."""
    aside = folder.parent / STAGING_DIR / f"{folder.name}{DELETED_SUFFIX}"
    aside.parent.mkdir(exist_ok=True)
    try:
        delete_folder(aside)
        os.rename(folder, aside)
    except OSError as error:
        # A folder in the lower layer of an overlay can only be deleted.
        if error.errno != errno.EXDEV:
            remove_if_empty(aside.parent)
            raise
        for name in MARKER_FILES:
            (folder / name).unlink(missing_ok=True)
        delete_folder(folder)
    return aside


def delete_atomically(folder: Path) -> None:
    """Delete a checkpoint so that no half of it is ever found under its name."""
    aside = move_aside(folder)
    try:
        delete_folder(aside)
    finally:
        remove_if_empty(aside.parent)


def delete_or_warn(aside: Path) -> None:
    """Delete a checkpoint that was set aside; if that fails, a warning names it."""
    try:
        delete_folder(aside)
    except OSError as error:
        logger.warning("An older checkpoint, now %s, could not be deleted: %s. Delete it by hand.", aside, error)
    remove_if_empty(aside.parent)


def delete_folder(path: Path) -> None:
    """Delete a folder, or a link to one, if it exists."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


def remove_if_empty(folder: Path) -> None:
    """Remove a folder that has no entries."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def read_sequence(folder: str | Path) -> int | None:
    """Return the position of a checkpoint in the order of writing; None if it has no readable manifest."""
    return readable_manifest(Path(folder)).sequence


def _has_marker(folder: Path) -> bool:
    return any((folder / name).exists() for name in MARKER_FILES)


def _move_into_place(folder: Path, final: Path) -> None:
    aside = None
    try:
        if os.path.lexists(final):
            aside = move_aside(final)
        os.rename(folder, final)
    except BaseException:
        if aside is not None and aside.exists() and not final.exists():
            os.rename(aside, final)
        raise
    fsync_paths(final.parent)
    if aside is not None:
        delete_or_warn(aside)


def _copy_user_files(earlier: Path, folder: Path) -> None:
    """Copy files that a user put into the folder that is replaced; those of the earlier checkpoint are outdated."""
    if not os.path.isdir(earlier):
        return
    manifest = readable_manifest(earlier)
    if manifest.sequence is None and _has_marker(earlier):
        return
    # The CheckpointManager of transformers marks the folder so before it saves.
    outdated = {"checkpoint-is-incomplete.txt", *manifest.files}
    for name in list_files(earlier):
        if name not in outdated and not (folder / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(earlier / name, folder / name)


def _list_siblings(final: Path) -> list[str]:
    try:
        with os.scandir(final.parent) as entries:
            return [entry.path for entry in entries if "-" in entry.name and entry.is_dir()]
    except OSError:
        # A folder that cannot be listed is taken as empty, as by glob.
        return []


# ---- A full disk -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def explain_full_disk(folder: Path, final: Path) -> Iterator[None]:
    """Turn an error of the block that comes of a full disk into a DiskFull; `final` is written in `folder`."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, DiskFull) or not _is_disk_full(error):
            raise
        files = [folder / name for name in list_files(folder)]
        last = max(files, key=lambda path: path.stat().st_mtime_ns, default=folder)
        if isinstance(error, OSError) and error.filename:
            last = Path(os.fsdecode(error.filename))
        written = sum(path.stat().st_size for path in files)
        free = shutil.disk_usage(final.parent).free
        raise DiskFull(
            errno.ENOSPC,
            f"{os.strerror(errno.ENOSPC)}: {final} could not be written beyond {last.name}, after {written:,} bytes "
            f"({free:,} bytes are free). Earlier checkpoints are as they were. Make room, or lower save_total_limit, "
            "and go on with resume_from_checkpoint=True",
            str(final / last.name),
        ) from error


def _is_disk_full(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in DISK_FULL_ERRORS:
        return True
    # safetensors raises its own exceptions with the system's message, torch with these.
    text = f"{error} {error.__context__}"
    if any(os.strerror(number) in text for number in DISK_FULL_ERRORS):
        return True
    return isinstance(error, RuntimeError) and any(phrase in text for phrase in TORCH_WRITE_ERRORS)
