from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from lightning.pytorch.callbacks import LearningRateMonitor

from littrainer.callbacks.base import EVENTS, TrainerCallback
from littrainer.callbacks.flow import DefaultFlowCallback
from littrainer.callbacks.handler import CallbackHandler
from littrainer.callbacks.progress import PrinterCallback
from littrainer.callbacks.state import SWITCHES, ControlSwitchError, TrainerControl
from tests.scenarios.trainers import StepwiseTrainer, quiet_trainer


class Stopping(TrainerCallback):
    """Does at the end of a step what a test puts in."""

    def __init__(self, act: Any) -> None:
        self.act = act

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        return self.act(control)


class Duck:
    """Has the events that it needs, and derives from no callback class."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append("on_train_begin")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append("on_step_end")


class OnlyLogs:
    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...


class TakesArguments(TrainerCallback):
    def __init__(self, every: int) -> None: ...


def notes_of(caught: Any) -> list[str]:
    return caught.value.__notes__


def print_loss(*_: Any) -> None: ...


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (3, "3 (an int)"),
        (None, "None (a NoneType)"),
        ("PrinterCallback", "'PrinterCallback' (a str)"),
        (print_loss, "print_loss"),
        (dict, "the class dict"),
        (OnlyLogs(), "It has on_log only"),
    ],
)
def test_something_that_is_no_callback_is_refused_when_it_is_added(tmp_path: Path, given: Any, named: str) -> None:
    trainer = quiet_trainer(tmp_path)
    for add in (trainer.add_callback, lambda it: quiet_trainer(tmp_path, given={"callbacks": [it]})):
        with pytest.raises(TypeError, match="neither a TrainerCallback nor a Lightning callback") as refusal:
            add(given)
        assert named in str(refusal.value) and "Derive its class from TrainerCallback" in str(refusal.value)


@pytest.mark.parametrize(
    ("given", "named"), [(PrinterCallback(), "a PrinterCallback"), (PrinterCallback, "the class PrinterCallback")]
)
def test_a_callback_without_a_list_around_it_is_refused(tmp_path: Path, given: Any, named: str) -> None:
    with pytest.raises(TypeError, match=rf"takes a list .* was given {named}: write callbacks=\[\.\.\.\]"):
        quiet_trainer(tmp_path, given={"callbacks": given})


def test_callbacks_may_come_in_any_kind_of_row(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, given={"callbacks": (kind for kind in (Duck,))})
    assert [type(c) for c in trainer.callback_handler.callbacks] == [DefaultFlowCallback, Duck, PrinterCallback]


def test_an_object_with_the_events_it_needs_is_called_for_those_that_it_has(tmp_path: Path) -> None:
    duck = Duck()
    quiet_trainer(tmp_path, given={"callbacks": [duck]}, max_steps=2).train()
    assert duck.seen == ["on_train_begin", "on_step_end", "on_step_end"]


def test_a_class_that_takes_arguments_is_explained(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="every") as error:
        quiet_trainer(tmp_path, given={"callbacks": [TakesArguments]})
    assert "TakesArguments" in notes_of(error)[0] and "give an instance" in notes_of(error)[0]


@pytest.mark.parametrize("given", [LearningRateMonitor, LearningRateMonitor()])
def test_the_handler_says_where_a_lightning_callback_goes(given: Any) -> None:
    with pytest.raises(TypeError, match=r"LearningRateMonitor is a Lightning callback.*trainer\.add_callback"):
        CallbackHandler([DefaultFlowCallback], None, None, None, None).add_callback(given)


@pytest.mark.parametrize("kind", [quiet_trainer, lambda *a, **k: quiet_trainer(*a, kind=StepwiseTrainer, **k)])
@pytest.mark.parametrize("error", [ValueError("no such file"), StopIteration("done"), KeyError("loss")])
def test_an_error_in_an_event_keeps_its_type_and_says_where_it_came_from(
    tmp_path: Path, kind: Any, error: Exception
) -> None:
    def fail(control: Any) -> None:
        raise error

    trainer = kind(tmp_path, given={"callbacks": [Stopping(fail)]}, max_steps=2)
    with pytest.raises(type(error)) as raised:
        trainer.train()
    assert raised.value is error
    assert notes_of(raised) == ["It came from the callback Stopping.on_step_end, at optimizer step 1."]


def test_an_error_in_an_event_within_another_names_both(tmp_path: Path) -> None:
    class Evaluates(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trainer.evaluate()

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise OSError("disk full")

    trainer = quiet_trainer(tmp_path, given={"callbacks": [Evaluates()]}, max_steps=2)
    with pytest.raises(OSError, match="disk full") as error:
        trainer.train()
    assert [note.split(",")[0].rpartition(".")[2] for note in notes_of(error)] == ["on_evaluate", "on_step_end"]


def test_an_interruption_gets_no_note(tmp_path: Path) -> None:
    def interrupt(control: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as interruption:
        quiet_trainer(tmp_path, given={"callbacks": [Stopping(interrupt)]}, max_steps=2).train()
    assert not hasattr(interruption.value, "__notes__")


@pytest.mark.parametrize(
    "value", ["False", "", None, 2, 0.0, [], np.array([True, False]), torch.tensor([True, True]), torch.tensor(1.0)]
)
@pytest.mark.parametrize("switch", ["should_save", "should_training_stop"])
def test_a_switch_that_is_neither_on_nor_off_is_refused(tmp_path: Path, switch: str, value: Any) -> None:
    trainer = quiet_trainer(
        tmp_path, given={"callbacks": [Stopping(lambda control: setattr(control, switch, value))]}, max_steps=2
    )
    with pytest.raises(ControlSwitchError, match="has to be True or False") as error:
        trainer.train()
    message = str(error.value)
    assert message.startswith(f"Stopping.on_step_end: control.{switch} is set to ") and repr(value) in message
    assert isinstance(error.value, TypeError)


@pytest.mark.parametrize(
    "value",
    [np.bool_(True), np.array(True), np.array([True]), torch.tensor(True), torch.tensor([True]), 1, np.int64(1)],
)
def test_a_switch_takes_one_truth_value_of_any_kind(value: Any) -> None:
    control = TrainerControl(should_save=value)
    control.should_training_stop = value
    assert control.should_save is True and control.should_training_stop is True


@pytest.mark.parametrize("value", [np.bool_(False), torch.tensor(False), 0])
def test_a_switch_is_turned_off_by_one_truth_value_of_any_kind(value: Any) -> None:
    control = TrainerControl(should_save=True)
    control.should_save = value
    assert control.should_save is False


def test_other_attributes_of_a_control_are_free() -> None:
    control: Any = TrainerControl()
    control.reason = "patience"
    assert control.reason == "patience" and set(SWITCHES) < set(vars(control))


@pytest.mark.parametrize("answer", [True, "control", {"should_save": True}, 0])
def test_an_answer_that_is_no_control_is_refused(tmp_path: Path, answer: Any) -> None:
    trainer = quiet_trainer(tmp_path, given={"callbacks": [Stopping(lambda control: answer)]}, max_steps=2)
    with pytest.raises(TypeError, match=r"Stopping\.on_step_end returned .* which is no TrainerControl") as error:
        trainer.train()
    assert repr(answer) in str(error.value)


def test_a_control_of_transformers_own_is_an_answer(tmp_path: Path) -> None:
    trainer = quiet_trainer(
        tmp_path,
        given={"callbacks": [Stopping(lambda control: transformers.TrainerControl(should_training_stop=True))]},
        max_steps=5,
    )
    assert trainer.train().global_step == 1


def test_switches_of_a_foreign_control_are_checked_when_it_is_returned(tmp_path: Path) -> None:
    answer = transformers.TrainerControl()
    answer.should_save = "no"  # type: ignore[assignment]
    trainer = quiet_trainer(tmp_path, given={"callbacks": [Stopping(lambda control: answer)]}, max_steps=2)
    with pytest.raises(ControlSwitchError, match=r"Stopping\.on_step_end: control\.should_save is set to 'no'"):
        trainer.train()


def test_states_of_transformers_own_callbacks_are_kept_and_their_flow_is_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    patient = transformers.EarlyStoppingCallback(7)
    trainer = quiet_trainer(
        tmp_path,
        given={"callbacks": [patient]},
        max_steps=1,
        eval_strategy="steps",
        metric_for_best_model="loss",
    )
    trainer.train()
    assert trainer.state.stateful_callbacks["EarlyStoppingCallback"]["args"]["early_stopping_patience"] == 7
    with caplog.at_level(logging.WARNING):
        CallbackHandler([transformers.DefaultFlowCallback()], None, None, None, None)
    assert "DefaultFlowCallback" not in caplog.text


def test_a_handler_may_be_subclassed_and_put_in_the_place_of_the_trainers(tmp_path: Path) -> None:
    # As trl does, to hand its callbacks a reference model.
    seen: list[tuple[str, Any]] = []

    class WithReference(CallbackHandler):
        def __init__(self, callbacks: Any, model: Any, reference: Any, *rest: Any) -> None:
            super().__init__(callbacks, model, *rest)
            self.reference = reference

        def call_event(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            seen.append((event, self.reference))
            assert self.model is trainer.model and (event in ("on_train_begin",) or self.optimizer is not None)
            for callback in self.callbacks:
                result = getattr(callback, event)(
                    args, state, control, model=self.model, train_dataloader=self.train_dataloader, **kwargs
                )
                control = control if result is None else result
            return control

    trainer = quiet_trainer(tmp_path, max_steps=2, logging_strategy="steps", eval_strategy="epoch")
    own: Any = trainer.callback_handler
    trainer.callback_handler = WithReference(
        own.callbacks, own.model, "reference", own.processing_class, own.optimizer, own.lr_scheduler
    )
    assert trainer.train().global_step == 2
    unseen = {"on_init_end", "on_predict", "on_save", "on_substep_end", "on_push_begin"}
    assert {event for event, _ in seen} == set(EVENTS) - unseen and {reference for _, reference in seen} == {
        "reference"
    }


def test_the_base_classs_events_take_their_arguments_by_name(tmp_path: Path) -> None:
    # As peft's callback calls them.
    class Asks(TrainerCallback):
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            return super().on_optimizer_step(args=args, state=state, control=control)

    trainer = quiet_trainer(tmp_path, given={"callbacks": [Asks()]}, max_steps=2)
    assert trainer.train().global_step == 2
