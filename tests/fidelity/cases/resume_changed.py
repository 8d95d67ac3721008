"""Resuming as something else than what was broken off: longer, with other arguments, finished, or a second time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.fidelity.cases.callbacks import raising
from tests.fidelity.record import Record
from tests.fidelity.registry import Script, add_scripts, scenario
from tests.fidelity.side import Side
from tests.scenarios.data import Rows, SizedStream, Stream, vector_rows
from tests.scenarios.models import NoisyClassifier, VectorClassifier

SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}


def trainer_of(side: Side, *callbacks: Any, rows: int = 18, dataset: Any = None, **changes: Any) -> Any:
    return side.vector_trainer(
        NoisyClassifier(),
        rows=rows,
        train_dataset=dataset,
        eval_rows=5,
        callbacks=callbacks,
        **{**SAVING, **changes},
    )


def make_script(before: dict[str, Any], after: dict[str, Any], by_steps: bool = False) -> Script:
    """Return a script that trains under some arguments up to step 3, and resumes under others.

    Parameters:
        by_steps: the checkpoint has no record of ours, so the place in the data is counted in optimizer steps.
    """

    def script(side: Side) -> Record:
        stop = raising(side, "on_step_end", 3, "should_training_stop")
        first = trainer_of(side, stop, **before).train()
        for file in Path("out").glob("checkpoint-*/littrainer_*") if by_steps else ():
            file.unlink()
        second = trainer_of(side, **after)
        return side.record(second, first, second.train(resume_from_checkpoint=True))

    return script


OTHER_RATES: dict[str, Any] = {"learning_rate": 0.5, "lr_scheduler_type": "cosine", "max_grad_norm": 0.1}
STREAM: dict[str, Any] = {
    "dataset": Stream(vector_rows(30)),
    "gradient_accumulation_steps": 2,
    "save_strategy": "epoch",
}
SIZED_STREAM = {"dataset": SizedStream(vector_rows(18))}
WORKERS = {"dataloader_num_workers": 2}

add_scripts(
    {
        "resumed_for_more_epochs": make_script({"num_train_epochs": 1}, {"num_train_epochs": 2}),
        "resumed_for_more_steps_than_it_was_finished_with": make_script({"max_steps": 3}, {"max_steps": 7}),
        "resumed_over_a_stream_for_more_steps_than_it_was_finished_with": make_script(
            {**STREAM, "max_steps": 2}, {**STREAM, "max_steps": 3}
        ),
        "resumed_with_smaller_micro_batches": make_script({}, {"per_device_train_batch_size": 2}, by_steps=True),
        "resumed_with_another_accumulation": make_script(
            {}, {"gradient_accumulation_steps": 2, "num_train_epochs": 3}, by_steps=True
        ),
        "resumed_with_other_rates_intervals_and_seed": make_script(
            {}, {**OTHER_RATES, "weight_decay": 0.3, "seed": 7, "logging_steps": 2, "save_steps": 2}
        ),
        "resumed_over_more_data": make_script({}, {"rows": 30}),
        "resumed_with_workers": make_script(WORKERS, WORKERS),
        "resumed_over_a_stream_of_known_length": make_script(SIZED_STREAM, SIZED_STREAM),
    },
    saves=True,
)


@scenario(saves=True)
def resumed_in_a_later_epoch_with_short_last_windows(side: Side) -> Record:
    """Eight micro-batches in windows of three: the last window of each epoch has two."""
    settings = {"rows": 30, "gradient_accumulation_steps": 3, "num_train_epochs": 3, "save_steps": 1}
    stop = raising(side, "on_step_end", 5, "should_training_stop")
    first = trainer_of(side, stop, **settings).train()
    second = trainer_of(side, **settings)
    return side.record(second, first, second.train(resume_from_checkpoint="out/checkpoint-4"))


@scenario(saves=True)
def resumed_twice(side: Side) -> Record:
    outputs = []
    for step in (3, 6):
        stop = raising(side, "on_step_end", step, "should_training_stop")
        outputs.append(trainer_of(side, stop).train(resume_from_checkpoint=step > 3))
    last = trainer_of(side)
    return side.record(last, *outputs, last.train(resume_from_checkpoint=True))


@scenario(saves=True)
def resumed_though_it_is_finished(side: Side) -> Record:
    settings = {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True}
    first = trainer_of(side, **settings).train()
    second = trainer_of(side, **settings)
    return side.record(second, first, second.train(resume_from_checkpoint=True))


def patience_resumed(side: Side, **changes: Any) -> Record:
    """An evaluation that never improves: the first two and the resumed evaluations exhaust the patience of four."""
    settings = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "score", "save_steps": 1, **changes}

    def trainer(*callbacks: Any) -> Any:
        return side.Trainer(
            model=VectorClassifier(),
            args=side.arguments(**{**SAVING, **settings}),
            train_dataset=Rows(vector_rows(18)),
            eval_dataset=Rows(vector_rows(5, seed=1)),
            compute_metrics=lambda _: {"score": 0.5},
            callbacks=[*callbacks, side.watcher, side.EarlyStoppingCallback(early_stopping_patience=4)],
        )

    first = trainer(raising(side, "on_step_end", 3, "should_training_stop")).train()
    second = trainer()
    return side.record(second, first, second.train(resume_from_checkpoint=True))


@scenario(saves=True)
def resumed_with_the_remaining_patience(side: Side) -> Record:
    return patience_resumed(side, restore_callback_states_from_checkpoint=True)


@scenario(saves=True)
def resumed_with_fresh_patience(side: Side) -> Record:
    return patience_resumed(side, restore_callback_states_from_checkpoint=False)


@scenario(saves=True, extra=True)
def resumed_with_several_stateful_callbacks_of_a_class(side: Side) -> Record:
    """Restored callbacks come after the others, by the names of their classes; each save adds to a list of states."""

    class Named(side.TrainerCallback, side.ExportableState):  # type: ignore[name-defined]
        def __init__(self, name: str = "") -> None:
            self.name = name

        def state(self) -> dict[str, Any]:
            return {"args": {"name": self.name}}

    class Earlier(Named):
        pass

    def trainer(*callbacks: Any) -> Any:
        return side.vector_trainer(callbacks=callbacks, **SAVING, restore_callback_states_from_checkpoint=True)

    first = trainer(Named("a"), Earlier("b"), Named("c"), raising(side, "on_step_end", 3, "should_training_stop"))
    second = trainer(Named(), Earlier(), Named())
    outputs = first.train(), second.train(resume_from_checkpoint=True)
    callbacks = [
        (type(callback).__name__, getattr(callback, "name", None)) for callback in second.callback_handler.callbacks
    ]
    return side.record(second, *outputs, extra={"callbacks": callbacks})


@scenario(saves=True)
def resumed_with_the_best_model_so_far(side: Side) -> Record:
    """The best evaluation comes before the break, and its checkpoint is kept through the resumed part."""
    scores = iter([0.1, 0.9, 0.2, *[0.3] * 9])

    def trainer(*callbacks: Any) -> Any:
        return side.vector_trainer(
            eval_rows=5,
            compute_metrics=lambda _: {"score": next(scores)},
            callbacks=callbacks,
            save_strategy="steps",
            save_steps=1,
            eval_strategy="steps",
            eval_steps=1,
            metric_for_best_model="score",
            load_best_model_at_end=True,
            save_total_limit=2,
        )

    first = trainer(raising(side, "on_step_end", 3, "should_training_stop")).train()
    second = trainer()
    return side.record(second, first, second.train(resume_from_checkpoint=True))
