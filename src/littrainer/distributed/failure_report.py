"""Which process has failed first, and with what, so that all the others can name it.

An error within a collective operation says of itself only that a connection is gone. So each process leaves word of
its own error in the store that all share, and for torchrun's agent. Loads no torch, since an error may come before.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

# Where torchrun's agent looks for the error of a process.
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
# In what a process reports of its error: whether another process had failed before.
CONSEQUENCE = "is_consequence"
# How long the system may take to say of a process that it has ended, after its connections have.
SECONDS_UNTIL_AN_END_IS_SEEN = 1.0
# How long the error that ended another process may take to arrive after the end of its connections.
SECONDS_UNTIL_WORDS_ARRIVE = 1.0
# How much later than the first of them the others may wait in vain too.
SECONDS_UNTIL_ALL_WAIT_IN_VAIN = 2.0
# How much later than the first of them the others may fail too, so that all go on together after an error.
SECONDS_UNTIL_ALL_HAVE_FAILED = 10.0
LONGEST_WORDS = 2000
# The first error that is no consequence of another one: the rank, a space and the error.
FIRST_FAILURE = "first failure"
# Under these and its rank, a process says how many blocks it has left, and that it has waited until a timeout.
LEFT, IN_VAIN = "blocks left", "waits in vain"

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
# How many blocks this process has left, and with what it failed in the last one, until the others have left it too.
_blocks_left, _own_failure = 0, ""
_reports_errors = False


# ---- Errors of this process ------------------------------------------------------------------------------------------


def report_errors_to_agent() -> None:
    """From now on, tell the agent that has started this process of the error that ends it; else nothing is done."""
    if os.environ.get(ERROR_FILE):
        _report_errors()


def report_errors(store: Any, rank: int, world_size: int) -> None:
    """From now on, leave word of the error that ends this process.

    Parameters:
        store: the one that all processes share.
    """
    global _group, _own_words, _blocks_left, _own_failure
    _group, _own_words, _blocks_left, _own_failure = _Group(store, rank, world_size), None, 0, ""
    _report_errors()


def _report_errors() -> None:
    global _reports_errors
    if _reports_errors:
        return
    _reports_errors = True
    earlier_hook = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        leave_word(error)
        _tell_agent(error)
        earlier_hook(kind, error, trace)

    sys.excepthook = hook


def leave_word(error: BaseException) -> None:
    """Let the other processes know of an error of this one, unless it is a consequence of theirs."""
    if _group is not None and not is_consequence(error):
        _leave_words(f"{type(error).__name__}: {error}")


def _leave_words(text: str) -> None:
    assert _group is not None
    global _own_words
    _own_words = f"{_group.rank} {text}"[:LONGEST_WORDS]
    # The process that holds the store may have ended.
    with suppress(RuntimeError):
        _group.store.compare_set(FIRST_FAILURE, "", _own_words)


def _tell_agent(error: BaseException) -> None:
    path = os.environ.get(ERROR_FILE)
    if not path or os.path.exists(path):
        return
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": {"timestamp": str(int(time.time()))}}
    # A connection that is gone says of itself that another process is; both may fail within one second.
    follows = is_consequence(error) or (isinstance(error, RuntimeError) and is_of_a_library(error))
    with suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": message, CONSEQUENCE: follows}, file)


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that it came of, nearest first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def is_consequence(error: BaseException) -> bool:
    """Whether an error comes of the failure of another process."""
    return any(isinstance(one, (FailedElsewhere, LostProcess)) for one in causes_of(error))


# ---- Errors of connections -------------------------------------------------------------------------------------------


@contextmanager
def naming_failed_processes(doing: str) -> Iterator[None]:
    """A block in which the error of a collective operation names the process that has failed; no cost with one process.

    Parameters:
        doing: what is done, for the error: "training".

    Raises:
        LostProcess: the processes cannot reach each other any more; says who failed and with what, where that is known.
    """
    if _group is None:
        yield
        return
    go_on_after_failure()
    failure = ""
    try:
        yield
    except BaseException as error:
        if isinstance(error, RuntimeError) and is_of_a_library(error) and not is_consequence(error):
            raise LostProcess(
                f"Process {_group.rank} of {_group.world_size} ends {doing}: {why_lost(error)}"
            ) from error
        if not is_consequence(error):
            failure = f"{doing} with {type(error).__name__}: {error}"[:LONGEST_WORDS]
        leave_word(error)
        raise
    finally:
        _note_left(failure)


def _note_left(failure: str) -> None:
    """Let the others know that this process has left a block, in whatever way."""
    assert _group is not None
    global _blocks_left, _own_failure
    _blocks_left, _own_failure = _blocks_left + 1, failure
    with suppress(RuntimeError):
        _group.store.set(f"{LEFT}/{_group.rank}", str(_blocks_left))


def go_on_after_failure() -> None:
    """After an error that this process has caught, go on with the others only if they have left that block too.

    Raises:
        LostProcess: the others are still in the block, and wait for this process there.
    """
    global _own_failure, _own_words
    if _group is None or not _own_failure:
        return
    inside = _still_inside()
    if inside:
        raise LostProcess(
            f"Process {_group.rank} of {_group.world_size} cannot go on: before, it failed in {_own_failure}, and "
            f"{_named(inside)} {'is' if len(inside) == 1 else 'are'} still in it. An error that the script catches "
            "must come in all processes alike; else let it end the process."
        )
    # In one operation: between a look and a change another process could take its own words away.
    with suppress(RuntimeError):
        _group.store.compare_set(FIRST_FAILURE, _own_words or "", "")
    _own_failure, _own_words = "", None


def _still_inside() -> list[int]:
    """Ranks that have not left as many blocks as this process, within the time that they may take longer."""
    assert _group is not None
    store, deadline = _group.store, time.monotonic() + SECONDS_UNTIL_ALL_HAVE_FAILED

    def has_left(rank: int) -> bool:
        return store.check([f"{LEFT}/{rank}"]) and int(store.get(f"{LEFT}/{rank}")) >= _blocks_left

    # Without the store an agreement does not come about either, and says so.
    with suppress(RuntimeError):
        while inside := [rank for rank in range(_group.world_size) if not has_left(rank)]:
            if time.monotonic() > deadline:
                return inside
            time.sleep(0.05)
    return []


def why_lost(error: RuntimeError) -> str:
    """Who has failed, and with what, after an error of a connection; no more than advice where that is not known."""
    rank, _, words = _first_failure().partition(" ")
    if words:
        return f"{'it' if _group is not None and int(rank) == _group.rank else f'process {rank}'} failed with {words}"
    ended = ended_processes()
    if ended and (_group is None or _store_is_lost()):
        return f"{_named(ended)} has ended; what it wrote last says why"
    if ended:
        return (
            f"{_named(ended)} has ended without an error of its own; what it, or the system's log, wrote last says why"
        )
    if _group is not None and _store_is_lost():
        return "process 0 has ended, or its machine cannot be reached; what it wrote last says why"
    if _group is None or not any(sign in str(error) for sign in ("imed out", "imeout")):
        return f"it cannot reach the others; {advice_for(error)}"
    absent = _absent()
    who = f"no word has come from {_named(absent)}" if absent else "all wait, but not for the same"
    # The end of this process is why the others lose it.
    _leave_words(f"{type(error).__name__}: {error} ({who})")
    return f"it cannot reach the others, and {who}; {advice_for(error)}"


def is_of_a_library(error: RuntimeError) -> bool:
    """Whether an error comes out of a collective operation, and not from the script."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in SIGNS_OF_LIBRARIES)


def advice_for(error: Exception) -> str:
    """What to look at after an error of a communication library."""
    return next((advice for sign, advice in ADVICE.items() if sign in str(error)), "one of them has ended, or hangs")


def _absent() -> list[int]:
    """Ranks of the processes that do not wait in vain, as this one does."""
    assert _group is not None
    store = _group.store
    with suppress(RuntimeError):
        store.set(f"{IN_VAIN}/{_group.rank}", "")
        deadline = time.monotonic() + SECONDS_UNTIL_ALL_WAIT_IN_VAIN
        while absent := [rank for rank in range(_group.world_size) if not store.check([f"{IN_VAIN}/{rank}"])]:
            if time.monotonic() > deadline:
                return absent
            time.sleep(0.05)
    return []


def _named(ranks: list[int]) -> str:
    return f"process{'es' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _first_failure() -> str:
    """What a process has left as its word; empty where none has, within the time that it may take to arrive."""
    deadline = time.monotonic() + SECONDS_UNTIL_WORDS_ARRIVE
    with suppress(RuntimeError):
        while _group is not None:
            # Empty where a process has taken its words back.
            if _group.store.check([FIRST_FAILURE]) and (found := _group.store.get(FIRST_FAILURE).decode()):
                return str(found)
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
    return ""


def _store_is_lost() -> bool:
    assert _group is not None
    try:
        _group.store.check([FIRST_FAILURE])
    except RuntimeError:
        return True
    return False


# ---- Ends of processes -----------------------------------------------------------------------------------------------


def know_processes(places: list[ProcessPlace]) -> None:
    """Note where the processes run, by rank, so that those can be named that have ended."""
    global _places
    _places = places


def ended_processes() -> list[int]:
    """Ranks of the processes on this host that have ended, of those that have been connected."""
    here = [(rank, place.number) for rank, place in enumerate(_places) if place.host == socket.gethostname()]
    deadline = time.monotonic() + SECONDS_UNTIL_AN_END_IS_SEEN
    while here:
        ended = [rank for rank, number in here if not is_running(number)]
        if ended or time.monotonic() > deadline:
            return ended
        time.sleep(0.02)
    return []


def is_running(number: int) -> bool:
    """Whether a process of this host, of this number, has not ended."""
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
