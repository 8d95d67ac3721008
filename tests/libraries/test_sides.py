"""The comparison itself: it sees each kind of difference, and none where there is none."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.libraries.sides import Both, described, differences, read_folder

LOGS = [{"loss": 1.5, "step": 1}, {"loss": math.nan, "train_runtime": 3.0, "step": 2}]


def left_by(folder: Path, weight: float = 1.0, logs: list[dict[str, Any]] = LOGS, extra: str = "") -> Path:
    (folder / "run").mkdir(parents=True)
    save_file({"weight": torch.tensor([weight, 2.0])}, folder / "run" / "model.safetensors")
    (folder / "run" / "trainer_state.json").write_text(json.dumps({"log_history": logs, "epoch": 1.0}))
    if extra:
        (folder / "run" / extra).write_text("")
    return folder


def compared(tmp_path: Path, **ours: Any) -> Both:
    return Both(read_folder(left_by(tmp_path / "ours", **ours)), read_folder(left_by(tmp_path / "theirs")))


def test_what_differs_only_in_time_is_equal(tmp_path: Path) -> None:
    both = compared(tmp_path, logs=[LOGS[0], {**LOGS[1], "train_runtime": 4.0}])
    assert described(both) == []
    assert set(differences(both).values()) == {0.0}


def test_a_weight_that_differs_is_named_with_its_distance(tmp_path: Path) -> None:
    both = compared(tmp_path, weight=1.25)
    assert described(both) == ["run/model.safetensors: weight: 0.25"]
    assert described(both, tolerance=0.5) == []


def test_a_logged_value_that_differs_is_named_with_both_values(tmp_path: Path) -> None:
    both = compared(tmp_path, logs=[{**LOGS[0], "loss": 1.0}, LOGS[1]])
    assert described(both) == ["run/trainer_state.json: log 0 / loss: 0.5: ours 1.0, theirs 1.5"]


def test_a_value_that_is_a_number_on_one_side_only_differs(tmp_path: Path) -> None:
    both = compared(tmp_path, logs=[LOGS[0], {**LOGS[1], "loss": 1.0}])
    assert [line.partition(": ours")[0] for line in described(both)] == ["run/trainer_state.json: log 1 / loss: nan"]


def test_a_log_entry_or_a_file_that_one_side_lacks_is_a_difference(tmp_path: Path) -> None:
    both = compared(tmp_path, logs=LOGS[:1], extra="extra.txt")
    assert described(both)[0] == "run/extra.txt: only ours"
    assert "run/trainer_state.json: log 1 / step: inf: ours absent, theirs 2" in described(both)
    assert math.inf in differences(both).values()


def test_files_that_only_littrainer_writes_are_no_difference(tmp_path: Path) -> None:
    both = compared(tmp_path, extra="littrainer_manifest.json")
    assert described(both) == []
    assert both.ours.own_files == {"run/littrainer_manifest.json"}
