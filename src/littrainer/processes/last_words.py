"""What a process says when it fails, kept where all have met, so that the others can name it.

An error within a collective operation says of itself only that a connection is gone.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, NamedTuple

import torch.distributed as dist

from littrainer.processes.agreement import FailedElsewhere, LostProcess, ended_processes
from littrainer.processes.launcher import CONSEQUENCE

# How long the error that ended another process may take to arrive after the end of its connections.
SECONDS_UNTIL_WORDS_ARRIVE = 1.0
LONGEST_WORDS = 2000
# The first error that is no consequence of another one: the rank, a space and the error.
FIRST_FAILURE = "first failure"
# Where torchrun's agent looks for the error of a process.
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

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
SIGNS_OF_LIBRARIES = ("/gloo/", "NCCL", "Connection closed by peer", "Connection reset by peer")


class _Meeting(NamedTuple):
    store: Any
    rank: int
    world_size: int


_meeting: _Meeting | None = None
# What this process has left as its word.
_own_words: str | None = None


def keep_last_words(store: Any, rank: int, world_size: int) -> None:
    """From now on, leave word of the error that ends this process.

    Parameters:
        store: the one that all processes share.
    """
    global _meeting
    _meeting = _Meeting(store, rank, world_size)
    earlier_hook = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        leave_word(error)
        _tell_agent(error)
        earlier_hook(kind, error, trace)

    sys.excepthook = hook


def leave_word(error: BaseException) -> None:
    """Let the other processes know of an error of this one, unless it is a consequence of theirs."""
    if _meeting is None or _is_consequence(error):
        return
    global _own_words
    words = _own_words = f"{_meeting.rank} {type(error).__name__}: {error}"[:LONGEST_WORDS]
    # The process that holds the store may have ended.
    with suppress(RuntimeError):
        _meeting.store.compare_set(FIRST_FAILURE, "", words)


@contextmanager
def naming_failed_processes(doing: str) -> Iterator[None]:
    """A block in which the error of a collective operation names the process that has failed; no cost with one process.

    Parameters:
        doing: what is done, for the error: "training".

    Raises:
        LostProcess: the processes cannot reach each other any more; says who failed and with what, where that is known.
    """
    if _meeting is None:
        yield
        return
    _forget_own_word()
    try:
        yield
    except RuntimeError as error:
        if not is_of_a_library(error) or _is_consequence(error):
            leave_word(error)
            raise
        raise LostProcess(f"Process {_meeting.rank} of {_meeting.world_size} ends {doing}: {_why(error)}") from error
    except BaseException as error:
        leave_word(error)
        raise


def is_of_a_library(error: RuntimeError) -> bool:
    """Whether an error comes out of a collective operation, and not from the script."""
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in SIGNS_OF_LIBRARIES)


def advice_for(error: Exception) -> str:
    """What to look at after an error of a communication library."""
    return next((advice for sign, advice in ADVICE.items() if sign in str(error)), "one of them has ended, or hangs")


def _why(error: RuntimeError) -> str:
    failure = _failure_elsewhere()
    if failure is not None:
        rank, _, words = failure.partition(" ")
        return f"process {rank} failed with {words}"
    ended = ended_processes()
    if ended:
        named = ", ".join(map(str, ended))
        return (
            f"process {named} has ended without an error of its own; what it, or the system's log, wrote last says why"
        )
    if _store_is_lost():
        return "process 0 has ended, or its machine cannot be reached; what it wrote last says why"
    if "imed out" in str(error):
        # Its end is why the others lose it.
        leave_word(error)
    return f"it cannot reach the others; {advice_for(error)}"


def _failure_elsewhere() -> str | None:
    assert _meeting is not None
    deadline = time.monotonic() + SECONDS_UNTIL_WORDS_ARRIVE
    while True:
        try:
            if _meeting.store.check([FIRST_FAILURE]):
                found: str = _meeting.store.get(FIRST_FAILURE).decode()
                return found if found else None
        except RuntimeError:
            return None
        if time.monotonic() > deadline:
            return None
        time.sleep(0.05)


def _store_is_lost() -> bool:
    assert _meeting is not None
    try:
        _meeting.store.check([FIRST_FAILURE])
    except RuntimeError:
        return True
    return False


def _forget_own_word() -> None:
    """A script may go on after an error that it has caught."""
    global _own_words
    assert _meeting is not None
    if _own_words is None:
        return
    # In one operation: between a look and a change another process could take its own words away.
    with suppress(RuntimeError):
        _meeting.store.compare_set(FIRST_FAILURE, _own_words, "")
    _own_words = None


def _is_consequence(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, (FailedElsewhere, LostProcess)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _tell_agent(error: BaseException) -> None:
    path = os.environ.get(ERROR_FILE)
    if not path or os.path.exists(path):
        return
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": {"timestamp": str(int(time.time()))}}
    with suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": message, CONSEQUENCE: _is_consequence(error)}, file)
