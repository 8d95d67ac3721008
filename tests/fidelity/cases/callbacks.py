"""Callbacks that steer a run, and losses that are not numbers."""

from __future__ import annotations

from typing import Any

from tests.fidelity.record import Record
from tests.fidelity.registry import scenario
from tests.fidelity.side import Side
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.metrics import accuracy
from tests.scenarios.models import BreakingClassifier, NoisyClassifier, VectorClassifier


def raising(side: Side, event: str, step: int, flag: str) -> Any:
    """A callback that sets one control flag at one event of one step."""

    TrainerCallback: Any = side.TrainerCallback

    class Raise(TrainerCallback):
        pass

    def on_event(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if state.global_step == step:
            setattr(control, flag, True)
        return control

    setattr(Raise, event, on_event)
    return Raise()


def steered(side: Side, *callbacks: Any, model: Any = None, **changes: Any) -> Record:
    return side.train(
        side.Trainer(
            model=model or NoisyClassifier(),
            args=side.arguments(**changes),
            train_dataset=Rows(vector_rows(18)),
            eval_dataset=Rows(vector_rows(5, seed=1)),
            compute_metrics=accuracy,
            callbacks=[*callbacks, side.watcher],
        )
    )


@scenario()
def training_stopped_midway(side: Side) -> Record:
    return steered(side, raising(side, "on_step_end", 3, "should_training_stop"))


@scenario()
def training_stopped_in_the_middle_of_a_window(side: Side) -> Record:
    return steered(side, raising(side, "on_substep_end", 1, "should_training_stop"), gradient_accumulation_steps=3)


@scenario()
def epoch_stopped_midway(side: Side) -> Record:
    return steered(side, raising(side, "on_step_end", 2, "should_epoch_stop"), num_train_epochs=3)


@scenario()
def epoch_stopped_midway_while_accumulating(side: Side) -> Record:
    return steered(
        side,
        raising(side, "on_step_end", 1, "should_epoch_stop"),
        gradient_accumulation_steps=2,
        num_train_epochs=3,
        eval_strategy="epoch",
    )


@scenario()
def training_stopped_at_an_evaluation(side: Side) -> Record:
    return steered(side, raising(side, "on_evaluate", 4, "should_training_stop"), eval_strategy="steps", eval_steps=2)


@scenario(saves=True)
def log_evaluation_and_save_asked_for_by_callbacks(side: Side) -> Record:
    return steered(
        side,
        raising(side, "on_step_end", 2, "should_log"),
        raising(side, "on_step_end", 3, "should_evaluate"),
        raising(side, "on_step_end", 4, "should_save"),
        raising(side, "on_epoch_end", 5, "should_log"),
        logging_strategy="no",
    )


@scenario(saves=True)
def stopped_early_without_improvement(side: Side) -> Record:
    return steered(
        side,
        side.EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=0.01),
        num_train_epochs=8,
        learning_rate=0.5,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
    )


@scenario(extra=True)
def model_changed_by_a_callback_before_the_optimizer_step(side: Side) -> Record:
    norms: list[float] = []

    TrainerCallback: Any = side.TrainerCallback

    class Halve(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            for parameter in kwargs["model"].parameters():
                parameter.grad.mul_(0.5)
            norms.append(float(sum(p.grad.norm() for p in kwargs["model"].parameters())))

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            norms.append(float(sum(p.grad.norm() for p in kwargs["model"].parameters())))

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            norms.append(kwargs["lr_scheduler"].get_last_lr()[0])
            norms.append(kwargs["optimizer"].param_groups[0]["lr"])

    trainer = side.Trainer(
        model=VectorClassifier(),
        args=side.arguments(num_train_epochs=1),
        train_dataset=Rows(vector_rows(10)),
        callbacks=[Halve(), side.watcher],
    )
    return side.record(trainer, trainer.train(), extra={"norms": norms})


@scenario()
def log_method_of_the_scripts_own(side: Side) -> Record:
    Trainer: Any = side.Trainer

    class ChattyTrainer(Trainer):
        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            logs["doubled_step"] = 2 * self.state.global_step
            super().log(logs, start_time)

    return side.train(
        ChattyTrainer(
            model=VectorClassifier(),
            args=side.arguments(eval_strategy="epoch"),
            train_dataset=Rows(vector_rows(10)),
            eval_dataset=Rows(vector_rows(5, seed=1)),
            callbacks=[side.watcher],
        )
    )


@scenario()
def loss_that_is_nan_once_and_filtered(side: Side) -> Record:
    return steered(side, model=BreakingClassifier((4,)), logging_steps=3)


@scenario()
def loss_that_is_nan_once_and_logged(side: Side) -> Record:
    return steered(side, model=BreakingClassifier((4,)), logging_steps=3, logging_nan_inf_filter=False)


@scenario()
def loss_that_is_infinite_within_a_window(side: Side) -> Record:
    return steered(
        side,
        model=BreakingClassifier((1, 5), value=float("inf")),
        logging_steps=2,
        gradient_accumulation_steps=3,
    )


@scenario()
def progress_bar_shown(side: Side) -> Record:
    return steered(side, disable_tqdm=False, eval_strategy="epoch")
