"""Mixed precision, evaluation in half precision, compilation."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.fidelity.record import Record
from tests.fidelity.registry import scenario
from tests.fidelity.side import Side
from tests.scenarios.data import Rows, language_rows, token_rows
from tests.scenarios.metrics import accuracy
from tests.scenarios.models import LogitsOnly, NoisyClassifier, tiny_bert_classifier, tiny_gpt2


def bert_trainer(side: Side, **changes: Any) -> Any:
    return side.token_trainer(
        tiny_bert_classifier(), token_rows, rows=12, compute_metrics=accuracy, **{"num_train_epochs": 1, **changes}
    )


@scenario(predicts=True, saves=True, extra=True)
def bf16_and_what_the_model_computes_afterwards(side: Side) -> Record:
    trainer = bert_trainer(side, bf16=True, eval_strategy="epoch", save_strategy="epoch")
    trained = trainer.train()
    predictions = trainer.predict(Rows(token_rows(5, seed=2)))
    ids = torch.tensor([[6, 7, 8], [9, 10, 11]], device=trainer.args.device)
    with torch.no_grad():
        logits = trainer.model(input_ids=ids).logits
    return side.record(trainer, trained, predictions=predictions, extra={"logits": logits, "dtype": str(logits.dtype)})


@scenario()
def bf16_with_a_loss_computed_from_the_outputs(side: Side) -> Record:
    def summed_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        weight = torch.ones(3, 3, dtype=torch.float32, device=labels.device)
        total = nn.functional.cross_entropy(outputs["logits"] @ weight + outputs["logits"], labels, reduction="sum")
        return total / (labels.numel() if num_items_in_batch is None else num_items_in_batch)

    return side.train(
        side.vector_trainer(
            LogitsOnly(),
            eval_rows=5,
            trainer_kwargs={"compute_loss_func": summed_loss},
            bf16=True,
            gradient_accumulation_steps=2,
            eval_strategy="epoch",
            remove_unused_columns=False,
            label_names=["labels"],
        )
    )


@scenario()
def bf16_with_label_smoothing_and_checkpointed_activations(side: Side) -> Record:
    return side.train(
        side.token_trainer(
            tiny_gpt2(n_layer=2), language_rows, bf16=True, label_smoothing_factor=0.2, gradient_checkpointing=True
        )
    )


@scenario(predicts=True)
def bf16_evaluation_before_any_training(side: Side) -> Record:
    trainer = bert_trainer(side, bf16=True)
    return side.record(trainer, trainer.evaluate(), predictions=trainer.predict(Rows(token_rows(5, seed=2))))


@scenario()
def fp16_on_a_cpu(side: Side) -> Record:
    return side.train(side.vector_trainer(rows=10, fp16=True))


@scenario(predicts=True)
def bf16_full_evaluation_after_training(side: Side) -> Record:
    trainer = bert_trainer(side, bf16_full_eval=True, eval_strategy="epoch")
    outputs = [trainer.train(), trainer.evaluate()]
    return side.record(trainer, *outputs, predictions=trainer.predict(Rows(token_rows(5, seed=2))))


@scenario(predicts=True)
def fp16_full_evaluation_before_training(side: Side) -> Record:
    trainer = bert_trainer(side, fp16_full_eval=True)
    outputs = [trainer.evaluate()]
    return side.record(trainer, *outputs, predictions=trainer.predict(Rows(token_rows(5, seed=2))))


@scenario(saves=True)
def compiled_model_that_saves_and_evaluates(side: Side) -> Record:
    model = NoisyClassifier()
    return side.train(
        side.vector_trainer(
            model,
            rows=16,
            eval_rows=6,
            compute_metrics=accuracy,
            torch_compile=True,
            torch_compile_backend="eager",
            torch_compile_mode="default",
            eval_strategy="epoch",
            save_strategy="epoch",
            num_train_epochs=1,
        )
    )
