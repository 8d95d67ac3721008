"""The failure that came first among the processes, published so that all the others can name it.

An error of a collective operation says only that a connection is gone, so each process writes its error into the store
that all share, and for torchrun's agent. This module loads no torch, since an error may be raised before.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any, NamedTuple

from littrainer.distributed.environment import get_reports_folder, rank
from littrainer.runtime.tracebacks import error_and_reasons, report_uncaught

# Names the file from which torchrun's agent reads the error of a process.
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
# Keys of that file: whether another process had failed before, and the optimizer step at which the error came.
CONSEQUENCE, STEP = "is_consequence", "step"
# Attribute of an error: the optimizer step.
AT_STEP = "_littrainer_optimizer_step"
# Files of a process in `get_reports_folder`: the stacks of its threads, a file that it touches as long as it responds, and
# another one when a hang ends it.
STACKS_FILE, HEARTBEAT_FILE, HUNG_FILE = "stacks", "heartbeat", "ending"
# In which loader processes may write the stacks of their threads.
WORKER_STACKS_TIMEOUT_S = 0.5
# In which the system may report that a process has ended, after the end of its connections.
PROCESS_END_TIMEOUT_S = 1.0
# In which the error that ended another process may be published, after the end of its connections.
PUBLICATION_TIMEOUT_S = 1.0
MAX_RECORD_LETTERS = 2000
# Key of the first error that is no consequence of another error: the rank, a space and the error.
FIRST_FAILURE = "first failure"

# Parts of the messages of torch's libraries -> what to look at. The first that is found counts.
ADVICE: dict[str, str] = {
    "Duplicate GPU": "two processes use one GPU; start as many processes as there are GPUs",
    "nable to find address": "this host's name has no address; set GLOO_SOCKET_IFNAME to the network interface to use",
    "nable to resolve": "a host's name has no address; set GLOO_SOCKET_IFNAME to the network interface to use",
    "imed out": (
        "no process has ended, so one of them is busy elsewhere or skips what the others do together, for instance "
        "because code depends on the rank; if it only needs longer, raise ddp_timeout"
    ),
    "imeout": "no process has ended, so one of them is busy elsewhere; if it only needs longer, raise ddp_timeout",
    "NCCL": "set NCCL_DEBUG=INFO, and NCCL writes what went wrong",
}
TIMEOUTS = ("Timed out waiting", "Application timeout")
SIGNS_OF_LIBRARIES = ("/gloo/", "NCCL", "Connection closed by peer", "Connection reset by peer", *TIMEOUTS)


class FailedElsewhere(RuntimeError):
    """Another process has failed at what all do together; its rank and its error are in the message."""


class LostProcess(RuntimeError):
    """Another process can no longer be reached: it has ended, or it hangs."""


class HangError(RuntimeError):
    """A training has not moved for `hang_timeout` seconds."""


class ProcessAddress(NamedTuple):
    """The host of a process, and its number there."""

    host: str
    number: int


class _FailureStore:
    """The failure that the processes have published in the store that all share."""

    def __init__(self, store: Any, rank: int, world_size: int):
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self._published: str | None = None

    def publish(self, error: BaseException) -> None:
        record = f"{self.rank} {type(error).__name__}: {error}"[:MAX_RECORD_LETTERS]
        self._published = record.encode("utf-8", "backslashreplace").decode()
        # The process that holds the store may have ended.
        with suppress(RuntimeError):
            self.store.compare_set(FIRST_FAILURE, "", self._published)

    def retract(self) -> None:
        """Take back an error that was caught, so that no later failure is blamed on it."""
        if self._published:
            with suppress(RuntimeError):
                self.store.compare_set(FIRST_FAILURE, self._published, "")
            self._published = None

    def wait_for_first(self) -> str:
        """Return the first failure; empty if none is published in time."""
        deadline = time.monotonic() + PUBLICATION_TIMEOUT_S
        with suppress(RuntimeError):
            while time.monotonic() < deadline:
                # Empty if a process has retracted it.
                if self.store.check([FIRST_FAILURE]) and (record := self.store.get(FIRST_FAILURE).decode()):
                    return str(record)
                time.sleep(0.05)
        return ""


_store: _FailureStore | None = None
# All processes by rank, once they are connected.
_places: list[ProcessAddress] = []
_stacks: IO[str] | None = None


# ---- Errors of this process ------------------------------------------------------------------------------------------


def report_errors_to_agent() -> None:
    """From now on, report the error that ends this process to the agent that has started it, if there is one."""
    if os.environ.get(ERROR_FILE):
        report_uncaught(_report_uncaught)
    if (folder := get_reports_folder()) is not None:
        open_stacks(folder / f"{STACKS_FILE}-{rank()}.txt")


def report_errors(store: Any, rank: int, world_size: int) -> None:
    """From now on, publish the error that ends this process in the store that all processes share."""
    global _store
    _store = _FailureStore(store, rank, world_size)
    report_uncaught(_report_uncaught)


def _report_uncaught(error: BaseException) -> None:
    report_error(error)
    if _stacks is not None:
        traceback.print_exception(error, file=_stacks)
        _stacks.flush()
    if isinstance(error, HangError) and (folder := get_reports_folder()) is not None:
        # The script does not catch the error, so the launcher ends the process unless it ends by itself.
        (folder / f"{HUNG_FILE}-{os.getpid()}").touch()


def report_error(error: BaseException) -> None:
    """Publish the error that ends this process for the other processes, and write it for torchrun's agent."""
    publish_failure(error)
    path = os.environ.get(ERROR_FILE)
    if not path or os.path.exists(path):
        return
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": {"timestamp": str(int(time.time()))}}
    # A lost connection is a sign that another process has failed; both may fail within one second.
    follows = is_consequence(error) or (isinstance(error, RuntimeError) and is_collective_error(error))
    step = next((vars(link)[AT_STEP] for link in error_and_reasons(error) if AT_STEP in vars(link)), None)
    with suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": message, CONSEQUENCE: follows, STEP: step}, file)


def publish_failure(error: BaseException) -> None:
    """Publish an error of this process for the others, unless it is a consequence of theirs."""
    if _store is not None and not is_consequence(error):
        _store.publish(error)


def set_step_of_error(error: BaseException, step: int) -> None:
    """Note the optimizer step at which an error came: at the same step it would come again."""
    with suppress(AttributeError):
        setattr(error, AT_STEP, step)


def is_consequence(error: BaseException) -> bool:
    """Return whether an error comes of the failure of another process."""
    return any(isinstance(link, (FailedElsewhere, LostProcess)) for link in error_and_reasons(error))


# ---- Stacks ----------------------------------------------------------------------------------------------------------


def open_stacks(path: Path | None = None) -> IO[str]:
    """Return the file, by default a temporary one, for the stacks of all threads if SIGTERM or an error in C comes.

    Loader processes that are forked from now on write into it too, when `dump_all_stacks` ends them.
    """
    global _stacks
    if _stacks is None:
        # Open as long as the process, since signals write into it.
        make = functools.partial(open, path) if path else tempfile.TemporaryFile
        _stacks = make("a+", encoding="utf-8", errors="backslashreplace")
        if not faulthandler.is_enabled():
            faulthandler.enable(_stacks)
        if hasattr(faulthandler, "register") and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            faulthandler.register(signal.SIGTERM, _stacks, chain=True)
    return _stacks


def dump_all_stacks(heading: str, workers: Sequence[BaseProcess], further: Callable[[], str]) -> str:
    """Write, and return, the stacks of all threads of this process and of its loader processes, and end the latter.

    A heading precedes them, and what `further` returns follows; it may fail.
    """
    file = open_stacks()
    beginning = file.seek(0, os.SEEK_END)
    print(heading, file=file, flush=True)
    faulthandler.dump_traceback(file)
    # Number 0 would be this process with all of its group.
    numbers = [worker.pid for worker in workers if worker.pid]
    for number in numbers:
        with suppress(OSError):
            if sys.platform == "linux":
                import resource

                # No file of its memory is written.
                resource.prlimit(number, resource.RLIMIT_CORE, (0, 0))
            # The signal at which faulthandler writes stacks, and that torch leaves alone.
            os.kill(number, signal.SIGABRT)
    if numbers:
        time.sleep(WORKER_STACKS_TIMEOUT_S)
    with suppress(Exception):
        print(further(), file=file, flush=True)
    file.seek(beginning)
    return file.read()


# ---- Errors of connections -------------------------------------------------------------------------------------------


@contextmanager
def name_failed_process(doing: str) -> Iterator[None]:
    """Raise LostProcess, which names the process that has failed, for an error of a collective operation in the block.

    Parameters:
        doing: what is done, for the error: "training".
    """
    if _store is None:
        yield
        return
    _store.retract()
    try:
        yield
    except BaseException as error:
        if isinstance(error, RuntimeError) and is_collective_error(error) and not is_consequence(error):
            raise LostProcess(
                f"Process {_store.rank} of {_store.world_size} ends {doing}: {describe_connection_loss(error)}"
            ) from error
        publish_failure(error)
        raise


def describe_connection_loss(error: RuntimeError) -> str:
    """Return who has failed, and with what, after an error of a connection; advice if that is not known."""
    rank, _, words = ("" if _store is None else _store.wait_for_first()).partition(" ")
    if words:
        return f"process {rank} failed with {words}"
    if ended := find_dead_peers():
        named = f"process{'es' if len(ended) > 1 else ''} {', '.join(map(str, ended))}"
        return f"{named} has ended without reporting an error; what it, or the system's log, wrote last says why"
    advice = next((advice for sign, advice in ADVICE.items() if sign in str(error)), "one of them has ended, or hangs")
    return f"it cannot reach the others; {advice}"


def is_collective_error(error: RuntimeError) -> bool:
    """Return whether an error comes out of a collective operation, and not from the script."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in SIGNS_OF_LIBRARIES)


# ---- Ends of processes -----------------------------------------------------------------------------------------------


def register_peers(places: list[ProcessAddress]) -> None:
    """Note where the processes run, by rank, so that those can be named that have ended."""
    global _places
    _places = places


def find_dead_peers() -> list[int]:
    """Return the ranks of the processes on this host that were connected and have ended."""
    here = [(rank, place.number) for rank, place in enumerate(_places) if place.host == socket.gethostname()]
    deadline = time.monotonic() + PROCESS_END_TIMEOUT_S
    while here:
        ended = [rank for rank, number in here if not is_running(number)]
        if ended or time.monotonic() > deadline:
            return ended
        time.sleep(0.02)
    return []


def is_running(number: int) -> bool:
    """Return whether the process of this number runs on this host."""
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    try:
        # A process whose end its parent has not noticed is still there, as a zombie (Z).
        return Path(f"/proc/{number}/stat").read_text("utf-8").rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return True
