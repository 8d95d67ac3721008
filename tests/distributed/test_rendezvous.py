from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from littrainer.distributed import rendezvous
from littrainer.distributed.rendezvous import MeetingError, meet
from tests.distributed.launchers import set_only
from tests.distributed.together import port_for_a_meeting

SOON = timedelta(seconds=1)


@pytest.fixture
def meeting_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], int]:
    def at(port: int) -> int:
        set_only(monkeypatch, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        return port

    return at


def test_processes_that_come_share_a_store(meeting_at: Callable[[int], int], monkeypatch: pytest.MonkeyPatch) -> None:
    meeting_at(port_for_a_meeting())
    # Threads stand for processes, each of which counts its own meetings.
    monkeypatch.setattr(rendezvous, "_meetings", itertools.repeat(0))
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda rank: meet(rank, 2, timedelta(seconds=120)), range(2))
    first.set("key", "value")
    assert second.get("key") == b"value"


def test_a_process_that_comes_under_the_rank_of_another_is_refused(
    meeting_at: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting_at(port_for_a_meeting())
    monkeypatch.setattr(rendezvous, "_meetings", itertools.repeat(0))
    store = meet(0, 1, SOON)
    own = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: own + 1)
    with pytest.raises(
        MeetingError, match=f"RANK=0 is given to two processes, process {own} on .* and process {own + 1}"
    ):
        meet(0, 1, SOON)
    assert store.check(["complete"])


def test_a_second_meeting_of_the_same_processes_shares_nothing_with_the_first(
    meeting_at: Callable[[int], int],
) -> None:
    meeting_at(port_for_a_meeting())
    first = meet(0, 1, SOON)
    first.set("key", "value")
    assert not meet(0, 1, SOON).check(["key"])


def test_a_process_that_never_comes_is_named(meeting_at: Callable[[int], int]) -> None:
    port = meeting_at(port_for_a_meeting())
    with pytest.raises(MeetingError, match=rf"waited 1 s \(ddp_timeout\) at 127\.0\.0\.1:{port} for 3 .* 1, 2 did not"):
        meet(0, 3, SOON)


def test_a_first_process_that_is_not_there_is_looked_for_by_its_address(meeting_at: Callable[[int], int]) -> None:
    port = meeting_at(port_for_a_meeting())
    with pytest.raises(MeetingError, match=rf"Process 1 of 2 has not found the first process at 127\.0\.0\.1:{port}"):
        meet(1, 2, SOON)


def test_a_port_in_use_is_named_with_what_chooses_another(meeting_at: Callable[[int], int]) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = meeting_at(other.getsockname()[1])
        with pytest.raises(MeetingError, match=f"Port {port} of this machine is in use.*--main-port"):
            meet(0, 2, SOON)


def test_several_processes_have_to_know_where_the_first_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    set_only(monkeypatch, RANK="0", WORLD_SIZE="2")
    with pytest.raises(MeetingError, match=r"2 processes \(WORLD_SIZE\).*MASTER_ADDR, which says .* is not set"):
        meet(0, 2, SOON)
