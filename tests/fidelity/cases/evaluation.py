"""Evaluation and prediction: when they run, what they gather, what they return."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from tests.fidelity.record import Record
from tests.fidelity.registry import scenario
from tests.fidelity.side import Side
from tests.scenarios.data import Rows, Stream, language_rows, token_rows, vector_rows
from tests.scenarios.metrics import StreamingAccuracy, accuracy, shapes_and_sums
from tests.scenarios.models import NoisyClassifier, TupleClassifier, VectorClassifier, tiny_bert_classifier, tiny_gpt2


def evaluated_trainer(side: Side, model: Any = None, compute_metrics: Any = accuracy, **changes: Any) -> Any:
    return side.vector_trainer(model or NoisyClassifier(), compute_metrics=compute_metrics, **changes)


@scenario(saves=True)
def logging_evaluating_and_saving_every_few_steps(side: Side) -> Record:
    return side.train(
        evaluated_trainer(
            side,
            logging_steps=3,
            logging_first_step=True,
            eval_strategy="steps",
            eval_steps=0.25,
            eval_on_start=True,
            save_strategy="steps",
            save_steps=4,
        )
    )


@scenario()
def evaluating_at_the_logging_interval_after_a_delay(side: Side) -> Record:
    return side.train(evaluated_trainer(side, logging_steps=2, eval_strategy="steps", eval_delay=4))


@scenario()
def evaluating_without_ever_training(side: Side) -> Record:
    trainer = evaluated_trainer(side)
    first, held_out = trainer.evaluate(), trainer.evaluate(Rows(vector_rows(4, seed=5)), metric_key_prefix="held_out")
    return side.record(trainer, first, held_out)


@scenario()
def evaluating_the_loss_only(side: Side) -> Record:
    return side.train(evaluated_trainer(side, eval_strategy="epoch", prediction_loss_only=True))


@scenario(saves=True)
def evaluating_several_datasets(side: Side) -> Record:
    trainer = side.vector_trainer(
        rows=14,
        eval_dataset={"near": Rows(vector_rows(5, seed=1)), "far": Rows(vector_rows(7, seed=2))},
        compute_metrics=accuracy,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="eval_near_loss",
    )
    output = trainer.train()
    named = trainer.evaluate({"one": Rows(vector_rows(3, seed=3)), "two": Rows(vector_rows(4, seed=4))}, None, "final")
    return side.record(trainer, output, named, trainer.evaluate(metric_key_prefix="again"))


@scenario()
def metrics_from_inputs_and_losses(side: Side) -> Record:
    trainer = side.token_trainer(
        tiny_bert_classifier(),
        token_rows,
        eval_rows=8,
        compute_metrics=shapes_and_sums,
        eval_strategy="epoch",
        include_for_metrics=["inputs", "loss"],
        num_train_epochs=1,
    )
    return side.train(trainer)


@scenario()
def metrics_summed_up_batch_by_batch(side: Side) -> Record:
    return side.train(
        evaluated_trainer(side, compute_metrics=StreamingAccuracy(), eval_strategy="epoch", batch_eval_metrics=True)
    )


@scenario(predicts=True)
def predictions_as_lists_of_batches(side: Side) -> Record:
    trainer = evaluated_trainer(side, compute_metrics=None, eval_do_concat_batches=False, num_train_epochs=1)
    return side.record(trainer, trainer.train(), predictions=trainer.predict(Rows(vector_rows(7, seed=2))))


@scenario(predicts=True)
def predicting_without_labels(side: Side) -> Record:
    rows = [{"x": row["x"]} for row in vector_rows(7, seed=2)]
    trainer = evaluated_trainer(side, model=TupleClassifier(), num_train_epochs=1)
    return side.record(trainer, trainer.train(), predictions=trainer.predict(Rows(rows)))


@scenario(predicts=True)
def predicting_a_language_model_of_unequal_lengths(side: Side) -> Record:
    trainer = side.token_trainer(tiny_gpt2(), language_rows, max_steps=2)
    return side.record(trainer, trainer.train(), predictions=trainer.predict(Rows(language_rows(8, seed=2))))


@scenario(extra=True)
def losses_of_batches_of_unequal_size_weighted_alike(side: Side) -> Record:
    rows = Rows(vector_rows(7, seed=1))
    loaders = {
        "batches of a sampler": DataLoader(rows, batch_sampler=[[0, 1, 2, 3], [4], [5, 6]]),
        "a last batch of one": DataLoader(rows, batch_size=2),
        "batches larger than the arguments say": DataLoader(rows, batch_size=5),
        "a stream": DataLoader(Stream(rows.rows), batch_size=3),
    }
    trainer = evaluated_trainer(side)
    losses = {}
    for name, loader in loaders.items():
        trainer.get_eval_dataloader = lambda *_, loader=loader: loader
        losses[name] = trainer.evaluate()["eval_loss"]
    return side.record(trainer, extra=losses)


@scenario(extra=True)
def losses_of_streams_weighted_as_they_are_dispatched(side: Side) -> Record:
    losses = {}
    model = VectorClassifier()
    for dispatched in (None, False):
        trainer = evaluated_trainer(side, model, accelerator_config={"dispatch_batches": dispatched})
        for name, rows in (("full", 6), ("short", 7)):
            losses[f"{dispatched} {name}"] = trainer.evaluate(Stream(vector_rows(rows, seed=1)))["eval_loss"]
    return side.record(trainer, extra=losses)
