from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from transformers.trainer_callback import ExportableState as TheirExportableState

from littrainer.callbacks.base import TrainerCallback
from littrainer.callbacks.early_stopping import EarlyStoppingCallback
from littrainer.callbacks.state import ExportableState, TrainerControl, TrainerState

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


def test_a_state_has_the_fields_and_defaults_of_transformers_state() -> None:
    assert dataclasses.asdict(TrainerState()) == dataclasses.asdict(transformers.TrainerState())


@pytest.mark.parametrize(
    ("writer", "reader"), [(TrainerState, TrainerState), (transformers.TrainerState, TrainerState)]
)
def test_a_state_comes_back_from_its_file(tmp_path: Path, writer: Any, reader: Any) -> None:
    path = str(tmp_path / "state.json")
    writer(**FILLED, stateful_callbacks=[]).save_to_json(path)
    assert dataclasses.asdict(reader.load_from_json(path)) == dataclasses.asdict(reader(**FILLED))


class Counter(TrainerCallback, ExportableState):
    """Keeps a constructor argument and a value set later."""

    def __init__(self, start: int = 0) -> None:
        self.start = start
        self.count = 0

    def state(self) -> dict[str, Any]:
        return {"args": {"start": self.start}, "attributes": {"count": self.count}}


def test_a_class_without_a_state_of_its_own_says_what_to_define() -> None:
    class Forgetful(ExportableState): ...

    with pytest.raises(NotImplementedError, match=r"Forgetful.*state\(\)"):
        Forgetful().state()


def test_callbacks_are_kept_by_class_and_several_of_one_class_as_a_list() -> None:
    state = TrainerState(stateful_callbacks=[Counter(1), EarlyStoppingCallback(2, 0.5), Counter(2), Counter(3)])
    assert [one["args"]["start"] for one in state.stateful_callbacks["Counter"]] == [1, 2, 3]
    assert state.stateful_callbacks["EarlyStoppingCallback"] == {
        "args": {"early_stopping_patience": 2, "early_stopping_threshold": 0.5},
        "attributes": {"early_stopping_patience_counter": 0},
    }


def test_what_cannot_be_exported_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"SimpleNamespace.*ExportableState"):
        TrainerState(stateful_callbacks=[SimpleNamespace()])


@pytest.mark.parametrize("switched", [(), ("should_save", "should_training_stop")])
def test_a_control_exports_what_transformers_control_exports(switched: tuple[str, ...]) -> None:
    fields = dict.fromkeys(switched, True)
    control = TrainerControl(**fields)
    assert control.state() == transformers.TrainerControl(**fields).state()
    assert TrainerControl.from_state(control.state()) == control


def test_our_exported_states_can_be_rebuilt_by_transformers() -> None:
    exported = EarlyStoppingCallback(2, 0.5).state()

    class Theirs(transformers.EarlyStoppingCallback, TheirExportableState): ...

    assert Theirs.from_state(exported).state() == exported


@pytest.mark.parametrize(
    ("given", "max_steps", "resolved"), [(0.5, 7, 4), (0.01, 30, 1), (3, 30, 3), (1, 30, 1), (None, 30, 500)]
)
def test_an_interval_below_one_is_a_share_of_all_steps(given: float | None, max_steps: int, resolved: int) -> None:
    names = ("logging_steps", "eval_steps", "save_steps")
    args: Any = SimpleNamespace(**dict.fromkeys(names, given))
    state, theirs = TrainerState(), transformers.TrainerState()
    state.compute_steps(args, max_steps)
    theirs.compute_steps(args, max_steps)
    assert [getattr(state, name) for name in names] == [resolved] * 3
    assert dataclasses.asdict(state) == dataclasses.asdict(theirs)
