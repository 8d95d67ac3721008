"""The store of a run's checkpoints. Only a single run may write to it at a time; a URL may hold a copy.

The lock ends with its process. On a file system without file locks several runs are accepted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import logging
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from littrainer.checkpoint.atomic_write import (
    STAGING_DIR,
    clean_staging_dir,
    delete_atomically,
    delete_or_warn,
    move_aside,
    write_checkpoint_atomically,
)
from littrainer.checkpoint.checksums import ManifestBuilder
from littrainer.checkpoint.layout import checkpoint_step, list_checkpoints
from littrainer.checkpoint.remote import RemoteRun
from littrainer.runtime.remote_folder import RemoteFolderError

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOCK_NAME = ".littrainer_running"
MAX_LOCK_TRIES = 10


class Store:
    """The folder of a run's checkpoints.

    Parameters:
        lock: descriptor of the lock file, if this process locks the folder.
    """

    def __init__(self, run_dir: Path, lock: int | None = None) -> None:
        self.run_dir, self.lock = run_dir, lock
        # Resolved now, since the script may change the working directory.
        self._key = run_dir.resolve()
        self.remote: RemoteRun | None = None
        self._deletions: list[Future[None]] = []

    @contextlib.contextmanager
    def open_staging_folder(self, final: Path) -> Iterator[ManifestBuilder]:
        """Stage a checkpoint after deletions, which free disk space."""
        self.delete_deferred()
        self.wait_for_deletions()
        with write_checkpoint_atomically(final) as builder:
            yield builder

    def delete(self, path: str | Path) -> None:
        """Delete a checkpoint, in a thread if the folder is locked; warn of errors.

        If the folder has a URL, the deletion waits until this checkpoint or a newer checkpoint is uploaded.
        """
        if self.remote is not None and self.remote.should_defer_deletion(str(path)):
            return
        logger.info(f"Deleting older checkpoint [{path}] due to args.save_total_limit")
        # The deletion of an earlier checkpoint with this name may still use the folder in `.unfinished`.
        self.wait_for_deletions()
        try:
            if self.lock is None:
                delete_atomically(Path(path))
            else:
                delete = functools.partial(delete_or_warn, move_aside(Path(path)))
                self._deletions.append(run_in_thread(delete, f"deleting {Path(path).name}"))
        except OSError as error:
            logger.warning("The older checkpoint %s could not be deleted: %s. Delete it by hand.", path, error)

    def wait_for_deletions(self) -> None:
        for deletion in tuple(self._deletions):
            deletion.result()
            with contextlib.suppress(ValueError):
                self._deletions.remove(deletion)

    def delete_deferred(self) -> bool:
        """Retry deferred deletions; return whether any checkpoint was deleted."""
        deferred = [] if self.remote is None else list(self.remote.deferred)
        for path in deferred:
            self.delete(path)
        return not all(map(os.path.isdir, deferred))

    @contextlib.contextmanager
    def upload(self, hang_timeout: float) -> Iterator[RemoteRun | None]:
        """Upload the folder to its URL during the block; yield None inside another such block."""
        if self.remote is not None:
            yield None
            return
        run = RemoteRun(self.run_dir, hang_timeout)
        logger.info("Checkpoints are written to %s and uploaded to %s", self.run_dir, run.remote.url)
        run.claim()
        # Rotation keeps these checkpoints of earlier trainings at the URL, until this training resumes from any of them
        # and `on_resume` clears the dict.
        run.earlier = {name: run.read_local_manifest(name) for name in run.local_checkpoints()}
        self.remote = run
        try:
            yield run
        except BaseException as error:
            if not isinstance(error, RemoteFolderError):
                reason = f"{type(error).__name__}: {error}".rstrip(": ")
                logger.warning("Finishing uploads of %s before %s ends this run.", self.run_dir, reason)
                try:
                    self.finish_uploads()
                except Exception as further:
                    logger.warning("%s", further)
            raise
        finally:
            self.remote = None
            run.release()

    def finish_uploads(self) -> None:
        """Wait for uploads, and run deferred deletions."""
        if self.remote is not None:
            self.remote.finish()
            # The second `finish` deletes these checkpoints at the URL too.
            if self.delete_deferred():
                self.remote.finish()

    def refuse_foreign_folders(self, steps: range) -> None:
        """Raise an OSError if `.unfinished` or a checkpoint of these steps is not writable.

        Processes without the lock check nothing.
        """
        if self.lock is None:
            return
        try:
            checkpoints = list_checkpoints(self.run_dir)
        except OSError:
            checkpoints = []
        entries = [path for path in checkpoints if checkpoint_step(path) in steps]
        for path in (self.run_dir / STAGING_DIR, *entries):
            if path.is_dir() and not os.access(path, os.W_OK | os.X_OK):
                raise make_unwritable_error(
                    self.run_dir, PermissionError(errno.EACCES, f"{path.name} in it is another user's")
                )

    def close(self) -> None:
        try:
            self.wait_for_deletions()
        finally:
            if self.lock is not None:
                _locked_stores.pop(self._key, None)
                # The file is deleted before it is unlocked: a process that has opened it checks, in `_open_lock`, that
                # it still exists.
                with contextlib.suppress(OSError):
                    (self._key / LOCK_NAME).unlink()
                os.close(self.lock)
                self.lock = None


def run_in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Run a function in a thread, for which the process waits at exit."""
    executor = ThreadPoolExecutor(1, thread_name_prefix=name)
    result = executor.submit(work)
    executor.shutdown(wait=False)
    return result


# ---- Locks -----------------------------------------------------------------------------------------------------------

_locked_stores: dict[Path, Store] = {}


def _forget_locks_in_child() -> None:
    # A forked child would hold the lock after its parent is killed, and has no deletion threads. Closing the child's
    # copy of the descriptor does not unlock the file.
    for store in _locked_stores.values():
        with contextlib.suppress(OSError):
            os.close(store.lock or -1)
        store.lock = None
        store._deletions.clear()
    _locked_stores.clear()


os.register_at_fork(after_in_child=_forget_locks_in_child)


def get_store(run_dir: str | Path) -> Store:
    """Return this process's locked store of a folder, or a new store without a lock."""
    return _locked_stores.get(Path(run_dir).resolve()) or Store(Path(run_dir))


@contextlib.contextmanager
def open_store(run_dir: Path) -> Iterator[Store]:
    """Make and lock a run's folder, unless this process has locked it, and clean up after a killed run."""
    if (store := _locked_stores.get(run_dir.resolve())) is not None:
        yield store
        return
    store = lock_folder(run_dir)
    try:
        yield store
    finally:
        store.close()


def lock_folder(run_dir: Path) -> Store:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        descriptor, is_locked = _open_lock(run_dir.resolve() / LOCK_NAME, run_dir)
    except OSError as error:
        raise make_unwritable_error(run_dir, error) from error
    store = _locked_stores[run_dir.resolve()] = Store(run_dir, descriptor)
    # Without file locks another run may be writing to the staging folder.
    if is_locked:
        clean_staging_dir(run_dir)
    return store


def is_abandoned(run_dir: Path) -> bool:
    """Return whether no process holds a folder's lock; False if unknown."""
    # On a network file system, closing a second descriptor of the lock file would release the lock.
    if get_store(run_dir).lock is not None:
        return False
    try:
        descriptor = os.open(run_dir / LOCK_NAME, os.O_RDWR)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    try:
        return _try_lock(descriptor) is True
    finally:
        os.close(descriptor)


def make_unwritable_error(run_dir: Path, error: OSError) -> OSError:
    return OSError(
        error.errno,
        f"No checkpoint can be written to {run_dir} ({error.strerror}). Give an output_dir that can be written to, or "
        "train with save_strategy='no'",
        str(run_dir),
    )


def _open_lock(path: Path, run_dir: Path) -> tuple[int, bool]:
    for _ in range(MAX_LOCK_TRIES):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            is_locked = _try_lock(descriptor)
            if is_locked is False:
                raise _make_locked_error(os.read(descriptor, 1000).decode() or "a process", run_dir)
            # The holder may have deleted the file meanwhile.
            if path.exists() and os.path.samestat(os.fstat(descriptor), os.stat(path)):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return descriptor, bool(is_locked)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    raise _make_locked_error("a process that has just begun", run_dir)


def _try_lock(descriptor: int) -> bool | None:
    """Return whether the lock succeeded; None without file locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES):
            return False
        logger.info("There are no file locks (%s), so a second run that writes to the folder is not detected.", error)
        return None
    return True


def _make_locked_error(holder: str, run_dir: Path) -> RuntimeError:
    return RuntimeError(
        f"Another run, {holder}, is writing its checkpoints to {run_dir}. Two runs there would delete each other's "
        "checkpoints and resume from them. Give this run another output_dir, or wait for the other one to end."
    )
