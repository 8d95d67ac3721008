"""What a training step does in two processes: which model it is handed, what is exchanged when, and who decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.together import PROCESSES, found_together
from tests.fidelity.side import MODES

# As in `training_process`, which cannot be imported outside of its processes.
SAVED_STEP = 3

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Found]:
    """Where two processes, started once for all tests, wrote what they found and printed."""
    return found_together(tmp_path_factory, "training-together", "tests.distributed.training_process")


@pytest.fixture(scope="module")
def found(together: tuple[Path, Found]) -> Found:
    return together[1]


@pytest.mark.parametrize("mode", MODES)
def test_beside_gradients_nothing_is_waited_for_between_two_steps_that_do_not_log(found: Found, mode: str) -> None:
    # One for each of the two micro-batches, for the flags of the control.
    of_a_step = ["all_reduce in the background"] * 2
    for one in found:
        plain, finding, writing = (
            one["collectives_of_a_step"][f"{mode} {way}"] for way in ("plain", "finding a size", "writing")
        )
        assert plain == [of_a_step] * 4
        # In the first steps the processes agree on whether the size fits.
        assert finding[0].count("all_gather_object") == 2 and finding[1:] == [of_a_step] * 3
        # The step after a save is taken while its checkpoint is written.
        saved = writing.pop(SAVED_STEP - 1)
        assert "all_gather_object" in saved and writing == [of_a_step] * 3


def test_parameters_without_gradients_are_an_error_with_a_remedy_where_nobody_looks_for_them(found: Found) -> None:
    for one in found:
        assert "ddp_find_unused_parameters=True" in "\n".join(one["unused_parameters"])


def test_a_strategy_of_the_users_keeps_its_hook_and_gradients_are_exchanged_once_in_a_window(found: Found) -> None:
    for rank, one in enumerate(found):
        used = {"broadcasts buffers": False, "ranks": (rank, PROCESSES)}
        assert one["strategy_of_the_users"] == {
            f"{mode} {way}": {"buckets": buckets, **used}
            for mode in MODES
            for way, buckets in (("at the last", 2), ("at each", 6))
        }


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("stop, all", [("end", 2)]),
        ("stop, one", [("end", 3)]),
        ("stop when logging, one", [("end", 3)]),
        ("stop within a window, one", [("end", 3)]),
        ("end of epoch, one", [("end", 3)]),
        ("evaluate, all", [("evaluate", 2), ("end", 6)]),
        ("evaluate, one", [("evaluate", 3), ("end", 6)]),
    ],
)
def test_what_one_process_asks_for_all_do_one_step_later(
    found: Found, case: str, expected: list[tuple[str, int]]
) -> None:
    assert [one["flags"][case] for one in found] == [expected] * PROCESSES


def test_lightning_callbacks_decide_alike_in_all_processes(found: Found) -> None:
    first, second = (one["lightning_callbacks"] for one in found)
    for case in ("alone", "early", "averaging"):
        assert first[case] == second[case]
    # It stops where the evaluation of that step has come to its end, and each process knows what the other one wants.
    assert first["alone"][0] == 2
    assert first["early"][0] < 6


@pytest.mark.parametrize("mode", MODES)
def test_all_processes_start_over_where_memory_runs_out_in_one(found: Found, mode: str) -> None:
    first, second = (one["memory"][mode] for one in found)
    assert first == second
    assert first[:2] == (2, 3)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_parameters_that_a_callback_unfreezes_are_exchanged(found: Found, mode: str) -> None:
    (before, first), (_, second) = (one["unfrozen_parameters"][mode] for one in found)
    assert first == second != before


def test_models_that_ddp_cannot_train_are_refused_by_name(found: Found) -> None:
    for one in found:
        assert "VectorClassifier was loaded onto several devices (cpu, disk)" in one["refusals"]


def test_only_the_first_process_prints_and_the_one_that_raises_a_flag_alone_is_warned(
    together: tuple[Path, Found],
) -> None:
    folder, _ = together
    first, second = ((folder / f"out{rank}").read_text() for rank in range(PROCESSES))
    assert "train_runtime" in first and second == ""
    for rank in range(PROCESSES):
        log = (folder / f"log{rank}").read_text()
        for chatter in ("Initializing distributed", "distributed_backend", "GLOBAL_RANK", "LOCAL_RANK", "Trainer.fit"):
            assert chatter not in log, log
        assert ("control.should_training_stop was set in this process" in log) is (rank == 1)


@pytest.mark.parametrize("mode", MODES)
def test_finders_and_limits_are_those_of_all_processes(found: Found, mode: str) -> None:
    first, second = (one["trial_steps"][mode] for one in found)
    assert first == second
    assert len(first["curve"]["loss"]) == 6 and len(set(first["curve"]["loss"])) == 6
    # Memory runs out with four samples, in the second process only.
    assert (first["size"], first["steps"], first["samples"], first["is_unchanged"]) == (2, 3, 4, True)
