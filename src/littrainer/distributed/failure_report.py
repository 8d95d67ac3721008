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

from littrainer.distributed.agreement import FailedElsewhere, LostProcess, ask_of_failures, ended_processes
from littrainer.distributed.error_report import ERROR_FILE
from littrainer.distributed.launcher import CONSEQUENCE

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


class _Meeting(NamedTuple):
    store: Any
    rank: int
    world_size: int


class _Failure(NamedTuple):
    """An error with which this process has left a block that all are in.

    Parameters:
        block: its number.
        doing: what is done in it.
        time: in seconds, of the monotonic clock.
    """

    block: int
    doing: str
    error: str
    time: float


_meeting: _Meeting | None = None
# What this process has left as its word.
_own_words: str | None = None
# How many blocks this process has left, in whatever way.
_blocks_left = 0
# Of the last block, until the others are known to have left it too.
_own_failure: _Failure | None = None


def keep_last_words(store: Any, rank: int, world_size: int) -> None:
    """From now on, leave word of the error that ends this process.

    Parameters:
        store: the one that all processes share.
    """
    global _meeting, _blocks_left, _own_failure
    is_first = _meeting is None
    _meeting, _blocks_left, _own_failure = _Meeting(store, rank, world_size), 0, None
    if not is_first:
        return
    ask_of_failures(sys.modules[__name__])
    earlier_hook = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        leave_word(error)
        tell_agent(error)
        earlier_hook(kind, error, trace)

    sys.excepthook = hook


def leave_word(error: BaseException) -> None:
    """Let the other processes know of an error of this one, unless it is a consequence of theirs."""
    if _meeting is not None and not _is_consequence(error):
        _leave_words(f"{type(error).__name__}: {error}")


def _leave_words(text: str) -> None:
    assert _meeting is not None
    global _own_words
    words = _own_words = f"{_meeting.rank} {text}"[:LONGEST_WORDS]
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
    before_agreement()
    try:
        yield
    except RuntimeError as error:
        if not is_of_a_library(error) or _is_consequence(error):
            _note_left(doing, error)
            leave_word(error)
            raise
        _note_left(doing, None)
        raise LostProcess(
            f"Process {_meeting.rank} of {_meeting.world_size} ends {doing}: {why_lost(error)}"
        ) from error
    except BaseException as error:
        _note_left(doing, error)
        leave_word(error)
        raise
    else:
        _note_left(doing, None)


def before_agreement() -> None:
    """After an error of its own, this process goes on together with the others only if they have left the block too.

    Raises:
        LostProcess: the others are still in the block, and wait for this process there.
    """
    global _own_failure, _own_words
    failure = _own_failure
    if _meeting is None or failure is None:
        return
    inside = _still_inside(failure)
    if inside:
        raise LostProcess(
            f"Process {_meeting.rank} of {_meeting.world_size} cannot go on: before, it failed in {failure.doing} with "
            f"{failure.error}, and {_named(inside)} {'is' if len(inside) == 1 else 'are'} still in {failure.doing}. An "
            "error that the script catches must come in all processes alike; else let it end the process."
        )
    _own_failure = None
    if _own_words is not None:
        # In one operation: between a look and a change another process could take its own words away.
        with suppress(RuntimeError):
            _meeting.store.compare_set(FIRST_FAILURE, _own_words, "")
        _own_words = None


def why_lost(error: RuntimeError) -> str:
    """Who has failed, and with what, after an error of a connection; no more than advice where that is not known."""
    assert _meeting is not None
    failure = _failure_elsewhere()
    if failure is not None:
        rank, _, words = failure.partition(" ")
        return f"{'it' if int(rank) == _meeting.rank else f'process {rank}'} failed with {words}"
    ended = ended_processes()
    if ended and _store_is_lost():
        return f"{_named(ended)} has ended; what it wrote last says why"
    if ended:
        return (
            f"{_named(ended)} has ended without an error of its own; what it, or the system's log, wrote last says why"
        )
    if _store_is_lost():
        return "process 0 has ended, or its machine cannot be reached; what it wrote last says why"
    if not _is_timeout(error):
        return f"it cannot reach the others; {advice_for(error)}"
    absent = _absent()
    who = f"no word has come from {_named(absent)}" if absent else "all wait, but not for the same"
    # The end of this process is why the others lose it.
    _leave_words(f"{type(error).__name__}: {error} ({who})")
    return f"it cannot reach the others, and {who}; {advice_for(error)}"


def is_of_a_library(error: RuntimeError) -> bool:
    """Whether an error comes out of a collective operation, and not from the script."""
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in SIGNS_OF_LIBRARIES)


def advice_for(error: Exception) -> str:
    """What to look at after an error of a communication library."""
    return next((advice for sign, advice in ADVICE.items() if sign in str(error)), "one of them has ended, or hangs")


def _note_left(doing: str, error: BaseException | None) -> None:
    """Let the others know that this process has left a block.

    Parameters:
        error: what has come up in this process; None where there is none, or where others have failed.
    """
    assert _meeting is not None
    global _blocks_left, _own_failure
    _blocks_left += 1
    if error is not None and not _is_consequence(error):
        words = f"{type(error).__name__}: {error}"[:LONGEST_WORDS]
        _own_failure = _Failure(_blocks_left, doing, words, time.monotonic())
    with suppress(RuntimeError):
        _meeting.store.set(f"{LEFT}/{_meeting.rank}", str(_blocks_left))


def _still_inside(failure: _Failure) -> list[int]:
    """Ranks that have not left its block, or an earlier one, within the time that they may take longer."""
    assert _meeting is not None
    store, own = _meeting.store, _meeting.rank
    inside = [rank for rank in range(_meeting.world_size) if rank != own]

    def is_inside(rank: int) -> bool:
        key = f"{LEFT}/{rank}"
        return not store.check([key]) or int(store.get(key)) < failure.block

    deadline = failure.time + SECONDS_UNTIL_ALL_HAVE_FAILED
    try:
        while inside := [rank for rank in inside if is_inside(rank)]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
    except RuntimeError:
        # Without the store an agreement does not come about either, and says so.
        return []
    return inside


def _absent() -> list[int]:
    """Ranks of the processes that do not wait in vain, as this one does."""
    assert _meeting is not None
    store = _meeting.store
    try:
        store.set(f"{IN_VAIN}/{_meeting.rank}", "")
        deadline = time.monotonic() + SECONDS_UNTIL_ALL_WAIT_IN_VAIN
        while absent := [rank for rank in range(_meeting.world_size) if not store.check([f"{IN_VAIN}/{rank}"])]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
    except RuntimeError:
        return []
    return absent


def _is_timeout(error: RuntimeError) -> bool:
    return any(sign in str(error) for sign in ("imed out", "imeout"))


def _named(ranks: list[int]) -> str:
    return f"process{'es' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _failure_elsewhere() -> str | None:
    assert _meeting is not None
    deadline = time.monotonic() + SECONDS_UNTIL_WORDS_ARRIVE
    while True:
        try:
            if _meeting.store.check([FIRST_FAILURE]):
                found: str = _meeting.store.get(FIRST_FAILURE).decode()
                # Empty where a process has taken its words back.
                if found:
                    return found
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


def _is_consequence(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, (FailedElsewhere, LostProcess)):
            return True
        error = error.__cause__ or error.__context__
    return False


def tell_agent(error: BaseException) -> None:
    """Leave the error that ends this process for torchrun's agent, where that looks for one and none is left yet."""
    path = os.environ.get(ERROR_FILE)
    if not path or os.path.exists(path):
        return
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": {"timestamp": str(int(time.time()))}}
    # A connection that is gone says of itself that another process is; both may fail within one second.
    follows = _is_consequence(error) or (isinstance(error, RuntimeError) and is_of_a_library(error))
    with suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": message, CONSEQUENCE: follows}, file)
