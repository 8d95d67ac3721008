"""The first failure of the processes, published in their store and for torchrun's agent, so that all can name it.

This module does not import torch, since errors may come earlier.
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

# Environment variable: file from which torchrun's agent reads a process's error.
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
# Keys of that file.
CONSEQUENCE, STEP = "is_consequence", "step"
# Attribute of an error: its optimizer step.
AT_STEP = "_littrainer_optimizer_step"
# Prefixes of a process's files in `get_reports_folder`.
STACKS_FILE, HEARTBEAT_FILE, HUNG_FILE = "stacks", "heartbeat", "hung"
WORKER_STACKS_TIMEOUT_S = 0.5
# Times after the loss of a connection.
PROCESS_END_TIMEOUT_S = 1.0
PUBLICATION_TIMEOUT_S = 1.0
MAX_RECORD_LETTERS = 2000
# Key in the store: "RANK ERROR" of the first failure.
FIRST_FAILURE = "first failure"

# Part of a message of torch's libraries -> advice; the first match counts.
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


class PeerFailedError(RuntimeError):
    """Failure of another process, named with its error in the message."""


class PeerLostError(RuntimeError):
    """Loss of another process, which has ended or hangs."""


class HangError(RuntimeError):
    """Lack of progress for `hang_timeout` seconds."""


class ProcessAddress(NamedTuple):
    host: str
    pid: int


class _FailureStore:
    """The published failure, in the store that all processes share."""

    def __init__(self, store: Any, rank: int, world_size: int):
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self._published: str | None = None

    def publish(self, error: BaseException) -> None:
        record = f"{self.rank} {type(error).__name__}: {error}"[:MAX_RECORD_LETTERS]
        self._published = record.encode("utf-8", "backslashreplace").decode()
        # The store's process may have ended.
        with suppress(RuntimeError):
            self.store.compare_set(FIRST_FAILURE, "", self._published)

    def retract(self) -> None:
        """Withdraw a caught error, so that no later failure is blamed on it."""
        if self._published:
            with suppress(RuntimeError):
                self.store.compare_set(FIRST_FAILURE, self._published, "")
            self._published = None

    def wait_for_first(self) -> str:
        """Return the first failure; empty after a timeout."""
        deadline = time.monotonic() + PUBLICATION_TIMEOUT_S
        with suppress(RuntimeError):
            while time.monotonic() < deadline:
                # A retracted failure is empty.
                if self.store.check([FIRST_FAILURE]) and (record := self.store.get(FIRST_FAILURE).decode()):
                    return str(record)
                time.sleep(0.05)
        return ""


_store: _FailureStore | None = None
# All processes by rank; empty until they are connected.
_peers: list[ProcessAddress] = []
_stacks: IO[str] | None = None


# ---- Errors of this process ------------------------------------------------------------------------------------------


def report_errors_to_agent() -> None:
    """Report an error that ends this process to torchrun's agent, if any."""
    if os.environ.get(ERROR_FILE):
        report_uncaught(_report_uncaught)
    if (folder := get_reports_folder()) is not None:
        open_stacks(folder / f"{STACKS_FILE}-{rank()}.txt")


def report_errors(store: Any, rank: int, world_size: int) -> None:
    """Publish an error that ends this process in the shared store."""
    global _store
    _store = _FailureStore(store, rank, world_size)
    report_uncaught(_report_uncaught)


def _report_uncaught(error: BaseException) -> None:
    report_error(error)
    if _stacks is not None:
        traceback.print_exception(error, file=_stacks)
        _stacks.flush()
    if isinstance(error, HangError) and (folder := get_reports_folder()) is not None:
        # The launcher kills this process if it does not end.
        (folder / f"{HUNG_FILE}-{os.getpid()}").touch()


def report_error(error: BaseException) -> None:
    """Publish the error that ends this process, and write it for torchrun's agent."""
    publish_failure(error)
    path = os.environ.get(ERROR_FILE)
    if not path or os.path.exists(path):
        return
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": {"timestamp": str(int(time.time()))}}
    # A lost connection means that another process failed, perhaps in the same second.
    follows = is_consequence(error) or (isinstance(error, RuntimeError) and is_collective_error(error))
    step = next((vars(link)[AT_STEP] for link in error_and_reasons(error) if AT_STEP in vars(link)), None)
    with suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": message, CONSEQUENCE: follows, STEP: step}, file)


def publish_failure(error: BaseException) -> None:
    """Publish an error of this process, unless another process caused it."""
    if _store is not None and not is_consequence(error):
        _store.publish(error)


def set_step_of_error(error: BaseException, step: int) -> None:
    """Record the optimizer step of an error: a restart would fail at the same step."""
    with suppress(AttributeError):
        setattr(error, AT_STEP, step)


def is_consequence(error: BaseException) -> bool:
    return any(isinstance(link, (PeerFailedError, PeerLostError)) for link in error_and_reasons(error))


# ---- Stacks ----------------------------------------------------------------------------------------------------------


def open_stacks(path: Path | None = None) -> IO[str]:
    """Open the file (default: temporary) for the stacks of all threads at SIGTERM or an error in C.

    Loader processes that are forked later write to it too.
    """
    global _stacks
    if _stacks is None:
        # Signal handlers write to it, so it is never closed.
        open_file = functools.partial(open, path) if path else tempfile.TemporaryFile
        _stacks = open_file("a+", encoding="utf-8", errors="backslashreplace")
        if not faulthandler.is_enabled():
            faulthandler.enable(_stacks)
        if hasattr(faulthandler, "register") and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            faulthandler.register(signal.SIGTERM, _stacks, chain=True)
    return _stacks


def dump_all_stacks(heading: str, workers: Sequence[BaseProcess], further: Callable[[], str]) -> str:
    """Write and return the stacks of all threads of this process and its loader processes, and end the latter."""
    file = open_stacks()
    start = file.seek(0, os.SEEK_END)
    print(heading, file=file, flush=True)
    faulthandler.dump_traceback(file)
    # Process id 0 would signal the whole process group.
    pids = [worker.pid for worker in workers if worker.pid]
    for pid in pids:
        with suppress(OSError):
            if sys.platform == "linux":
                import resource

                # Prevent a core dump.
                resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
            # faulthandler writes stacks at SIGABRT, which torch does not handle.
            os.kill(pid, signal.SIGABRT)
    if pids:
        time.sleep(WORKER_STACKS_TIMEOUT_S)
    with suppress(Exception):
        print(further(), file=file, flush=True)
    file.seek(start)
    return file.read()


# ---- Errors of connections -------------------------------------------------------------------------------------------


@contextmanager
def name_failed_process(doing: str) -> Iterator[None]:
    """Convert errors of collectives in the block to PeerLostError, which names the failed process."""
    if _store is None:
        yield
        return
    _store.retract()
    try:
        yield
    except BaseException as error:
        if isinstance(error, RuntimeError) and is_collective_error(error) and not is_consequence(error):
            raise PeerLostError(
                f"Process {_store.rank} of {_store.world_size} ends {doing}: {describe_connection_loss(error)}"
            ) from error
        publish_failure(error)
        raise


def describe_connection_loss(error: RuntimeError) -> str:
    """Return the failed process and its error, or else advice."""
    rank, _, failure = ("" if _store is None else _store.wait_for_first()).partition(" ")
    if failure:
        return f"process {rank} failed with {failure}"
    if ranks := find_dead_peers():
        processes = f"process{'es' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        return f"{processes} has ended without reporting an error; what it, or the system's log, wrote last says why"
    advice = next((advice for sign, advice in ADVICE.items() if sign in str(error)), "one of them has ended, or hangs")
    return f"it cannot reach the others; {advice}"


def is_collective_error(error: RuntimeError) -> bool:
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in SIGNS_OF_LIBRARIES)


# ---- Ends of processes -----------------------------------------------------------------------------------------------


def register_peers(peers: list[ProcessAddress]) -> None:
    global _peers
    _peers = peers


def find_dead_peers() -> list[int]:
    """Return the ranks of registered processes on this host that have ended."""
    pids = {rank: peer.pid for rank, peer in enumerate(_peers) if peer.host == socket.gethostname()}
    deadline = time.monotonic() + PROCESS_END_TIMEOUT_S
    while pids:
        ranks = [rank for rank, pid in pids.items() if not is_running(pid)]
        if ranks or time.monotonic() > deadline:
            return ranks
        time.sleep(0.02)
    return []


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    try:
        # Skip zombies (state Z).
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return True
