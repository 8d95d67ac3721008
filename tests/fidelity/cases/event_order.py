"""Every event with all that a callback sees at it: state, control, what it is given, gradients and learning rates."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from tests.fidelity.record import EVENTS, Record, control_flags, plain
from tests.fidelity.registry import Script, add_scripts, scenario
from tests.fidelity.side import Side
from tests.scenarios.data import Rows, Stream, vector_rows
from tests.scenarios.metrics import accuracy
from tests.scenarios.models import NoisyClassifier, VectorClassifier

# The events between which the model is in training mode on both sides.
WITHIN_A_STEP = ("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end")
# The events of a training at which a callback may set a switch.
STEERABLE = (
    "on_train_begin",
    "on_epoch_begin",
    "on_step_begin",
    "on_substep_end",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_step_end",
    "on_log",
    "on_prediction_step",
    "on_evaluate",
    "on_save",
    "on_epoch_end",
)


def snapshot(event: str, state: Any, control: Any, trainer_kwargs: dict[str, Any]) -> dict[str, Any]:
    """A callback's view at an event."""
    model, optimizer, schedule = trainer_kwargs["model"], trainer_kwargs["optimizer"], trainer_kwargs["lr_scheduler"]
    state_fields = {entry.name: getattr(state, entry.name) for entry in dataclasses.fields(state)}
    return {
        "event": event,
        "state": plain({name: value for name, value in state_fields.items() if name != "log_history"}),
        "logged": len(state.log_history),
        "control": control_flags(control),
        "trainer_kwargs": {name: value is not None for name, value in trainer_kwargs.items()},
        "payload": plain({name: dict(trainer_kwargs[name]) for name in ("logs", "metrics") if name in trainer_kwargs}),
        "gradients": [parameter.grad is not None for parameter in model.parameters()],
        "is_training": model.training if event in WITHIN_A_STEP else None,
        "learning_rates": [group["lr"] for group in optimizer.param_groups] if optimizer is not None else None,
        "schedule": None if schedule is None else (schedule.last_epoch, schedule.get_last_lr()),
        "batches": [
            None
            if trainer_kwargs[name] is None or not hasattr(trainer_kwargs[name].dataset, "__len__")
            else len(trainer_kwargs[name])
            for name in ("train_dataloader", "eval_dataloader")
        ],
    }


def scribe(base: Any) -> Any:
    """A callback that keeps a snapshot of each event.

    Parameters:
        base: The side's TrainerCallback.
    """

    class Scribe(base):
        def __init__(self) -> None:
            self.seen: list[dict[str, Any]] = []

    def note(event: str) -> Any:
        def on_event(self: Any, args: Any, state: Any, control: Any, **trainer_kwargs: Any) -> None:
            self.seen.append(snapshot(event, state, control, trainer_kwargs))

        return on_event

    for event in EVENTS:
        setattr(Scribe, event, note(event))
    return Scribe()


def messages(
    side: Side,
    *callbacks: Any,
    model: Any = None,
    data: Any = None,
    evaluation: Any = None,
    rows: int = 10,
    resume: str | None = None,
    **changes: Any,
) -> tuple[Any, Any]:
    """Train with a scribe after the callbacks; returns it and the Trainer."""
    notes = scribe(side.TrainerCallback)
    trainer = side.vector_trainer(
        model or NoisyClassifier(),
        rows=rows,
        train_dataset=data,
        eval_rows=5,
        eval_dataset=evaluation,
        compute_metrics=accuracy,
        callbacks=[*callbacks, notes],
        **changes,
    )
    trainer.train(resume_from_checkpoint=resume)
    return notes, trainer


def recorded(side: Side, *callbacks: Any, **changes: Any) -> Record:
    notes, trainer = messages(side, *callbacks, **changes)
    return side.record(trainer, extra={"seen": notes.seen})


def make_script(**changes: Any) -> Script:
    return lambda side: recorded(side, **changes)


add_scripts(
    {
        "events_with_a_short_last_window": make_script(
            rows=18, gradient_accumulation_steps=2, lr_scheduler_type="cosine", warmup_steps=2
        ),
        "events_with_an_evaluation_at_the_start": make_script(
            eval_on_start=True, eval_strategy="no", logging_strategy="no", num_train_epochs=1
        ),
        "events_with_two_evaluation_sets": make_script(
            evaluation={"first": Rows(vector_rows(5, seed=1)), "second": Rows(vector_rows(7, seed=2))},
            eval_strategy="steps",
            eval_steps=2,
            num_train_epochs=1,
        ),
        "events_of_a_stream_with_max_steps": make_script(
            data=Stream(vector_rows(18)),
            evaluation=Stream(vector_rows(5, seed=1)),
            max_steps=5,
            gradient_accumulation_steps=2,
            eval_strategy="steps",
            eval_steps=3,
        ),
    },
    extra=True,
)
add_scripts(
    {
        "events_by_steps_with_the_first_step_logged": make_script(
            logging_steps=2,
            logging_first_step=True,
            eval_strategy="steps",
            eval_steps=2,
            eval_delay=3,
            save_strategy="steps",
            save_steps=4,
        ),
        "events_by_epoch_while_accumulating": make_script(
            gradient_accumulation_steps=2, logging_strategy="epoch", eval_strategy="epoch", save_strategy="epoch"
        ),
        "events_by_shares_of_the_training": make_script(
            logging_steps=0.3, eval_strategy="steps", eval_steps=0.4, save_strategy="steps", save_steps=0.4
        ),
        "events_with_the_best_saved_and_loaded": make_script(
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="best",
            load_best_model_at_end=True,
            metric_for_best_model="accuracy",
            save_total_limit=1,
        ),
    },
    extra=True,
    saves=True,
)


@scenario(extra=True, saves=True)
def events_of_an_early_stop(side: Side) -> Record:
    return recorded(
        side,
        side.EarlyStoppingCallback(early_stopping_patience=2),
        learning_rate=0.9,
        num_train_epochs=9,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="loss",
    )


@scenario(extra=True)
def events_of_evaluation_and_prediction_around_a_training(side: Side) -> Record:
    notes = scribe(side.TrainerCallback)
    trainer = side.vector_trainer(rows=10, eval_rows=5, compute_metrics=accuracy, callbacks=[notes], num_train_epochs=1)
    trainer.evaluate()
    trainer.train()
    trainer.predict(Rows(vector_rows(7, seed=2)))
    trainer.evaluate(metric_key_prefix="again")
    trainer.train()
    return side.record(trainer, extra={"seen": notes.seen})


@scenario(extra=True, saves=True)
def events_of_a_resumed_epoch(side: Side) -> Record:
    keywords: dict[str, Any] = {"gradient_accumulation_steps": 2, "rows": 22, "save_strategy": "steps", "save_steps": 2}
    messages(side, **keywords)
    notes, trainer = messages(side, **keywords, resume="out/checkpoint-2", eval_strategy="epoch")
    return side.record(trainer, extra={"seen": notes.seen})


def setting(side: Side, event: str, flag: str) -> Any:
    """A callback that sets a switch the second time it sees an event, or the first where that comes once."""
    often = 1 if event in ("on_train_begin", "on_epoch_begin", "on_epoch_end") else 2

    class Setting(side.TrainerCallback):  # type: ignore[name-defined]
        times = 0

    def on_event(self: Any, args: Any, state: Any, control: Any, **trainer_kwargs: Any) -> Any:
        self.times += 1
        if self.times == often:
            setattr(control, flag, True)
        return control

    setattr(Setting, event, on_event)
    return Setting()


def steered_at_each_event(side: Side, flag: str) -> Record:
    seen = {}
    for event in STEERABLE:
        saves = event == "on_save"
        notes, trainer = messages(
            side,
            setting(side, event, flag),
            model=VectorClassifier(),
            rows=16,
            gradient_accumulation_steps=2,
            logging_strategy="steps" if event == "on_log" else "no",
            eval_strategy="steps" if event in ("on_prediction_step", "on_evaluate") else "no",
            eval_steps=1,
            save_strategy="steps" if saves else "no",
            save_steps=1,
            save_only_model=True,
        )
        seen[event] = [
            (now["event"], now["state"]["global_step"], now["state"]["epoch"], now["control"], now["gradients"])
            for now in notes.seen
        ]
    return side.record(trainer, extra={"seen": seen})


FLAGS = {
    "logs": "should_log",
    "evaluations": "should_evaluate",
    "saves": "should_save",
    "ends_of_the_epoch": "should_epoch_stop",
    "ends_of_training": "should_training_stop",
}
add_scripts(
    {
        f"{expected}_asked_for_at_each_event": functools.partial(steered_at_each_event, flag=flag)
        for expected, flag in FLAGS.items()
    },
    extra=True,
)


@scenario(extra=True)
def training_stopped_by_an_evaluation_at_its_start(side: Side) -> Record:
    class Stopping(side.TrainerCallback):  # type: ignore[name-defined]
        def on_evaluate(self, args: Any, state: Any, control: Any, **trainer_kwargs: Any) -> None:
            control.should_training_stop = True

    return recorded(side, Stopping(), eval_on_start=True, gradient_accumulation_steps=2)


@scenario(extra=True)
def callbacks_that_come_and_go_during_events(side: Side) -> Record:
    Base: Any = side.TrainerCallback
    order: list[Any] = []

    class Guest(Base):
        def on_step_end(self, args: Any, state: Any, control: Any, **trainer_kwargs: Any) -> None:
            order.append(("guest", state.global_step))
            if state.global_step == 4:
                trainer.remove_callback(Guest)

        def on_log(self, args: Any, state: Any, control: Any, **trainer_kwargs: Any) -> None:
            order.append(("guest logs", state.global_step))

    class Host(Base):
        def on_step_end(self, args: Any, state: Any, control: Any, **trainer_kwargs: Any) -> None:
            order.append(("host", state.global_step))
            if state.global_step == 2:
                trainer.add_callback(Guest)
            if state.global_step == 5:
                order.append(("popped", type(trainer.pop_callback(self)).__name__))

    class Neighbour(Base):
        def on_step_end(self, args: Any, state: Any, control: Any, **trainer_kwargs: Any) -> None:
            order.append(("neighbour", state.global_step))

    notes = scribe(Base)
    trainer = side.vector_trainer(rows=10, callbacks=[Host, Neighbour(), notes], num_train_epochs=3)
    order.append(trainer.callback_handler.callback_list)
    trainer.train()
    order.append(trainer.callback_handler.callback_list)
    order.append(trainer.pop_callback(Guest))
    order.append(trainer.pop_callback(notes) is notes)
    trainer.remove_callback(side.PrinterCallback)
    order.append(trainer.callback_handler.callback_list)
    return side.record(trainer, extra={"order": order, "seen": notes.seen})


@scenario(extra=True)
def control_exchanged_by_a_callback(side: Side) -> Record:
    class Exchanging(side.TrainerCallback):  # type: ignore[name-defined]
        def on_step_begin(self, args: Any, state: Any, control: Any, **trainer_kwargs: Any) -> Any:
            return side.TrainerControl(should_log=state.global_step == 2, should_evaluate=state.global_step == 1)

        def on_epoch_end(self, args: Any, state: Any, control: Any, **trainer_kwargs: Any) -> Any:
            return side.TrainerControl(should_training_stop=True, should_log=True)

    return recorded(side, Exchanging(), logging_strategy="no")


@scenario(extra=True)
def events_with_parameters_frozen_by_a_callback(side: Side) -> Record:
    class Freezing(side.TrainerCallback):  # type: ignore[name-defined]
        def on_step_begin(self, args: Any, state: Any, control: Any, **trainer_kwargs: Any) -> None:
            parameters = list(trainer_kwargs["model"].parameters())
            parameters[0].requires_grad_(state.global_step % 2 == 0)

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **trainer_kwargs: Any) -> None:
            for group in trainer_kwargs["optimizer"].param_groups:
                group["lr"] = 0.5 * group["lr"]

    return recorded(side, Freezing(), gradient_accumulation_steps=2, rows=18)
