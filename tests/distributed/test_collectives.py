"""What processes agree on, in three of them, and that one process on its own asks nobody.

Flags of the control are in test_data_parallel.py.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from littrainer.distributed import collectives
from littrainer.distributed.failures import LostProcess
from tests.distributed.together import start_processes
from tests.scenarios.once_per_session import carried_out_once
from tests.scenarios.other_processes import LONGEST_WAIT_SECONDS

SIZE = 3


def run_in_processes(folder: Path) -> None:
    command = [sys.executable, "-m", "tests.distributed.collectives_process", str(folder)]
    processes, _ = start_processes(command, folder, processes=SIZE)
    try:
        for process in processes:
            process.wait(LONGEST_WAIT_SECONDS)
    finally:
        for process in processes:
            process.kill()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of three processes found; they are started once for all tests."""
    folder = carried_out_once(tmp_path_factory, "agreeing", run_in_processes)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(SIZE)]


def test_flags_numbers_and_objects_are_agreed_on(found: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(found):
        assert one["flags"] == [False, True, True] and one["largest"] == 20
        assert one["from each"] == [{"rank": other, "text": "x" * other} for other in range(SIZE)]
        assert one["from first"] == [0, "first"] and one["for each"] == ["for", rank]


def test_an_error_in_one_ends_all_and_the_others_name_its_rank_and_cause(found: list[dict[str, Any]]) -> None:
    full = "OSError: [Errno 28] No space left on device"
    # What is tried -> the process that fails, its error, and what the others say.
    failures = {
        "fails_in_second": (1, full, f"because writing checkpoint-5 failed in process 1 with {full}"),
        "fails_before_others_agree": (1, "ValueError: too early", "a part of it failed in process 1 with ValueError"),
        "fails_within_and_is_wrapped": (0, "LookupError: wrapped", "in process 0 with ValueError: in the part"),
        "is_interrupted": (1, "KeyboardInterrupt: ", "failed in process 1 with KeyboardInterrupt"),
    }
    for name, (failed, own, told) in failures.items():
        for rank, one in enumerate(found):
            if rank == failed:
                assert one[name] == own
            else:
                assert one[name].startswith(f"FailedElsewhere: Process {rank} ends because ") and told in one[name]
    assert [one["fails_in_all"] for one in found] == ["KeyError: 0", "KeyError: 1", "KeyError: 2"]


def test_processes_at_different_places_are_an_error_and_agreement_goes_on_in_a_new_group(
    found: list[dict[str, Any]],
) -> None:
    for one in found:
        assert "are at different places of the program" in one["is_elsewhere"]
        assert one["after all that"] == [0, 1, 2] and one["in a new group"] == [[0, 1, 2], True]


def test_a_process_that_dies_is_named_by_the_others(found: list[dict[str, Any]]) -> None:
    assert "dies" not in found[1]
    for rank in (0, 2):
        assert "process 1 has ended" in found[rank]["dies"]


def test_one_process_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "_connected", lambda: pytest.fail("there is nobody to ask"))
    assert collectives.any_rank(True) and not collectives.any_rank(False) and collectives.all_reduce_max(3) == 3
    assert collectives.all_gather_object("a") == ["a"] and collectives.broadcast_object("a") == "a"
    assert collectives.scatter_object(["a"]) == "a"
    with pytest.raises(KeyError), collectives.raise_on_all_ranks("writing"):
        raise KeyError


def test_ctrl_c_does_not_wait_for_the_others_and_their_end_hides_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def are_gone(*_: Any) -> Any:
        raise LostProcess("they have ended")

    monkeypatch.setattr(collectives, "is_distributed", lambda: True)
    monkeypatch.setattr(collectives, "KEEPALIVE_INTERVAL_S", 0.01)
    may_end = threading.Event()
    timer = threading.Timer(20, may_end.set)
    timer.start()
    monkeypatch.setattr(collectives, "_exchanged", lambda *_: may_end.wait(LONGEST_WAIT_SECONDS))
    with pytest.raises(KeyboardInterrupt), collectives.raise_on_all_ranks("writing"):
        raise KeyboardInterrupt
    assert not may_end.is_set()
    timer.cancel()
    may_end.set()
    monkeypatch.setattr(collectives, "_exchanged", are_gone)
    with pytest.raises(KeyError, match="the cause"), collectives.raise_on_all_ranks("writing"):
        raise KeyError("the cause")
