from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import transformers

from littrainer.callbacks.base import EVENTS, TrainerCallback
from littrainer.callbacks.flow import DefaultFlowCallback
from littrainer.callbacks.handler import CallbackHandler
from littrainer.callbacks.progress import PrinterCallback
from littrainer.callbacks.state import TrainerControl
from tests.scenarios.trainers import quiet_trainer

SWITCHES = tuple(field.name for field in dataclasses.fields(TrainerControl))
WITH_PAYLOAD = {"on_log": "logs", "on_evaluate": "metrics", "on_predict": "metrics"}


class Watcher(TrainerCallback):
    """Notes each event that it sees, with what came with it."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)
        return lambda args, state, control, **kwargs: self.seen.append((name, kwargs))


# The handler leaves out callbacks whose class does not override an event.
for _event in EVENTS:
    setattr(Watcher, _event, None)


class First(TrainerCallback): ...


class Second(First): ...


def handler_of(*callbacks: Any) -> CallbackHandler:
    return CallbackHandler([DefaultFlowCallback, *callbacks], "model", "tokenizer", "optimizer", "schedule")


def call(handler: Any, event: str, control: Any, args: Any = None, state: Any = None) -> Any:
    payload = {"value": 1.0}
    return getattr(handler, event)(args, state, control, *([payload] if event in WITH_PAYLOAD else []))


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_reaches_callbacks_with_all_that_training_works_on(event: str) -> None:
    watcher = Watcher()
    handler = CallbackHandler([First, watcher], "model", "tokenizer", "optimizer", "schedule")
    handler.train_dataloader, handler.eval_dataloader = "train", "eval"
    call(handler, event, TrainerControl())
    expected = {
        "model": "model",
        "processing_class": "tokenizer",
        "optimizer": "optimizer",
        "lr_scheduler": "schedule",
        "train_dataloader": "train",
        "eval_dataloader": "eval",
    }
    if event in WITH_PAYLOAD:
        expected[WITH_PAYLOAD[event]] = {"value": 1.0}  # type: ignore[assignment]
    assert watcher.seen == [(event, expected)]


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_clears_the_switches_that_it_clears_in_transformers(event: str) -> None:
    kinds = (
        (CallbackHandler, TrainerControl),
        (transformers.trainer_callback.CallbackHandler, transformers.TrainerControl),
    )
    left = []
    for handler_kind, control_kind in kinds:
        control = control_kind(**dict.fromkeys(SWITCHES, True))
        call(handler_kind([], None, None, None, None), event, control)
        left.append({switch: getattr(control, switch) for switch in SWITCHES})
    assert left[0] == left[1]


@pytest.mark.parametrize("event", EVENTS)
def test_every_event_goes_through_call_event_also_one_put_on_the_instance(event: str) -> None:
    handler: Any = handler_of()
    answer = TrainerControl(should_save=True)
    calls: list[Any] = []

    def own(name: str, args: Any, state: Any, control: Any, **kwargs: Any) -> TrainerControl:
        calls.append((name, args, state, kwargs))
        return answer

    handler.call_event = own
    assert call(handler, event, TrainerControl(), args="args", state="state") is answer
    payload = {WITH_PAYLOAD[event]: {"value": 1.0}} if event in WITH_PAYLOAD else {}
    assert calls == [(event, "args", "state", payload)]


def test_a_replaced_call_event_sees_every_event_of_a_training(tmp_path: Path) -> None:
    trainer = quiet_trainer(
        tmp_path, max_steps=1, eval_strategy="steps", save_strategy="steps", logging_strategy="steps"
    )
    handler: Any = trainer.callback_handler
    original, seen = handler.call_event, []

    def noting(event: str, *args: Any, **kwargs: Any) -> Any:
        seen.append(event)
        return original(event, *args, **kwargs)

    handler.call_event = noting
    trainer.train()
    assert set(EVENTS) - set(seen) == {"on_init_end", "on_predict", "on_substep_end", "on_push_begin"}


def test_what_an_event_adds_may_be_given_by_name() -> None:
    watcher = Watcher()
    handler_of(watcher).on_log(None, None, TrainerControl(), logs={"loss": 2})
    assert watcher.seen[0][1]["logs"] == {"loss": 2}


def test_the_control_that_a_callback_returns_is_handed_to_the_next_and_to_the_caller() -> None:
    mine, given = TrainerControl(should_log=True), TrainerControl()
    handed: list[Any] = []

    class Replacing(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            return mine

    class Silent(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            handed.append(control)

    handler = CallbackHandler([Silent(), Replacing(), Silent()], None, None, None, None)
    assert handler.on_step_end(None, None, given) is mine
    assert handed == [given, mine]


def test_callbacks_are_called_in_the_order_of_the_list() -> None:
    order: list[str] = []

    def named(name: str) -> TrainerCallback:
        callback: Any = TrainerCallback()
        callback.on_save = lambda *_, **__: order.append(name)
        return callback

    handler_of(named("a"), named("b"), named("c")).on_save(None, None, TrainerControl())
    assert order == ["a", "b", "c"]


def test_a_callback_may_take_itself_off_the_list_while_it_is_called() -> None:
    calls: list[str] = []

    class Once(TrainerCallback):
        def on_save(self, *_: Any, **__: Any) -> None:
            calls.append("once")
            handler.remove_callback(self)

    handler = handler_of(Once(), First())
    for _ in range(2):
        handler.on_save(None, None, TrainerControl())
    assert calls == ["once"] and handler.callback_list == "DefaultFlowCallback\nFirst"


def test_a_class_is_added_as_an_instance_of_it() -> None:
    handler = handler_of(First)
    handler.add_callback(Second)
    assert [type(callback) for callback in handler.callbacks] == [DefaultFlowCallback, First, Second]


def test_a_second_callback_of_a_class_is_added_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    handler = handler_of(First)
    handler.add_callback(Second())
    assert caplog.records == []
    handler.add_callback(First())
    assert "First" in caplog.text and len(handler.callbacks) == 4


@pytest.mark.parametrize("by_class", [True, False])
def test_a_callback_is_popped_by_class_or_as_itself(by_class: bool) -> None:
    first, second = Second(), Second()
    handler = handler_of(first, second)
    # A class stands for its subclasses too.
    popped = handler.pop_callback(First if by_class else second)
    assert popped is (first if by_class else second)
    assert popped not in handler.callbacks and len(handler.callbacks) == 2


@pytest.mark.parametrize("absent", [First, First()])
def test_popping_a_callback_that_is_not_there_gives_none(absent: Any) -> None:
    handler = handler_of()
    assert handler.pop_callback(absent) is None
    assert len(handler.callbacks) == 1


def test_a_callback_is_removed_by_class_or_as_itself() -> None:
    first, second = First(), Second()
    handler = handler_of(first, second)
    handler.remove_callback(second)
    handler.remove_callback(First)
    handler.remove_callback(First)
    assert handler.callback_list == "DefaultFlowCallback"
    with pytest.raises(ValueError, match="not in list"):
        handler.remove_callback(second)


def test_a_list_that_would_never_stop_training_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    class OwnFlow(DefaultFlowCallback): ...

    CallbackHandler([OwnFlow()], None, None, None, None)
    assert caplog.records == []
    CallbackHandler([First()], None, None, None, None)
    assert "DefaultFlowCallback" in caplog.text and "First" in caplog.text


def test_a_callback_derived_from_transformers_own_class_works(tmp_path: Path) -> None:
    steps: list[int] = []

    class Theirs(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            steps.append(state.global_step)
            control.should_training_stop = state.global_step == 2
            return control

    trainer = quiet_trainer(tmp_path, given={"callbacks": [Theirs]}, max_steps=5)
    assert trainer.train().global_step == 2 and steps == [1, 2]
    trainer.remove_callback(Theirs)
    assert trainer.train().global_step == 5


def test_a_trainer_replaces_its_printer_as_it_is_told(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path)
    printer = trainer.pop_callback(PrinterCallback)
    assert isinstance(printer, PrinterCallback)
    trainer.add_callback(printer)
    trainer.remove_callback(printer)
    assert trainer.callback_handler.callback_list == "DefaultFlowCallback"
