"""What processes agree on, in three of them, and that one process on its own asks nobody.

Flags of the control are in test_data_parallel.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from littrainer.distributed import agreement
from tests.distributed.together import start_processes
from tests.scenarios.once_per_session import carried_out_once
from tests.scenarios.other_processes import LONGEST_WAIT_SECONDS

SIZE = 3


def run_together(folder: Path) -> None:
    command = [sys.executable, "-m", "tests.distributed.agreeing_process", str(folder)]
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
    folder = carried_out_once(tmp_path_factory, "agreeing", run_together)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(SIZE)]


def test_flags_numbers_and_objects_are_agreed_on(found: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(found):
        assert one["flags"] == [False, True, True] and one["largest"] == 20
        assert one["from each"] == [{"rank": other, "text": "x" * other} for other in range(SIZE)]
        assert one["from first"] == [0, "first"] and one["for each"] == ["for", rank]
        # Counted while something else is agreed on.
        assert one["counts"] == [3, 1, 0]


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
    monkeypatch.setattr(agreement, "_connected", lambda: pytest.fail("there is nobody to ask"))
    assert agreement.agreed(True) and not agreement.agreed(False) and agreement.largest(3) == 3
    assert agreement.from_each("a") == ["a"] and agreement.from_first("a") == "a"
    assert agreement.from_first_to_each(["a"]) == "a" and agreement.begin_counting([True, False])() == [1, 0]
    with pytest.raises(KeyError), agreement.failing_together("writing"):
        raise KeyError
