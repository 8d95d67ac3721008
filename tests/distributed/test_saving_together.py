"""Two processes that write, choose and resume checkpoints together, and what becomes of them when one fails or dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from littrainer.checkpoint.verification import damage_in
from tests.distributed.saving_process import LONGEST_WAIT, make
from tests.distributed.together import found_in, run_together
from tests.scenarios.once_per_session import carried_out_once

WHOLE = ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
FILES = [
    "littrainer_manifest.json",
    "littrainer_resume.pt",
    "littrainer_resume_1.pt",
    "model.safetensors",
    "optimizer.pt",
    "rng_state_0.pth",
    "rng_state_1.pth",
    "scheduler.pt",
    "trainer_state.json",
    "training_args.bin",
]
Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which two processes have done all that is looked at here; they are started once."""

    def run(folder: Path) -> None:
        run_together("tests.distributed.saving_process", folder, are_told_where_to_meet=False)

    return carried_out_once(tmp_path_factory, "saving-together", run)


@pytest.fixture(scope="module")
def found(runs: Path) -> Found:
    """What each of the two processes found."""
    return found_in(runs)


def check_equal(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(weights) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor), name


def check_state(state: dict[str, Any], checkpoints: list[str]) -> None:
    assert state == {"checkpoints": checkpoints, "damage": [[] for _ in checkpoints], "hidden": []}


def test_a_checkpoint_holds_a_part_of_each_process_and_is_resumed_exactly(found: Found) -> None:
    for one in found:
        check_state(one["whole"]["state"], WHOLE)
        assert one["whole"]["files"] == FILES
        assert one["whole"]["sealed"] == [name for name in FILES if name != "littrainer_manifest.json"]
        assert one["whole"]["saves"] == [2, 4, 6]
        check_equal(one["whole"]["resumed"], one["whole"]["weights"])


@pytest.mark.parametrize(
    ("place", "fails", "error"),
    [
        ("weights of the first", 0, "checkpoint-4 could not be written beyond"),
        ("random states of the second", 1, "Permission denied"),
    ],
)
def test_a_checkpoint_that_one_process_cannot_write_ends_both_and_the_earlier_ones_are_gone_on_from(
    found: Found, place: str, fails: int, error: str
) -> None:
    texts = [one["failures"][place][0] for one in found]
    assert error in texts[fails] and "FailedElsewhere" not in texts[fails]
    assert error in texts[1 - fails] and f"failed in process {fails} with" in texts[1 - fails]
    assert "checkpoint-4" in texts[1 - fails]
    for one in found:
        check_state(one["failures"][place][1], ["checkpoint-2"])
        check_equal(one["failures"]["resumed"], one["whole"]["weights"])


def test_an_error_in_on_save_of_one_process_ends_both_and_leaves_the_checkpoint(found: Found) -> None:
    (first, state), (second, _) = (one["failures"]["on_save"] for one in found)
    assert "on_save of callbacks failed in process 1 with LookupError: the upload failed" in first
    assert second == "LookupError: the upload failed"
    check_state(state, ["checkpoint-2", "checkpoint-4"])


@pytest.mark.parametrize("victim", [0, 1])
def test_the_death_of_one_process_while_it_saves_ends_the_other_at_once_and_the_next_run_tidies_up(
    runs: Path, found: Found, victim: int
) -> None:
    assert found[victim][f"{victim} killed"] is None
    other = found[1 - victim][f"{victim} killed"]
    assert f"process {victim} has ended" in other["error"]
    assert other["seconds"] < LONGEST_WAIT.total_seconds() / 2
    run = runs / f"killed{victim}" / "run"
    assert damage_in(run / "checkpoint-2") == [] and not (run / "checkpoint-4").exists()
    trainer = make(run)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 6
    assert sorted(path.name for path in run.iterdir()) == [*WHOLE, "littrainer_run.json"]


def test_checkpoints_written_in_the_background_are_the_same_and_a_failure_ends_both(found: Found) -> None:
    for one in found:
        assert one["background"]["saves"] == [2, 4, 6]
        check_state(one["background"]["state"], WHOLE[1:])
        assert one["background"]["files"] == FILES
        check_equal(one["background"]["weights"], one["whole"]["weights"])
    first, second = (one["background"]["error"] for one in found)
    assert first.startswith("BackgroundSaveError") and "No space left" in first
    assert second.startswith("FailedElsewhere") and "failed in process 0 with BackgroundSaveError" in second
    check_state(found[0]["background"]["full"], ["checkpoint-2"])


def test_a_damaged_newest_checkpoint_is_passed_over_by_both(found: Found) -> None:
    for one in found:
        assert one["choosing"]["started"] == [2]
        check_equal(one["choosing"]["weights"], one["whole"]["weights"])


def test_a_checkpoint_that_cannot_be_resumed_in_both_is_refused(found: Found) -> None:
    first, second = (one["choosing"] for one in found)
    assert "is damaged: rng_state_1.pth has 10 bytes" in first["damaged"]
    assert "failed in process 0" in second["damaged"] and "rng_state_1.pth has 10 bytes" in second["damaged"]
    for one in (first, second):
        assert "no intact checkpoint" in one["nothing"]
        assert "process 1 is not: give all of them the same resume_from_checkpoint" in one["one sided"]


def test_parts_written_on_another_disk_are_brought_to_the_checkpoint_which_is_refused_there(found: Found) -> None:
    first, second = (one["disks"] for one in found)
    expected = [f"out/checkpoint-{step}/{name}" for step in (2, 4) for name in FILES]
    assert first["one writes"] == expected and second["one writes"] == []
    both = [[f"checkpoint-{step}/{name}" for step in (2, 4) for name in FILES], []]
    assert first["another folder in each"] == second["another folder in each"] == both
    for one in (first, second):
        assert "Process 1 on" in one["not seen"] and "finds no such folder" in one["not seen"]
        assert "save_on_each_node=True" in one["not seen"]


def test_each_node_writes_a_whole_checkpoint_to_a_disk_of_its_own_and_resumes_from_it(found: Found) -> None:
    for rank, one in enumerate(found):
        names = {name.rpartition("/")[2] for name in one["disks"]["each writes"]}
        assert names == set(FILES) - (
            {"rng_state_1.pth", "littrainer_resume_1.pt"} if rank == 0 else {"rng_state_0.pth"}
        )
        check_equal(one["disks"]["each resumes"], one["whole"]["weights"])
    (told,) = found[0]["disks"]["passed over"]
    assert "checkpoint-4" in told and "Process 1 on" in told and "optimizer.pt has 10 bytes" in told


def test_nodes_that_share_a_disk_write_one_checkpoint_though_each_is_to_save(found: Found) -> None:
    for one in found:
        check_state(one["disks"]["shared"], ["checkpoint-2", "checkpoint-4"])
        assert one["disks"]["files of the shared"] == FILES
    assert found[0]["disks"]["told of sharing"] == []
    (told,) = found[1]["disks"]["told of sharing"]
    assert "same disk as process 0" in told


@pytest.mark.parametrize(("event", "step"), [("on_step_begin", 3), ("on_step_end", 3), ("on_prediction_step", 4)])
def test_a_signal_to_one_process_saves_once_stops_both_and_training_goes_on_exactly(
    found: Found, event: str, step: int
) -> None:
    for one in found:
        stopped = one["signals"][event]
        assert stopped["step"] == step and stopped["saves"] == [step]
        check_state(stopped["state"], [f"checkpoint-{step}"])
        check_equal(stopped["resumed"], one["signals"]["whole"])


def test_the_folder_of_another_run_or_below_a_file_is_refused_in_both(found: Found) -> None:
    first, second = (one["claims"] for one in found)
    assert first["error"].startswith("RuntimeError: Another run, a process")
    assert "failed in process 0" in second["error"] and "Another run, a process" in second["error"]
    check_state(first["after"], ["checkpoint-2"])
    assert first["below a file"].startswith("NotADirectoryError")
    assert "creating output_dir=" in second["below a file"] and "process 0 with NotADirectory" in second["below a file"]


def test_what_a_lightning_callback_saves_holds_a_part_of_each_process(found: Found) -> None:
    for one in found:
        assert one["lightning_checkpoints"]["files"] == sorted(["lightning_state.pt", *FILES])
        assert one["lightning_checkpoints"]["damage"] == []
        check_equal(one["lightning_checkpoints"]["resumed"], one["whole"]["weights"])


def test_a_checkpoint_of_another_number_of_processes_is_resumed_with_one_warning_that_names_both(
    found: Found,
) -> None:
    assert found[0]["other_numbers"]["world size"] == 2
    for one in found:
        assert one["other_numbers"]["step"] == 6
        (told,) = one["other_numbers"]["told"]
        assert "There are now 2 processes (1)." in told and "Random numbers go on from the seed" in told
