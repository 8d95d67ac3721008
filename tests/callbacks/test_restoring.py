from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from littrainer import EarlyStoppingCallback, ExportableState, Trainer, TrainerCallback
from littrainer.callbacks.restoring import restore_callbacks
from littrainer.callbacks.state import exported_states
from tests.scenarios.trainers import quiet_trainer


class Counter(TrainerCallback, ExportableState):
    """Counts, under a name that it is constructed with."""

    def __init__(self, name: str = "unnamed") -> None:
        self.name = name
        self.count = 0

    def state(self) -> dict[str, Any]:
        return {"args": {"name": self.name}, "attributes": {"count": self.count}}


def counter(name: str, count: int) -> Counter:
    made = Counter(name)
    made.count = count
    return made


def trainer_with(folder: Path, *callbacks: Any, states: dict[str, Any]) -> Trainer:
    trainer = quiet_trainer(folder, given={"callbacks": list(callbacks)})
    trainer.state.stateful_callbacks = states
    restore_callbacks(trainer)
    return trainer


def counts(trainer: Trainer) -> list[tuple[str, int]]:
    return [(c.name, c.count) for c in trainer.callback_handler.callbacks if isinstance(c, Counter)]


def test_a_callback_is_made_anew_from_its_state(tmp_path: Path) -> None:
    given = Counter("given")
    trainer = trainer_with(tmp_path, given, states=exported_states([counter("saved", 3)]))
    assert counts(trainer) == [("saved", 3)] and given.count == 0


def test_callbacks_of_one_class_get_their_states_in_order(tmp_path: Path) -> None:
    states = exported_states([counter("a", 1), counter("b", 2)])
    assert counts(trainer_with(tmp_path, Counter(), Counter(), states=states)) == [("a", 1), ("b", 2)]


def test_of_the_states_that_transformers_adds_at_each_save_the_last_ones_count(tmp_path: Path) -> None:
    saved = [counter(name, count) for count in (0, 1, 5) for name in ("a", "b")]
    trainer = trainer_with(tmp_path, Counter(), Counter(), states=exported_states(saved))
    assert counts(trainer) == [("a", 5), ("b", 5)]


def test_callbacks_of_one_class_go_on_from_the_states_of_the_checkpoint(tmp_path: Path) -> None:
    class StepCounter(Counter):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.count += 1

    def trainer(max_steps: int, *names: str) -> Trainer:
        given = {"callbacks": [StepCounter(name) for name in names]}
        changes = {"save_strategy": "steps", "save_steps": 1, "restore_callback_states_from_checkpoint": True}
        return quiet_trainer(tmp_path, given=given, max_steps=max_steps, **changes)

    trainer(2, "a", "b").train()
    for step in (3, 4):
        (resumed := trainer(step, "", "")).train(resume_from_checkpoint=True)
        assert counts(resumed) == [("a", step), ("b", step)]


def test_attributes_are_set_as_code_sets_them_and_a_state_may_lack_them(tmp_path: Path) -> None:
    class Doubling(Counter):
        @property
        def count(self) -> int:
            return self.kept // 2

        @count.setter
        def count(self, value: int) -> None:
            self.kept = 2 * value

    states = {"Doubling": counter("saved", 3).state(), "Counter": {}}
    trainer = trainer_with(tmp_path, Doubling(), Counter("given"), states=states)
    doubling, plain = (c for c in trainer.callback_handler.callbacks if isinstance(c, Counter))
    assert (doubling.name, doubling.kept, plain.name) == ("saved", 6, "unnamed")


def test_states_without_a_callback_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer_with(tmp_path, states=exported_states([EarlyStoppingCallback(), counter("a", 1)]))
    assert "this Trainer does not have: EarlyStoppingCallback, Counter." in caplog.text


def test_a_callback_without_a_state_of_its_own_is_left_alone(tmp_path: Path) -> None:
    class Plain(TrainerCallback):
        pass

    plain = Plain()
    trainer = trainer_with(tmp_path, plain, states={"Plain": {"args": {}, "attributes": {"x": 1}}})
    assert plain in trainer.callback_handler.callbacks and not hasattr(plain, "x")


def test_the_control_is_restored_too(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path)
    trainer.control.should_epoch_stop = True
    states = exported_states([trainer.control])
    again = trainer_with(tmp_path, states=states)
    assert again.control.should_epoch_stop
