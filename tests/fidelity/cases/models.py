"""Kinds of models, and the ways in which a loss comes about."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.fidelity.record import Record
from tests.fidelity.registry import scenario
from tests.fidelity.side import Side
from tests.scenarios.data import Rows, token_rows, vector_rows
from tests.scenarios.metrics import accuracy
from tests.scenarios.models import (
    LogitsOnly,
    NoisyClassifier,
    PartlyTrainedClassifier,
    VectorClassifier,
    tiny_bert_classifier,
)


@scenario()
def plain_module_returning_a_dictionary(side: Side) -> Record:
    return side.train(side.vector_trainer(num_train_epochs=3))


@scenario()
def dropout_and_batch_norm_with_evaluation_between(side: Side) -> Record:
    model = NoisyClassifier()
    # A script that hands its model over in evaluation mode still trains it in training mode.
    model.eval()
    return side.train(
        side.vector_trainer(model, rows=20, compute_metrics=accuracy, eval_strategy="steps", eval_steps=2)
    )


@scenario(saves=True)
def partly_frozen_module_with_an_unused_layer(side: Side) -> Record:
    return side.train(side.vector_trainer(PartlyTrainedClassifier(), rows=10, save_strategy="epoch", weight_decay=0.1))


@scenario(saves=True, predicts=True, extra=True)
def bert_with_a_layer_offloaded_to_disk(side: Side) -> Record:
    from accelerate import dispatch_model

    model = tiny_bert_classifier()
    device_map = {name: "cpu" for name, _ in model.named_children() if name != "bert"}
    device_map |= {f"bert.{name}": "cpu" for name, _ in model.bert.named_children() if name != "pooler"}
    model = dispatch_model(model, {**device_map, "bert.pooler": "disk"}, main_device="cpu", offload_dir="offloaded")
    trainer = side.token_trainer(
        model, token_rows, eval_rows=7, compute_metrics=accuracy, save_strategy="epoch", num_train_epochs=1
    )
    facts = {name: getattr(trainer, name) for name in ("is_model_parallel", "place_model_on_device")}
    outputs = trainer.evaluate(), trainer.train(), trainer.evaluate()
    places = {name: str(parameter.device) for name, parameter in model.named_parameters()}
    predictions = trainer.predict(Rows(token_rows(5, seed=2)))
    return side.record(trainer, *outputs, predictions=predictions, extra={**facts, "places": places})


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
        side.vector_trainer(
            LogitsOnly(),
            eval_rows=5,
            trainer_kwargs={"compute_loss_func": summed_loss},
            gradient_accumulation_steps=2,
            eval_strategy="epoch",
            remove_unused_columns=False,
            label_names=["labels"],
        )
    )


@scenario()
def double_precision_module(side: Side) -> Record:
    rows = [{**row, "x": row["x"].double()} for row in vector_rows(10)]
    return side.train(side.vector_trainer(VectorClassifier().double(), train_dataset=Rows(rows)))


@scenario()
def bf16_mixed_precision(side: Side) -> Record:
    return side.train(
        side.token_trainer(
            tiny_bert_classifier(), token_rows, rows=12, bf16=True, eval_strategy="epoch", gradient_accumulation_steps=2
        )
    )
