"""Atomic checkpoint folders: written in `.unfinished` in the run's folder, then renamed."""

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

from littrainer.checkpoint.checksums import (
    MANIFEST_NAME,
    ManifestBuilder,
    fsync_paths,
    list_files,
    read_manifest_or_empty,
)
from littrainer.checkpoint.layout import TRAINER_STATE_NAME

logger = logging.getLogger(__name__)

STAGING_DIR = ".unfinished"
DELETED_SUFFIX = ".deleted"
# Suffix, before the rank, of the staging folders of processes that send files to the writer.
RANK_SUFFIX = ".process"
TORCH_WRITE_ERRORS = ("iostream error", "inline_container.cc", "file write failed")
DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
# Files that make a folder a checkpoint. A deletion in place begins with them, so that an interrupt leaves no damaged
# checkpoint.
MARKER_FILES = (MANIFEST_NAME, TRAINER_STATE_NAME)
# Parts of a path that log messages leave out.
STAGING_PATH = re.compile(rf"{re.escape(STAGING_DIR + os.sep)}|(?<=\d){re.escape(RANK_SUFFIX)}\d+")
STAGING_ENTRY = re.compile(rf".+-\d+({re.escape(DELETED_SUFFIX)}|{re.escape(RANK_SUFFIX)}\d+)?")


class DiskFull(OSError):
    """An error of a full disk, with the checkpoint, the file and the free space."""


def rewrite_staging_paths(record: logging.LogRecord) -> bool:
    """Show a checkpoint's final path in place of its staging path, as a log filter."""
    text = record.getMessage()
    if STAGING_DIR in text:
        record.msg, record.args = STAGING_PATH.sub("", text), ()
    return True


@contextlib.contextmanager
def write_checkpoint_atomically(final: Path) -> Iterator[ManifestBuilder]:
    """Yield the ManifestBuilder of a new staging folder. The folder replaces `final` unless the block raises."""
    staging = final.parent / STAGING_DIR
    folder = staging / final.name
    builder, is_complete = ManifestBuilder(folder), False
    handlers = [*logging.getLogger("transformers").handlers, *logging.getLogger().handlers]
    # A new object for each save, so that the end of a save removes only its own filter.
    log_filter = functools.partial(rewrite_staging_paths)
    for handler in handlers:
        handler.addFilter(log_filter)
    try:
        with explain_full_disk(folder, final):
            delete_folder(folder)
            folder.mkdir(parents=True)
            yield builder
            _copy_user_files(final, folder)
            sequences = [read_manifest_or_empty(other).sequence or 0 for other in final.parent.glob("*-*")]
            builder.complete(1 + max(sequences, default=0))
            is_complete = True
            _move_into_place(folder, final)
    except BaseException:
        builder.close()
        # A complete folder that could not be renamed is kept if it is the only copy: the next run renames it.
        if final.exists() or not is_complete:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        for handler in handlers:
            handler.removeFilter(log_filter)
        builder.close()
        remove_if_empty(staging)


@contextlib.contextmanager
def write_folder_atomically(final: Path) -> Iterator[Path]:
    with write_checkpoint_atomically(final) as builder:
        yield builder.folder


def clean_staging_dir(run_dir: Path) -> None:
    """Delete a killed run's incomplete folders, and move its complete folders into place; the caller has the lock."""
    staging = run_dir / STAGING_DIR
    if not staging.is_dir():
        return
    for entry in sorted(staging.iterdir()):
        match = STAGING_ENTRY.fullmatch(entry.name)
        if match is None:
            continue
        final = run_dir / entry.name
        if match[1] is None and (entry / MANIFEST_NAME).exists() and not _has_marker(final):
            delete_folder(final)
            os.rename(entry, final)
            logger.warning("%s is complete: an earlier run was stopped before it could rename it.", final)
            continue
        logger.info("Removing %s, which a stopped run left incomplete.", entry)
        try:
            delete_folder(entry)
        except OSError as error:
            logger.warning("%s, left by an earlier run, could not be deleted: %s.", entry, error)
    remove_if_empty(staging)


def move_aside(folder: Path) -> Path:
    """Move a checkpoint into `.unfinished`, and return its path there; delete it if folders cannot be moved."""
    aside = folder.parent / STAGING_DIR / f"{folder.name}{DELETED_SUFFIX}"
    aside.parent.mkdir(exist_ok=True)
    try:
        delete_folder(aside)
        os.rename(folder, aside)
    except OSError as error:
        # A folder in the lower layer of an overlay file system can be deleted but not renamed.
        if error.errno != errno.EXDEV:
            remove_if_empty(aside.parent)
            raise
        for name in MARKER_FILES:
            (folder / name).unlink(missing_ok=True)
        delete_folder(folder)
    return aside


def delete_atomically(folder: Path) -> None:
    aside = move_aside(folder)
    try:
        delete_folder(aside)
    finally:
        remove_if_empty(aside.parent)


def delete_or_warn(aside: Path) -> None:
    try:
        delete_folder(aside)
    except OSError as error:
        logger.warning("An older checkpoint, now %s, could not be deleted: %s. Delete it by hand.", aside, error)
    remove_if_empty(aside.parent)


def delete_folder(path: Path) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


def remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


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
    if not os.path.isdir(earlier):
        return
    manifest = read_manifest_or_empty(earlier)
    # Without a readable manifest the user's files cannot be distinguished from the checkpoint's.
    if manifest.sequence is None and _has_marker(earlier):
        return
    # The CheckpointManager of transformers writes this marker before a save.
    outdated = {"checkpoint-is-incomplete.txt", *manifest.files}
    for name in list_files(earlier):
        if name not in outdated and not (folder / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(earlier / name, folder / name)


# ---- Full disk -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def explain_full_disk(folder: Path, final: Path) -> Iterator[None]:
    """Turn the error of a full disk into DiskFull."""
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
            f"({free:,} bytes are free). Earlier checkpoints are unchanged. Free disk space, or lower "
            "save_total_limit, and continue with resume_from_checkpoint=True",
            str(final / last.name),
        ) from error


def _is_disk_full(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in DISK_FULL_ERRORS:
        return True
    text = f"{error} {error.__context__}"
    if any(os.strerror(number) in text for number in DISK_FULL_ERRORS):
        return True
    return isinstance(error, RuntimeError) and any(phrase in text for phrase in TORCH_WRITE_ERRORS)
