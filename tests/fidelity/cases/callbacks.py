"""Callbacks that steer a run, and losses that are not numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.fidelity.record import Record
from tests.fidelity.registry import Script, add_scripts, scenario
from tests.fidelity.side import Side
from tests.scenarios.metrics import accuracy
from tests.scenarios.models import NoisyClassifier, NonfiniteClassifier


def raising(side: Side, event: str, step: int, flag: str) -> Any:
    """Sets a control flag at a given event and step."""

    TrainerCallback: Any = side.TrainerCallback

    class Raise(TrainerCallback):
        pass

    def on_event(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if state.global_step == step:
            setattr(control, flag, True)
        return control

    setattr(Raise, event, on_event)
    return Raise()


def make_script(*flags: tuple[str, int, str], make_model: Any = NoisyClassifier, **changes: Any) -> Script:
    """Return a script with a callback of `raising` for each event, step and flag."""
    return lambda side: side.train(
        side.vector_trainer(
            make_model(),
            eval_rows=5,
            compute_metrics=accuracy,
            callbacks=[raising(side, *flag) for flag in flags],
            **changes,
        )
    )


add_scripts(
    {
        "training_stopped_in_the_middle_of_a_window": make_script(
            ("on_substep_end", 1, "should_training_stop"), gradient_accumulation_steps=3
        ),
        "epoch_stopped_midway_while_accumulating": make_script(
            ("on_step_end", 1, "should_epoch_stop"),
            gradient_accumulation_steps=2,
            num_train_epochs=3,
            eval_strategy="epoch",
        ),
        "loss_that_is_nan_once_and_filtered": make_script(
            make_model=partial(NonfiniteClassifier, (4,)), logging_steps=3
        ),
        "loss_that_is_nan_once_and_logged": make_script(
            make_model=partial(NonfiniteClassifier, (4,)), logging_steps=3, logging_nan_inf_filter=False
        ),
        "loss_that_is_infinite_within_a_window": make_script(
            make_model=partial(NonfiniteClassifier, (1, 5), float("inf")),
            logging_steps=2,
            gradient_accumulation_steps=3,
        ),
        "progress_bar_shown": make_script(disable_tqdm=False, eval_strategy="epoch"),
    }
)
add_scripts(
    {
        "log_evaluation_and_save_asked_for_by_callbacks": make_script(
            ("on_step_end", 2, "should_log"),
            ("on_step_end", 3, "should_evaluate"),
            ("on_step_end", 4, "should_save"),
            ("on_epoch_end", 5, "should_log"),
            logging_strategy="no",
        )
    },
    saves=True,
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

    trainer = side.vector_trainer(rows=10, callbacks=[Halve()], num_train_epochs=1)
    return side.record(trainer, trainer.train(), extra={"norms": norms})
