"""The comparison itself: it sees each kind of difference, and none where there is none."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.libraries.sides import Both, described, read_folder

STEP_IS_ABSENT = "run/trainer_state.json: log 1 / step: ours absent, theirs 2"
LOGS = [{"loss": 1.5, "step": 1}, {"loss": math.nan, "train_runtime": 3.0, "step": 2}]


def collect_results(folder: Path, weight: float = 1.0, logs: list[dict[str, Any]] = LOGS, extra: str = "") -> Path:
    (folder / "run").mkdir(parents=True)
    save_file({"weight": torch.tensor([weight, 2.0])}, folder / "run" / "model.safetensors")
    (folder / "run" / "trainer_state.json").write_text(json.dumps({"log_history": logs, "epoch": 1.0}))
    if extra:
        (folder / "run" / extra).write_text("")
    return folder


def compared(tmp_path: Path, **ours: Any) -> Both:
    return Both(
        read_folder(collect_results(tmp_path / "ours", **ours)), read_folder(collect_results(tmp_path / "theirs"))
    )


# Differences of ours -> their descriptions.
DIFFERENCES: list[tuple[dict[str, Any], list[str]]] = [
    ({"logs": [LOGS[0], {**LOGS[1], "train_runtime": 4.0}]}, []),
    ({"extra": "littrainer_manifest.json"}, []),
    ({"weight": 1.25}, ["run/model.safetensors: weight"]),
    (
        {"logs": [{**LOGS[0], "loss": 1.0}, LOGS[1]]},
        ["run/trainer_state.json: log 0 / loss: ours 1.0, theirs 1.5"],
    ),
    (
        {"logs": [LOGS[0], {**LOGS[1], "loss": 1.0}]},
        ["run/trainer_state.json: log 1 / loss: ours 1.0, theirs nan"],
    ),
    ({"logs": LOGS[:1]}, ["run/trainer_state.json: log 1 / loss: ours absent, theirs nan", STEP_IS_ABSENT]),
    ({"extra": "extra.txt"}, ["run/extra.txt: only ours"]),
]


@pytest.mark.parametrize(("ours", "said"), DIFFERENCES)
def test_each_kind_of_difference_is_reported(tmp_path: Path, ours: dict[str, Any], said: list[str]) -> None:
    assert described(compared(tmp_path, **ours)) == said
