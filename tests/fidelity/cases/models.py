"""Kinds of models, and the ways in which a loss comes about."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.fidelity.record import Record
from tests.fidelity.registry import scenario
from tests.fidelity.side import Side
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, language_rows, tag_rows, token_rows, vector_rows
from tests.scenarios.metrics import accuracy
from tests.scenarios.models import (
    LogitsOnly,
    NoisyClassifier,
    PartlyTrainedClassifier,
    TupleClassifier,
    VectorClassifier,
    tiny_bert_classifier,
    tiny_bert_tagger,
    tiny_gpt2,
)


@scenario()
def plain_module_returning_a_dictionary(side: Side) -> Record:
    return side.train(
        side.Trainer(
            model=VectorClassifier(),
            args=side.arguments(num_train_epochs=3),
            train_dataset=Rows(vector_rows(18)),
            callbacks=[side.watcher],
        )
    )


@scenario()
def plain_module_returning_a_tuple(side: Side) -> Record:
    return side.train(
        side.Trainer(
            model=TupleClassifier(),
            args=side.arguments(logging_steps=3),
            train_dataset=Rows(vector_rows(18)),
            callbacks=[side.watcher],
        )
    )


@scenario()
def dropout_and_batch_norm_with_evaluation_between(side: Side) -> Record:
    model = NoisyClassifier()
    # A script that hands its model over in evaluation mode still trains it in training mode.
    model.eval()
    return side.train(
        side.Trainer(
            model=model,
            args=side.arguments(eval_strategy="steps", eval_steps=2),
            train_dataset=Rows(vector_rows(20)),
            eval_dataset=Rows(vector_rows(7, seed=1)),
            compute_metrics=accuracy,
            callbacks=[side.watcher],
        )
    )


@scenario(saves=True)
def partly_frozen_module_with_an_unused_layer(side: Side) -> Record:
    return side.train(
        side.Trainer(
            model=PartlyTrainedClassifier(),
            args=side.arguments(save_strategy="epoch", weight_decay=0.1),
            train_dataset=Rows(vector_rows(10)),
            callbacks=[side.watcher],
        )
    )


@scenario()
def bert_classifier_with_dropout(side: Side) -> Record:
    return side.train(
        side.Trainer(
            model=tiny_bert_classifier(),
            args=side.arguments(eval_strategy="epoch"),
            data_collator=pad_tokens,
            train_dataset=Rows(token_rows(22)),
            eval_dataset=Rows(token_rows(8, seed=1)),
            compute_metrics=accuracy,
            callbacks=[side.watcher],
        )
    )


@scenario()
def gpt2_with_masked_labels_of_varying_length(side: Side) -> Record:
    return side.train(
        side.Trainer(
            model=tiny_gpt2(),
            args=side.arguments(eval_strategy="epoch"),
            data_collator=pad_tokens,
            train_dataset=Rows(language_rows(18)),
            eval_dataset=Rows(language_rows(7, seed=1)),
            callbacks=[side.watcher],
        )
    )


@scenario(predicts=True)
def bert_tagger_predicting_unequal_lengths(side: Side) -> Record:
    trainer = side.Trainer(
        model=tiny_bert_tagger(),
        args=side.arguments(),
        data_collator=pad_tokens,
        train_dataset=Rows(tag_rows(10)),
        compute_metrics=accuracy,
        callbacks=[side.watcher],
    )
    return side.record(trainer, trainer.train(), predictions=trainer.predict(Rows(tag_rows(8, seed=3))))


@scenario(saves=True, predicts=True, extra=True)
def bert_with_a_layer_offloaded_to_disk(side: Side) -> Record:
    from accelerate import dispatch_model

    model = tiny_bert_classifier()
    device_map = {name: "cpu" for name, _ in model.named_children() if name != "bert"}
    device_map |= {f"bert.{name}": "cpu" for name, _ in model.bert.named_children() if name != "pooler"}
    model = dispatch_model(model, {**device_map, "bert.pooler": "disk"}, main_device="cpu", offload_dir="offloaded")
    trainer = side.Trainer(
        model=model,
        args=side.arguments(save_strategy="epoch", num_train_epochs=1),
        data_collator=pad_tokens,
        train_dataset=Rows(token_rows(10)),
        eval_dataset=Rows(token_rows(7, seed=1)),
        compute_metrics=accuracy,
        callbacks=[side.watcher],
    )
    facts = {name: getattr(trainer, name) for name in ("is_model_parallel", "place_model_on_device")}
    outputs = trainer.evaluate(), trainer.train(), trainer.evaluate()
    places = {name: str(parameter.device) for name, parameter in model.named_parameters()}
    predictions = trainer.predict(Rows(token_rows(5, seed=2)))
    return side.record(trainer, *outputs, predictions=predictions, extra={**facts, "places": places})


@scenario(saves=True)
def model_built_by_model_init(side: Side) -> Record:
    def build() -> Any:
        return tiny_bert_classifier()

    return side.train(
        side.Trainer(
            model_init=build,
            args=side.arguments(seed=7, save_strategy="epoch", num_train_epochs=1),
            data_collator=pad_tokens,
            train_dataset=Rows(token_rows(10)),
            callbacks=[side.watcher],
        )
    )


@scenario()
def model_init_trained_twice(side: Side) -> Record:
    def build() -> VectorClassifier:
        return VectorClassifier(hidden=5)

    trainer = side.Trainer(
        model_init=build, args=side.arguments(), train_dataset=Rows(vector_rows(9)), callbacks=[side.watcher]
    )
    return side.record(trainer, trainer.train(), trainer.train())


@scenario()
def loss_from_compute_loss_func(side: Side) -> Record:
    def summed_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        total = nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum", label_smoothing=0.1)
        return total / (labels.numel() if num_items_in_batch is None else num_items_in_batch)

    return side.train(
        side.Trainer(
            model=LogitsOnly(),
            args=side.arguments(
                gradient_accumulation_steps=2,
                eval_strategy="epoch",
                remove_unused_columns=False,
                label_names=["labels"],
            ),
            train_dataset=Rows(vector_rows(18)),
            eval_dataset=Rows(vector_rows(5, seed=1)),
            compute_loss_func=summed_loss,
            callbacks=[side.watcher],
        )
    )


@scenario(predicts=True)
def loss_from_an_overridden_compute_loss(side: Side) -> Record:
    Trainer: Any = side.Trainer

    class WeightedTrainer(Trainer):
        def compute_loss(
            self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            labels = inputs["labels"]
            outputs = model(**inputs)
            weight = torch.tensor([1.0, 2.0, 0.5])
            loss = nn.functional.cross_entropy(outputs["logits"], labels, weight=weight)
            return (loss, outputs) if return_outputs else loss

    trainer = WeightedTrainer(
        model=VectorClassifier(),
        args=side.arguments(gradient_accumulation_steps=2, eval_strategy="epoch"),
        train_dataset=Rows(vector_rows(18)),
        eval_dataset=Rows(vector_rows(5, seed=1)),
        callbacks=[side.watcher],
    )
    return side.record(trainer, trainer.train(), predictions=trainer.predict(Rows(vector_rows(4, seed=2))))


@scenario()
def double_precision_module(side: Side) -> Record:
    rows = [{**row, "x": row["x"].double()} for row in vector_rows(10)]
    return side.train(
        side.Trainer(
            model=VectorClassifier().double(),
            args=side.arguments(),
            train_dataset=Rows(rows),
            callbacks=[side.watcher],
        )
    )


@scenario()
def bf16_mixed_precision(side: Side) -> Record:
    return side.train(
        side.Trainer(
            model=tiny_bert_classifier(),
            args=side.arguments(bf16=True, eval_strategy="epoch", gradient_accumulation_steps=2),
            data_collator=pad_tokens,
            train_dataset=Rows(token_rows(12)),
            eval_dataset=Rows(token_rows(5, seed=1)),
            callbacks=[side.watcher],
        )
    )


@scenario()
def label_smoothing(side: Side) -> Record:
    return side.train(
        side.Trainer(
            model=tiny_gpt2(),
            args=side.arguments(label_smoothing_factor=0.1, eval_strategy="epoch", gradient_accumulation_steps=2),
            data_collator=pad_tokens,
            train_dataset=Rows(language_rows(10)),
            eval_dataset=Rows(language_rows(5, seed=1)),
            callbacks=[side.watcher],
        )
    )
