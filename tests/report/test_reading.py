from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from littrainer.report.reading import NothingToReport, read_folders

from .folders import write_state


def refusal(*folders: Path) -> str:
    with pytest.raises(NothingToReport) as refused:
        read_folders([str(folder) for folder in folders])
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_the_state_in_the_output_dir_is_read_first(tmp_path: Path) -> None:
    write_state(tmp_path, global_step=4)
    write_state(tmp_path / "checkpoint-2", global_step=2)
    (run,) = read_folders([str(tmp_path)]).runs
    assert (run.state.global_step, run.state_file) == (4, tmp_path / "trainer_state.json")


def test_without_it_the_newest_checkpoint_that_has_one_is_read(tmp_path: Path) -> None:
    for step in (2, 10, 9):
        write_state(tmp_path / f"checkpoint-{step}", global_step=step)
    (tmp_path / "checkpoint-11").mkdir()
    write_state(tmp_path / "checkpoint-99-old", global_step=99)
    (run,) = read_folders([str(tmp_path)]).runs
    assert run.state.global_step == 10


def test_a_checkpoint_or_the_file_itself_may_be_given(tmp_path: Path) -> None:
    checkpoint = write_state(tmp_path / "run" / "checkpoint-4")
    runs = read_folders([str(checkpoint), str(checkpoint / "trainer_state.json")]).runs
    assert [run.folder for run in runs] == [checkpoint]


def test_a_checkpoint_that_goes_further_is_told_of(tmp_path: Path) -> None:
    write_state(tmp_path, global_step=4)
    write_state(tmp_path / "checkpoint-8", global_step=8)
    (run,) = read_folders([str(tmp_path)]).runs
    assert any("checkpoint-8 goes further" in note and "ends at step 4" in note for note in run.notes)


def test_names_are_as_short_as_they_can_be_told_apart(tmp_path: Path) -> None:
    folders = [write_state(tmp_path / path) for path in ("a/run", "b/run", "other")]
    runs = read_folders([str(folder) for folder in folders]).runs
    assert [run.name for run in runs] == [os.path.join("a", "run"), os.path.join("b", "run"), "other"]


def test_the_best_checkpoint_is_found_where_the_run_was_moved_to(tmp_path: Path) -> None:
    recorded = "/somewhere/else/checkpoint-2"
    write_state(tmp_path, best_model_checkpoint=recorded, best_metric=0.5)
    assert read_folders([str(tmp_path)]).runs[0].best_checkpoint == f"{recorded} (not there)"
    (tmp_path / "checkpoint-2").mkdir()
    (run,) = read_folders([str(tmp_path)]).runs
    assert run.best_checkpoint == str(tmp_path / "checkpoint-2")
    # Releases before 4.53 do not record the step.
    assert run.best_step == 2


def test_missing_arguments_are_told_of(tmp_path: Path) -> None:
    (run,) = read_folders([str(write_state(tmp_path))]).runs
    assert run.notes == [
        f"The arguments are not known: there is no training_args.bin beside {tmp_path / 'trainer_state.json'}."
    ]


def test_arguments_that_cannot_be_read_safely_are_told_of_with_the_reason(tmp_path: Path) -> None:
    write_state(tmp_path)
    (tmp_path / "training_args.bin").write_bytes(b"nonsense")
    (run,) = read_folders([str(tmp_path)]).runs
    assert run.stored is None
    assert f"{tmp_path / 'training_args.bin'} could not be read safely, it is damaged" in run.notes[0]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path / "absent") == (
        f"{tmp_path / 'absent'} does not exist; give the output_dir of a training, or a checkpoint in it."
    )
    (tmp_path / "file").touch()
    assert refusal(tmp_path / "file").startswith(f"{tmp_path / 'file'} is a file;")


def test_a_folder_without_a_state_is_named_with_what_would_write_one(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    assert f"{tmp_path} has no trainer_state.json" in refusal(tmp_path)
    assert "save_state()" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"global_step": 4, "log_hist', "Unterminated string"),
        (b"", "Expecting value"),
        (b"\xff\xfe\x00", "decode"),
        (b"[1, 2]", "no object"),
        (b"{}", "global_step is missing"),
        (b'{"global_step": "4"}', "global_step is '4'"),
        (b'{"global_step": 4, "log_history": {"loss": 1}}', "log_history is"),
        (b'{"global_step": 4, "best_metric": "high"}', "best_metric is 'high'"),
        (b'{"global_step": ' + b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_state_that_cannot_be_read_is_named_with_the_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "trainer_state.json").write_bytes(content)
    message = refusal(tmp_path)
    assert str(tmp_path / "trainer_state.json") in message
    assert reason in message
    assert "give the folder of a checkpoint" in message


def test_one_bad_folder_among_several_refuses_all(tmp_path: Path) -> None:
    good = write_state(tmp_path / "good")
    assert str(tmp_path / "bad") in refusal(good, tmp_path / "bad")


def test_a_state_as_transformers_4_wrote_it_is_read(tmp_path: Path) -> None:
    state = {
        "best_metric": None,
        "best_model_checkpoint": None,
        "epoch": 1.0,
        "global_step": 4,
        "is_hyper_param_search": False,
        "is_local_process_zero": True,
        "is_world_process_zero": True,
        "log_history": [{"epoch": 1.0, "learning_rate": 1e-05, "loss": 2.5, "step": 4}],
        "max_steps": 4,
        "num_train_epochs": 1,
        "total_flos": 1056374.0,
        "trial_name": None,
        "trial_params": None,
    }
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    (run,) = read_folders([str(tmp_path)]).runs
    assert run.history.metrics() == ["learning_rate", "loss"]
    assert run.best_step is None and run.best_checkpoint is None
