"""Every method that a subclass may override: how often it is called, and with what kinds of arguments."""

from __future__ import annotations

from typing import Any

from tests.fidelity.record import Record
from tests.fidelity.registry import scenario
from tests.fidelity.side import Side
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, token_rows, vector_rows
from tests.scenarios.metrics import accuracy
from tests.scenarios.models import VectorClassifier, tiny_bert_classifier
from tests.scenarios.overrides import OVERRIDE_POINTS, Calls, noting_trainer

ACCUMULATING: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    "num_train_epochs": 2,
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "load_best_model_at_end": True,
    "metric_for_best_model": "accuracy",
    "eval_on_start": True,
}
# An override of training_step would put both of our modes into manual optimization; it has a separate scenario.
METHODS_OF_BOTH_MODES = [name for name in OVERRIDE_POINTS if name != "training_step"]


@scenario(saves=True, predicts=True, extra=True)
def overriding_every_method_and_calling_the_parents(side: Side) -> Record:
    calls = Calls()
    trainer = noting_trainer(side.Trainer, METHODS_OF_BOTH_MODES, calls)(
        model_init=lambda: VectorClassifier(),
        args=side.arguments(**ACCUMULATING),
        train_dataset=Rows(vector_rows(18)),
        eval_dataset=Rows(vector_rows(7, seed=1)),
        compute_metrics=accuracy,
        callbacks=[side.watcher],
    )
    output = trainer.train()
    metrics = trainer.evaluate()
    predictions = trainer.predict(Rows(vector_rows(5, seed=2)))
    trainer.save_model("saved")
    # Ours sets a trial's arguments before it makes the model, whose seed may be among them.
    order = [name for name in calls.first_calls() if name != "_hp_search_setup"]
    return side.record(
        trainer,
        output,
        metrics,
        predictions=predictions,
        extra={"calls": calls.group_by_method(), "order": order},
    )


@scenario(extra=True)
def overriding_training_step_alone_and_calling_the_parents(side: Side) -> Record:
    calls = Calls()
    trainer = noting_trainer(side.Trainer, ["training_step"], calls)(
        model=tiny_bert_classifier(),
        args=side.arguments(gradient_accumulation_steps=2, num_train_epochs=2),
        data_collator=pad_tokens,
        train_dataset=Rows(token_rows(18)),
        callbacks=[side.watcher],
    )
    return side.record(trainer, trainer.train(), extra={"calls": calls.made})


@scenario(saves=True, extra=True)
def overriding_every_method_while_resuming(side: Side) -> Record:
    from datasets import Dataset

    calls = Calls()
    model = tiny_bert_classifier()
    first = side.Trainer(
        model=model,
        args=side.arguments(max_steps=2, save_strategy="steps", save_steps=2),
        data_collator=pad_tokens,
        train_dataset=Rows(token_rows(12)),
    )
    first.train()
    trainer = noting_trainer(side.Trainer, METHODS_OF_BOTH_MODES, calls)(
        model=tiny_bert_classifier(),
        args=side.arguments(max_steps=4, restore_callback_states_from_checkpoint=True),
        data_collator=pad_tokens,
        train_dataset=Dataset.from_list([{**row, "text": "unused"} for row in token_rows(12)]),
        callbacks=[side.watcher],
    )
    output = trainer.train(resume_from_checkpoint="out/checkpoint-2")
    # Ours restores the random states right after the batches are drawn, before their label tokens are counted.
    order = [name for name in calls.first_calls() if name not in ("_load_rng_state", "_hp_search_setup")]
    return side.record(trainer, output, extra={"calls": calls.group_by_method(), "order": order})
