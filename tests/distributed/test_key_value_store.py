"""Values left by the first process, fetched by another one; both are in this process, on a store that they share."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from littrainer.distributed import key_value_store
from littrainer.distributed.failure_report import FailedElsewhere, LostProcess
from littrainer.distributed.key_value_store import CLOSED, KeyValueStore
from tests.scenarios.other_processes import LONGEST_WAIT_SECONDS

WHAT = "the hyperparameter 'rate'"


@pytest.fixture(autouse=True)
def shared_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(key_value_store, "longest_wait", lambda: timedelta(seconds=60))


def test_a_value_that_was_left_before_is_there_at_once_whatever_its_name() -> None:
    first, second = KeyValueStore("trial"), KeyValueStore("trial")
    first.post("rate", 0.1)
    first.post(CLOSED, [1, None])
    first.close()
    assert second.fetch("rate", WHAT) == 0.1
    assert second.fetch(CLOSED, WHAT) == [1, None]


def test_a_value_is_waited_for() -> None:
    first, second = KeyValueStore("trial"), KeyValueStore("trial")
    fetched: list[float] = []
    waiting = threading.Thread(target=lambda: fetched.append(second.fetch("rate", WHAT)))
    waiting.start()
    first.post("rate", 0.1)
    waiting.join(LONGEST_WAIT_SECONDS)
    assert fetched == [0.1]


def test_values_of_another_key_are_others() -> None:
    KeyValueStore("earlier trial").post("rate", 0.1)
    later = KeyValueStore("later trial")
    later.close()
    with pytest.raises(FailedElsewhere, match="waits for the hyperparameter 'rate', and process 0 has failed"):
        later.fetch("rate", WHAT)


def test_a_value_that_the_first_process_has_passed_over_is_not_waited_for() -> None:
    first, second = KeyValueStore("trial"), KeyValueStore("trial")
    first.post("end of the space", True)
    with pytest.raises(KeyError):
        second.fetch("rate", WHAT, before="end of the space")


def test_waiting_ends_when_processes_have_waited_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_value_store, "longest_wait", lambda: timedelta(seconds=0))
    with pytest.raises(
        LostProcess,
        match="waits for the hyperparameter 'rate' from process 0, which has not come to it within ddp_timeout",
    ):
        KeyValueStore("trial").fetch("rate", WHAT)


def test_waiting_ends_when_the_first_process_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_value_store, "SECONDS_OF_A_SHORT_WAIT", 0.0)
    monkeypatch.setattr(key_value_store, "ended_processes", lambda: [0])
    with pytest.raises(LostProcess, match="from process 0, which has ended"):
        KeyValueStore("trial").fetch("rate", WHAT)


def test_what_was_left_can_be_removed() -> None:
    first, second = KeyValueStore("trial"), KeyValueStore("trial")
    first.post("rate", 0.1)
    first.close()
    first.clear()
    second.close()
    with pytest.raises(FailedElsewhere):
        second.fetch("rate", WHAT)


def test_processes_without_a_store_are_told_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: None)
    with pytest.raises(RuntimeError, match='"gloo" or "nccl"'):
        KeyValueStore("trial")
