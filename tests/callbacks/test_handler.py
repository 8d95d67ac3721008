from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import transformers
from lightning.pytorch.callbacks import LearningRateMonitor

from littrainer import EarlyStoppingCallback, ExportableState, Trainer
from littrainer.callbacks.base import EVENTS, TrainerCallback
from littrainer.callbacks.handler import CallbackHandler, DefaultFlowCallback, restore_callbacks
from littrainer.callbacks.progress import PrinterCallback
from littrainer.callbacks.state import TrainerControl, export_states
from tests.scenarios.trainers import StepwiseTrainer, quiet_trainer


class First(TrainerCallback): ...


class Second(First): ...


def create_handler(*callbacks: Any) -> CallbackHandler:
    return CallbackHandler([DefaultFlowCallback, *callbacks], "model", "tokenizer", "optimizer", "schedule")


def test_the_events_are_those_of_transformers() -> None:
    theirs = {name for name in vars(transformers.TrainerCallback) if name.startswith("on_")}
    assert set(EVENTS) == theirs


def test_a_callback_is_called_for_events_overridden_by_its_classes_or_instance() -> None:
    class Parent(TrainerCallback):
        def on_log(self, *_: Any, **__: Any) -> None:
            events.append("on_log")

    class Child(Parent): ...

    events: list[str] = []
    child: Any = Child()
    child.on_save = lambda *_, **__: events.append("on_save")
    handler = CallbackHandler([child], None, None, None, None)
    for event in EVENTS:
        handler.call_event(event, None, None, None)
    assert events == ["on_save", "on_log"]


def test_callbacks_are_added_popped_and_removed_by_class_or_as_themselves(caplog: pytest.LogCaptureFixture) -> None:
    first, second = First(), Second()
    handler = create_handler(first, second)
    assert caplog.records == []
    handler.add_callback(First())
    assert "First" in caplog.text and len(handler.callbacks) == 4
    assert handler.pop_callback(first) is first
    handler.remove_callback(handler.callbacks[-1])
    assert handler.pop_callback(First) is second and handler.callback_list == "DefaultFlowCallback"
    handler.remove_callback(First)
    with pytest.raises(ValueError, match="not in list"):
        handler.remove_callback(second)


def test_callbacks_of_transformers_and_objects_with_the_required_event_are_called(tmp_path: Path) -> None:
    steps: list[int] = []

    class Theirs(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            return transformers.TrainerControl(should_training_stop=state.global_step == 2)

    class Duck:
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            steps.append(state.global_step)

    trainer = quiet_trainer(tmp_path, trainer_kwargs={"callbacks": [Theirs, Duck()]}, max_steps=5)
    assert trainer.train().global_step == 2 and steps == [1, 2]
    trainer.remove_callback(Theirs)
    assert trainer.train().global_step == 5


# ---- Validation and errors of callbacks ------------------------------------------------------------------------------


class Stopping(TrainerCallback):
    """Callback that runs a function at the end of a step."""

    def __init__(self, act: Any) -> None:
        self.act = act

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        return self.act(control)


class RequiresArgument(TrainerCallback):
    def __init__(self, every: int) -> None: ...


@pytest.mark.parametrize(("callback", "message"), [(3, "3 (an int)"), (dict, "the class dict")])
def test_an_object_that_is_no_callback_is_refused_when_it_is_added(tmp_path: Path, callback: Any, message: str) -> None:
    trainer = quiet_trainer(tmp_path)
    for add in (trainer.add_callback, lambda it: quiet_trainer(tmp_path, trainer_kwargs={"callbacks": [it]})):
        with pytest.raises(TypeError, match="neither a TrainerCallback nor a Lightning callback") as refusal:
            add(callback)
        assert message in str(refusal.value) and "Derive its class from TrainerCallback" in str(refusal.value)


@pytest.mark.parametrize(
    ("callback", "message"), [(PrinterCallback(), "a PrinterCallback"), (PrinterCallback, "the class PrinterCallback")]
)
def test_a_single_callback_without_a_list_is_refused(tmp_path: Path, callback: Any, message: str) -> None:
    with pytest.raises(TypeError, match=rf"takes a list .* was given {message}: write callbacks=\[\.\.\.\]"):
        quiet_trainer(tmp_path, trainer_kwargs={"callbacks": callback})


def test_a_class_that_requires_arguments_is_explained(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="every") as error:
        quiet_trainer(tmp_path, trainer_kwargs={"callbacks": [RequiresArgument]})
    (note,) = error.value.__notes__
    assert "RequiresArgument" in note and "give an instance" in note


@pytest.mark.parametrize("callback", [LearningRateMonitor, LearningRateMonitor()])
def test_the_handler_refuses_a_lightning_callback_with_the_remedy(callback: Any) -> None:
    with pytest.raises(TypeError, match=r"LearningRateMonitor is a Lightning callback.*trainer\.add_callback"):
        CallbackHandler([DefaultFlowCallback], None, None, None, None).add_callback(callback)


@pytest.mark.parametrize("kind", [quiet_trainer, lambda *a, **k: quiet_trainer(*a, kind=StepwiseTrainer, **k)])
@pytest.mark.parametrize("error", [ValueError("no such file"), StopIteration("done")])
def test_an_error_in_an_event_has_a_note_with_the_callback(tmp_path: Path, kind: Any, error: Exception) -> None:
    def fail(control: Any) -> None:
        raise error

    trainer = kind(tmp_path, trainer_kwargs={"callbacks": [Stopping(fail)]}, max_steps=2)
    with pytest.raises(type(error)) as raised:
        trainer.train()
    assert raised.value is error
    assert raised.value.__notes__ == ["It came from the callback Stopping.on_step_end, at optimizer step 1."]


def test_transformers_stateful_and_flow_callbacks_are_recognized(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    patient = transformers.EarlyStoppingCallback(7)
    trainer = quiet_trainer(
        tmp_path,
        trainer_kwargs={"callbacks": [patient]},
        max_steps=1,
        eval_strategy="steps",
        metric_for_best_model="loss",
    )
    trainer.train()
    assert trainer.state.stateful_callbacks["EarlyStoppingCallback"]["args"]["early_stopping_patience"] == 7
    with caplog.at_level(logging.WARNING):
        for flow in (transformers.DefaultFlowCallback, type("CustomFlow", (DefaultFlowCallback,), {})):
            CallbackHandler([flow()], None, None, None, None)
    assert "DefaultFlowCallback" not in caplog.text
    CallbackHandler([First()], None, None, None, None)
    assert "DefaultFlowCallback" in caplog.text and "First" in caplog.text


def test_the_trainers_handler_can_be_replaced_by_a_subclass(tmp_path: Path) -> None:
    # trl does this to pass a reference model to its callbacks.
    events: list[tuple[str, Any]] = []

    class WithReference(CallbackHandler):
        def __init__(self, callbacks: Any, model: Any, reference: Any, *rest: Any) -> None:
            super().__init__(callbacks, model, *rest)
            self.reference = reference

        def call_event(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            events.append((event, self.reference))
            assert self.model is trainer.model and (event in ("on_train_begin",) or self.optimizer is not None)
            for callback in self.callbacks:
                result = getattr(callback, event)(
                    args, state, control, model=self.model, train_dataloader=self.train_dataloader, **kwargs
                )
                control = control if result is None else result
            return control

    trainer = quiet_trainer(tmp_path, max_steps=2, logging_strategy="steps", eval_strategy="epoch")
    handler: Any = trainer.callback_handler
    trainer.callback_handler = WithReference(
        handler.callbacks, handler.model, "reference", handler.processing_class, handler.optimizer, handler.lr_scheduler
    )
    assert trainer.train().global_step == 2
    missing = {"on_init_end", "on_predict", "on_save", "on_substep_end", "on_push_begin"}
    assert {event for event, _ in events} == set(EVENTS) - missing
    assert {reference for _, reference in events} == {"reference"}


# ---- A training that fails -------------------------------------------------------------------------------------------


class RecordsFailure(TrainerCallback):
    """Callback that records the error of the training, and raises another error."""

    def __init__(self, raises: BaseException | None = None) -> None:
        self.errors: list[BaseException] = []
        self.raises = raises

    def on_training_failed(self, args: Any, state: Any, error: BaseException) -> None:
        self.errors.append(error)
        if self.raises is not None:
            raise self.raises


@pytest.mark.parametrize("error", [ZeroDivisionError("broken"), KeyboardInterrupt()])
def test_all_callbacks_are_notified_of_a_failure_even_if_a_callback_fails_then(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    def fail(control: Any) -> None:
        raise error

    first, second = RecordsFailure(ValueError("another error")), RecordsFailure()
    trainer = quiet_trainer(tmp_path, trainer_kwargs={"callbacks": [first, Stopping(fail), second]})
    with pytest.raises(type(error)) as raised:
        trainer.train()
    assert raised.value is error
    assert first.errors == second.errors == [error]
    assert "RecordsFailure.on_training_failed failed" in caplog.text and "another error" in caplog.text


# ---- States from a checkpoint ----------------------------------------------------------------------------------------


class Counter(TrainerCallback, ExportableState):
    """Callback with a name and a count."""

    def __init__(self, name: str = "unnamed", count: int = 0) -> None:
        self.name, self.count = name, count

    def state(self) -> dict[str, Any]:
        return {"args": {"name": self.name}, "attributes": {"count": self.count}}


def restore(folder: Path, *callbacks: Any, states: dict[str, Any]) -> Trainer:
    trainer = quiet_trainer(folder, trainer_kwargs={"callbacks": list(callbacks)})
    trainer.control = restore_callbacks(trainer.callback_handler, states, trainer.control)
    return trainer


def counts(trainer: Trainer) -> list[tuple[str, int]]:
    return [(c.name, c.count) for c in trainer.callback_handler.callbacks if isinstance(c, Counter)]


def test_a_callback_and_the_control_are_replaced_from_their_states(tmp_path: Path) -> None:
    original = Counter("original")
    control = TrainerControl(should_epoch_stop=True)
    trainer = restore(tmp_path, original, states=export_states([Counter("saved", 3), control]))
    assert counts(trainer) == [("saved", 3)] and original.count == 0 and trainer.control == control


def test_the_last_states_are_used_if_transformers_appended_states_at_each_save(tmp_path: Path) -> None:
    saved = [Counter(name, count) for count in (0, 1, 5) for name in ("a", "b")]
    trainer = restore(tmp_path, Counter(), Counter(), states=export_states(saved))
    assert counts(trainer) == [("a", 5), ("b", 5)]


def test_states_without_a_callback_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    restore(tmp_path, states=export_states([EarlyStoppingCallback(), Counter()]))
    assert "this Trainer does not have: EarlyStoppingCallback, Counter." in caplog.text
