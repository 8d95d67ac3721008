"""Collectives in three processes and in a single process; test_data_parallel.py tests flags of the control."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from littrainer.distributed import collectives
from littrainer.distributed.failures import PeerLostError
from tests.distributed.process_launch import start_processes
from tests.scenarios.once_per_session import run_once
from tests.scenarios.other_processes import MAX_WAIT_SECONDS

SIZE = 3


def run_in_processes(folder: Path) -> None:
    command = [sys.executable, "-m", "tests.distributed.collectives_process", str(folder)]
    processes, _ = start_processes(command, folder, processes=SIZE)
    try:
        for process in processes:
            process.wait(MAX_WAIT_SECONDS)
    finally:
        for process in processes:
            process.kill()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of three processes."""
    folder = run_once(tmp_path_factory, "collectives", run_in_processes)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(SIZE)]


def test_flags_numbers_and_objects_are_exchanged(results: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(results):
        assert result["flags"] == [False, True, True] and result["largest"] == 20
        assert result["gathered"] == [{"rank": other, "text": "x" * other} for other in range(SIZE)]
        assert result["broadcast"] == [0, "first"] and result["scattered"] == ["for", rank]


def test_an_error_ends_all_processes_with_its_rank_and_cause(results: list[dict[str, Any]]) -> None:
    full = "OSError: [Errno 28] No space left on device"
    # Check -> the process that fails, its error, and a part of the others' errors.
    failures = {
        "fails_in_second": (1, full, f"because writing checkpoint-5 failed in process 1 with {full}"),
        "fails_before_an_exchange": (1, "ValueError: too early", "a part of it failed in process 1 with ValueError"),
        "fails_within_and_is_wrapped": (0, "LookupError: wrapped", "in process 0 with ValueError: in the part"),
        "is_interrupted": (1, "KeyboardInterrupt: ", "failed in process 1 with KeyboardInterrupt"),
    }
    for name, (failed, error, message) in failures.items():
        for rank, result in enumerate(results):
            if rank == failed:
                assert result[name] == error
            else:
                assert result[name].startswith(f"PeerFailedError: Process {rank} ends because ")
                assert message in result[name]
    assert [result["fails_in_all"] for result in results] == ["KeyError: 0", "KeyError: 1", "KeyError: 2"]


def test_different_collectives_are_an_error_and_a_new_group_works(
    results: list[dict[str, Any]],
) -> None:
    for result in results:
        assert "are at different places of the program" in result["is_elsewhere"]
        assert result["afterwards"] == [0, 1, 2] and result["in a new group"] == [[0, 1, 2], True]


def test_errors_name_a_process_that_was_killed(results: list[dict[str, Any]]) -> None:
    assert "dies" not in results[1]
    for rank in (0, 2):
        assert "process 1 has ended" in results[rank]["dies"]


def test_a_single_process_does_not_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "_connect", lambda: pytest.fail("connected to other processes"))
    assert collectives.any_rank(True) and not collectives.any_rank(False) and collectives.all_reduce_max(3) == 3
    assert collectives.all_gather_object("a") == ["a"] and collectives.broadcast_object("a") == "a"
    assert collectives.scatter_object(["a"]) == "a"
    with pytest.raises(KeyError), collectives.raise_on_all_ranks("writing"):
        raise KeyError


def test_ctrl_c_does_not_wait_and_lost_processes_hide_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_lost_process(*_: Any) -> Any:
        raise PeerLostError("they have ended")

    monkeypatch.setattr(collectives, "is_distributed", lambda: True)
    monkeypatch.setattr(collectives, "KEEPALIVE_INTERVAL_S", 0.01)
    may_end = threading.Event()
    timer = threading.Timer(20, may_end.set)
    timer.start()
    monkeypatch.setattr(collectives, "_exchange", lambda *_: may_end.wait(MAX_WAIT_SECONDS))
    with pytest.raises(KeyboardInterrupt), collectives.raise_on_all_ranks("writing"):
        raise KeyboardInterrupt
    assert not may_end.is_set()
    timer.cancel()
    may_end.set()
    monkeypatch.setattr(collectives, "_exchange", raise_lost_process)
    with pytest.raises(KeyError, match="the cause"), collectives.raise_on_all_ranks("writing"):
        raise KeyError("the cause")
