"""A run's claim on the folder of its checkpoints, so that two runs do not write into one.

The claim is a lock that ends with the process that holds it, however it ends. If the file system knows no locks,
nothing is refused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from littrainer.arguments.choices import SaveStrategy
from littrainer.checkpoint.atomic_write import clean_unfinished, wait_for_deletions
from littrainer.checkpoint.distributed_save import leads, not_writable
from littrainer.checkpoint.remote import uploaded_run
from littrainer.distributed.agreement import failing_together, while_others_wait
from littrainer.distributed.environment import hang_timeout
from littrainer.errors.remote_folder import address_of

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments


logger = logging.getLogger(__name__)

CLAIM_NAME = ".littrainer_running"
# How often a claim is tried whose file is deleted by its holder at that moment.
TRIES = 10
# The folders that this process has claimed, each with the descriptor of its lock.
_held: dict[Path, int] = {}


def _forget_in_child() -> None:
    # A forked worker would hold the lock on after its parent was killed; closing its copy does not release it.
    for descriptor in _held.values():
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)


@contextlib.contextmanager
def claimed_for_training(
    args: TrainingArguments, run_dir: Callable[[], str], write_record: Callable[[Path], None]
) -> Iterator[None]:
    """`claimed` for the length of a training that saves checkpoints or uploads, by the process that writes them.

    Parameters:
        run_dir: gives the folder; it is only asked if something is saved.
        write_record: writes what the run begins with into the folder.
    """
    saves = args.save_strategy != SaveStrategy.NO or args.save_minutes is not None or args.enable_jit_checkpoint
    is_at_address = address_of(args.output_dir) is not None
    if not saves and not is_at_address:
        yield
        return
    folder, remote = Path(run_dir()), None
    with contextlib.ExitStack() as claims:
        with failing_together(f"claiming {folder} for checkpoints"):
            if leads(args, folder):
                claims.enter_context(claimed(folder))
                if is_at_address:
                    remote = claims.enter_context(uploaded_run(folder, hang_timeout(args)))
                write_record(folder)
        yield
        if is_at_address:
            with failing_together(f"uploading {folder}"):
                while_others_wait(lambda: None if remote is None else remote.finish())
        # Who looks into the folder next finds nothing half-deleted in it, in any process.
        with failing_together(f"tidying up {folder}"):
            claims.close()


@contextlib.contextmanager
def claimed(run_dir: Path) -> Iterator[None]:
    """Hold the claim on the folder of a run, and first remove what a killed run left unfinished in it.

    The folder is made if it does not exist. Within another claim of this process on it nothing more is done.

    Raises:
        OSError: nothing can be written there.
        RuntimeError: another run writes there.
    """
    if run_dir.resolve() in _held:
        yield
        return
    with contextlib.ExitStack() as ends:
        ends.callback(give_back_claim, take_claim(run_dir))
        ends.callback(wait_for_deletions)
        yield


def take_claim(run_dir: Path) -> Path:
    """Begin to hold the claim, as `claimed` does; return what `give_back_claim` takes."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        key = run_dir.resolve()
        _held[key], is_locked = _lock(key / CLAIM_NAME, run_dir)
    except OSError as error:
        raise not_writable(run_dir, error) from error
    if is_locked:
        clean_unfinished(key)
    return key


def is_abandoned(run_dir: Path) -> bool:
    """Return whether no process holds the claim on a folder; False if that is unknown, as without locks or rights."""
    # On a network's file system a second look at a lock of this process would end it.
    if run_dir.resolve() in _held:
        return False
    try:
        descriptor = os.open(run_dir / CLAIM_NAME, os.O_RDWR)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    try:
        return _try_lock(descriptor) is True
    finally:
        os.close(descriptor)


def give_back_claim(key: Path) -> None:
    """End a claim, if there is one."""
    descriptor = _held.pop(key, None)
    if descriptor is None:
        return
    # Deleted before it is released: whoever waits for it sees that the file is no longer the one with this name.
    with contextlib.suppress(OSError):
        (key / CLAIM_NAME).unlink()
    os.close(descriptor)


def _lock(path: Path, run_dir: Path) -> tuple[int, bool]:
    for _ in range(TRIES):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            is_locked = _try_lock(descriptor)
            if is_locked is False:
                raise _taken(run_dir, os.read(descriptor, 1000).decode() or "a process")
            # Its holder may have deleted it meanwhile.
            if path.exists() and os.path.samestat(os.fstat(descriptor), os.stat(path)):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return descriptor, bool(is_locked)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    raise _taken(run_dir, "a process that has just begun")


def _try_lock(descriptor: int) -> bool | None:
    """Return whether the lock was got; None if there are no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES):
            return False
        logger.info("Two runs that write to one folder go unnoticed here: no locks (%s).", error)
        return None
    return True


def _taken(run_dir: Path, holder: str) -> RuntimeError:
    return RuntimeError(
        f"Another run, {holder}, is writing its checkpoints to {run_dir}, and two runs there would delete and resume "
        "from each other's. Give this run another output_dir, or wait for that one to end."
    )
