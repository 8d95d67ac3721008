from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers

from littrainer.callbacks.state import TrainerControl, TrainerState

FILLED: dict[str, Any] = {
    "epoch": 1.25,
    "global_step": 10,
    "max_steps": 40,
    "logging_steps": 0.1,
    "num_input_tokens_seen": 7,
    "total_flos": 12345678901234567890.0,
    "log_history": [{"loss": 0.5, "step": 1}, {"eval_loss": float("inf"), "näme": 1e-7, "step": 2}],
    "best_metric": 0.25,
    "best_global_step": 5,
    "best_model_checkpoint": "out/checkpoint-5",
    "is_hyper_param_search": True,
    "trial_name": "trial",
    "trial_params": {"lr": 1e-3, "kind": "a"},
}


@pytest.mark.parametrize("fields", [{}, FILLED], ids=["empty", "filled"])
def test_a_state_is_written_to_the_file_that_transformers_writes(tmp_path: Path, fields: dict[str, Any]) -> None:
    texts = []
    for kind in (TrainerState, transformers.TrainerState):
        kind(**fields).save_to_json(str(tmp_path / "state.json"))
        texts.append((tmp_path / "state.json").read_text("utf-8"))
    assert texts[0] == texts[1]


def test_a_state_comes_back_from_the_file_that_transformers_wrote(tmp_path: Path) -> None:
    path = str(tmp_path / "state.json")
    transformers.TrainerState(**FILLED, stateful_callbacks=[]).save_to_json(path)
    assert dataclasses.asdict(TrainerState.load_from_json(path)) == dataclasses.asdict(TrainerState(**FILLED))


def test_a_dataclass_in_a_state_is_written_as_transformers_writes_it() -> None:
    control = TrainerControl(should_save=True)
    content = json.loads(TrainerState(trial_params={"control": control}).to_json())
    assert content["trial_params"]["control"] == dataclasses.asdict(control)


def test_what_cannot_be_exported_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"SimpleNamespace.*ExportableState"):
        TrainerState(stateful_callbacks=[SimpleNamespace()])


@pytest.mark.parametrize("switched", [(), ("should_save", "should_training_stop")])
def test_a_control_exports_what_transformers_control_exports(switched: tuple[str, ...]) -> None:
    fields = dict.fromkeys(switched, True)
    # A callback may set a switch to the result of a comparison.
    control = TrainerControl(**dict.fromkeys(switched, np.float64(1) > 0))
    assert all(type(switch) is bool for switch in control.state()["args"].values())
    assert control.state() == transformers.TrainerControl(**fields).state()
    assert TrainerControl.from_state(control.state()) == control
