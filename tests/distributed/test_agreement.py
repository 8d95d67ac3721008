"""What processes agree on, in three of them, and that one process on its own asks nobody.

Flags of the control are in test_data_parallel.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from littrainer.distributed import agreement
from tests.fidelity.conftest import ROOT, environment_of_runs
from tests.scenarios.once_per_session import carried_out_once
from tests.scenarios.other_processes import LONGEST_WAIT_SECONDS

SIZE = 3


def run_together(folder: Path) -> None:
    command = [sys.executable, "-m", "tests.distributed.agreeing_process"]
    processes = [
        subprocess.Popen([*command, str(rank), str(SIZE), str(folder)], cwd=ROOT, env=environment_of_runs())
        for rank in range(SIZE)
    ]
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


def test_a_flag_that_one_has_raised_is_raised_in_all(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["flags"] == [False, True, True] and one["largest"] == 20


def test_objects_reach_all_processes_or_each_its_own(found: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(found):
        assert one["from each"] == [{"rank": other, "text": "x" * other} for other in range(SIZE)]
        assert one["from first"] == [0, "first"] and one["for each"] == ["for", rank]


def test_raised_flags_are_counted_while_something_else_is_agreed_on(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["counts"] == [3, 1, 0]


def test_an_error_in_one_ends_all_and_the_others_name_its_rank_and_cause(found: list[dict[str, Any]]) -> None:
    texts = [one["fails_in_second"] for one in found]
    assert texts[1] == "OSError: [Errno 28] No space left on device"
    for rank in (0, 2):
        assert texts[rank] == (
            f"FailedElsewhere: Process {rank} ends because writing checkpoint-5 failed in process 1 with OSError: "
            "[Errno 28] No space left on device"
        )


def test_where_all_fail_each_has_its_own_error(found: list[dict[str, Any]]) -> None:
    assert [one["fails_in_all"] for one in found] == ["KeyError: 0", "KeyError: 1", "KeyError: 2"]


def test_one_that_fails_before_the_others_agree_is_heard_of_there(found: list[dict[str, Any]]) -> None:
    texts = [one["fails_before_others_agree"] for one in found]
    assert texts[1] == "ValueError: too early"
    for rank in (0, 2):
        assert "a part of it failed in process 1 with ValueError: too early" in texts[rank]


def test_an_error_is_told_once_though_it_passes_several_blocks(found: list[dict[str, Any]]) -> None:
    texts = [one["fails_within_and_is_wrapped"] for one in found]
    assert texts[0] == "LookupError: wrapped"
    assert all("failed in process 0 with ValueError: in the part" in text for text in texts[1:])


def test_an_interrupt_of_one_ends_all(found: list[dict[str, Any]]) -> None:
    texts = [one["is_interrupted"] for one in found]
    assert texts[1].startswith("KeyboardInterrupt")
    assert all("failed in process 1 with KeyboardInterrupt" in texts[rank] for rank in (0, 2))


def test_processes_at_different_places_are_an_error_and_no_wrong_value(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert "are at different places of the program" in one["is_elsewhere"]


def test_agreement_goes_on_after_failures_and_in_a_new_process_group(found: list[dict[str, Any]]) -> None:
    for one in found:
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
