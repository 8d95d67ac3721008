"""The comparison itself: it sees each kind of difference, and none where there is none."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.libraries.sides import list_differences, read_folder

LOGS = [{"loss": 1.5, "step": 1}, {"loss": math.nan, "train_runtime": 3.0, "step": 2}]


def write_results(folder: Path, weight: float = 1.0, logs: list[dict[str, Any]] = LOGS, extra: str = "") -> Path:
    (folder / "run").mkdir(parents=True)
    save_file({"weight": torch.tensor([weight, 2.0])}, folder / "run" / "model.safetensors")
    (folder / "run" / "trainer_state.json").write_text(json.dumps({"log_history": logs, "epoch": 1.0}))
    if extra:
        (folder / "run" / extra).write_text("")
    return folder


def test_each_kind_of_difference_is_reported(tmp_path: Path) -> None:
    theirs = read_folder(write_results(tmp_path / "theirs")).values
    equal = write_results(tmp_path / "equal", 1.0, [LOGS[0], {**LOGS[1], "train_runtime": 4}], "littrainer_run.json")
    assert list_differences(read_folder(equal).values, theirs) == []
    other = write_results(tmp_path / "other", 1.25, [LOGS[0], {**LOGS[1], "loss": 1.0}], "extra.txt")
    extra, weights, logs = list_differences(read_folder(other).values, theirs)
    assert extra == "run/extra.txt: only ours" and weights.startswith("run/model.safetensors['weight']: 1 of 2 entries")
    assert logs.startswith("run/trainer_state.json['log_history'][1]['loss']: expected nan, got 1.0")
