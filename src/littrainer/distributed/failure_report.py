"""Which process has failed first, and with what, so that all the others can name it.

An error within a collective operation says of itself only that a connection is gone. So each process writes its error
into the store that all share, and for torchrun's agent. Loads no torch, since an error may come before.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

from littrainer.distributed.environment import rank, reports_folder

# Where torchrun's agent looks for the error of a process.
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
# In what a process reports of its error: whether another process had failed before.
CONSEQUENCE = "is_consequence"
# The same: the optimizer step at which it came; and set on an error, the step.
STEP, AT_STEP = "step", "_littrainer_optimizer_step"
# Files of a process in `reports_folder`: where its threads stood; what it touches as long as it answers, and what that
# is named when the process ends since its training hangs.
STACKS, ANSWERS = "stacks", "answers"
ENDING = f"{ANSWERS}-ending"
# How long loader processes may take to write where they stand.
SECONDS_FOR_WORKERS = 0.5
# How long the system may take to say of a process that it has ended, after its connections have.
SECONDS_UNTIL_AN_END_IS_SEEN = 1.0
# How long the error that ended another process may take to arrive after the end of its connections.
SECONDS_UNTIL_WORDS_ARRIVE = 1.0
LONGEST_WORDS = 2000
# The first error that is no consequence of another one: the rank, a space and the error.
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


class ProcessPlace(NamedTuple):
    """Where a process runs, and its number there."""

    host: str
    number: int


class _Group(NamedTuple):
    store: Any
    rank: int
    world_size: int


_group: _Group | None = None
# All processes by rank, once they are connected.
_places: list[ProcessPlace] = []
# What this process has left as its word.
_own_words: str | None = None
_reports_errors = False
# Where the stacks of this process go.
_stacks: IO[str] | None = None


# ---- Errors of this process ------------------------------------------------------------------------------------------


def report_errors_to_agent() -> None:
    """From now on, report the error that ends this process to the agent that has started it, if there is one."""
    if os.environ.get(ERROR_FILE):
        _report_errors()
    if (folder := reports_folder()) is not None:
        open_stacks(folder / f"{STACKS}-{rank()}.txt")


def report_errors(store: Any, rank: int, world_size: int) -> None:
    """From now on, leave word of the error that ends this process."""
    global _group, _own_words
    _group, _own_words = _Group(store, rank, world_size), None
    _report_errors()


def _report_errors() -> None:
    global _reports_errors
    if _reports_errors:
        return
    _reports_errors = True
    earlier_hook = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        report_error(error)
        if _stacks is not None:
            traceback.print_exception(error, file=_stacks)
            _stacks.flush()
        if isinstance(error, HangError) and (folder := reports_folder()) is not None:
            # Not caught by the script, so the process ends now.
            (folder / f"{ENDING}-{os.getpid()}").touch()
        earlier_hook(kind, error, trace)

    sys.excepthook = hook


def report_error(error: BaseException) -> None:
    """Let the other processes, and the agent, know of the error that ends this one."""
    leave_word(error)
    _tell_agent(error)


def note_step_of_error(error: BaseException, step: int) -> None:
    """Note the optimizer step at which an error came: at the same step it would come again."""
    with suppress(AttributeError):
        setattr(error, AT_STEP, step)


def leave_word(error: BaseException) -> None:
    """Let the other processes know of an error of this one, unless it is a consequence of theirs."""
    global _own_words
    if _group is not None and not is_consequence(error):
        _own_words = f"{_group.rank} {type(error).__name__}: {error}"[:LONGEST_WORDS]
        # The process that holds the store may have ended.
        with suppress(RuntimeError):
            _group.store.compare_set(FIRST_FAILURE, "", _own_words)


def _take_back_word() -> None:
    """Take back the word of an error that was caught, so that no later failure is blamed on it."""
    global _own_words
    if _group is not None and _own_words:
        with suppress(RuntimeError):
            _group.store.compare_set(FIRST_FAILURE, _own_words, "")
        _own_words = None


def _tell_agent(error: BaseException) -> None:
    path = os.environ.get(ERROR_FILE)
    if not path or os.path.exists(path):
        return
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": {"timestamp": str(int(time.time()))}}
    # A connection that is gone says of itself that another process is; both may fail within one second.
    follows = is_consequence(error) or (isinstance(error, RuntimeError) and is_of_a_library(error))
    with suppress(OSError), open(path, "w", encoding="utf-8") as file:
        step = next((one.__dict__[AT_STEP] for one in causes_of(error) if AT_STEP in one.__dict__), None)
        json.dump({"message": message, CONSEQUENCE: follows, STEP: step}, file)


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those that it came of, nearest first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def is_consequence(error: BaseException) -> bool:
    """Return whether an error comes of the failure of another process."""
    return any(isinstance(one, (FailedElsewhere, LostProcess)) for one in causes_of(error))


# ---- Where this process stands ---------------------------------------------------------------------------------------


def open_stacks(path: Path | None = None) -> IO[str]:
    """Return the file in which this process leaves where all its threads stand if SIGTERM, or an error in C, ends it.

    Loader processes that are forked from now on leave it there too, if `stacks_of_all_threads` ends them.

    Parameters:
        path: the file; by default one that is gone with the process.
    """
    global _stacks
    if _stacks is None:
        # Open as long as the process, since signals write into it.
        make = functools.partial(open, path) if path else tempfile.TemporaryFile
        _stacks = make("a+", encoding="utf-8")
        if not faulthandler.is_enabled():
            faulthandler.enable(_stacks)
        if hasattr(faulthandler, "register") and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            faulthandler.register(signal.SIGTERM, _stacks, chain=True)
    return _stacks


def stacks_of_all_threads(heading: str, further: Callable[[], str]) -> str:
    """Write, and return, where all threads of this process and its loader processes stand, and end the latter.

    Parameters:
        heading: lines to put before them.
        further: returns lines to put behind them; may fail.
    """
    file = open_stacks()
    beginning = file.seek(0, os.SEEK_END)
    print(heading, file=file, flush=True)
    faulthandler.dump_traceback(file)
    workers = multiprocessing.active_children()
    for worker in workers:
        with suppress(OSError):
            if sys.platform == "linux":
                import resource

                # It leaves no file of its memory.
                resource.prlimit(worker.pid or 0, resource.RLIMIT_CORE, (0, 0))
            # The one that faulthandler answers with stacks and torch leaves alone.
            os.kill(worker.pid or 0, signal.SIGABRT)
    if workers:
        time.sleep(SECONDS_FOR_WORKERS)
    with suppress(Exception):
        print(further(), file=file, flush=True)
    file.seek(beginning)
    return file.read()


# ---- Errors of connections -------------------------------------------------------------------------------------------


@contextmanager
def naming_failed_processes(doing: str) -> Iterator[None]:
    """Let the error of a collective operation in the block name the process that has failed.

    Parameters:
        doing: what is done, for the error: "training".

    Raises:
        LostProcess: the processes cannot reach each other any more; says who failed and with what, if that is known.
    """
    if _group is None:
        yield
        return
    _take_back_word()
    try:
        yield
    except BaseException as error:
        if isinstance(error, RuntimeError) and is_of_a_library(error) and not is_consequence(error):
            raise LostProcess(
                f"Process {_group.rank} of {_group.world_size} ends {doing}: {why_lost(error)}"
            ) from error
        leave_word(error)
        raise


def why_lost(error: RuntimeError) -> str:
    """Return who has failed, and with what, after an error of a connection; advice if that is not known."""
    rank, _, words = _first_failure().partition(" ")
    if words:
        return f"process {rank} failed with {words}"
    if ended := ended_processes():
        named = f"process{'es' if len(ended) > 1 else ''} {', '.join(map(str, ended))}"
        return f"{named} has ended without reporting an error; what it, or the system's log, wrote last says why"
    return f"it cannot reach the others; {advice_for(error)}"


def is_of_a_library(error: RuntimeError) -> bool:
    """Return whether an error comes out of a collective operation, and not from the script."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in SIGNS_OF_LIBRARIES)


def advice_for(error: Exception) -> str:
    """Return what to look at after an error of a communication library."""
    return next((advice for sign, advice in ADVICE.items() if sign in str(error)), "one of them has ended, or hangs")


def _first_failure() -> str:
    """Return the word that a process has left; empty if none arrives in the time that it may take."""
    deadline = time.monotonic() + SECONDS_UNTIL_WORDS_ARRIVE
    with suppress(RuntimeError):
        while _group is not None:
            # Empty if a process has taken its word back.
            if _group.store.check([FIRST_FAILURE]) and (found := _group.store.get(FIRST_FAILURE).decode()):
                return str(found)
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
    return ""


# ---- Ends of processes -----------------------------------------------------------------------------------------------


def know_processes(places: list[ProcessPlace]) -> None:
    """Note where the processes run, by rank, so that those can be named that have ended."""
    global _places
    _places = places


def ended_processes() -> list[int]:
    """Return the ranks of the processes on this host that were connected and have ended."""
    here = [(rank, place.number) for rank, place in enumerate(_places) if place.host == socket.gethostname()]
    deadline = time.monotonic() + SECONDS_UNTIL_AN_END_IS_SEEN
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
