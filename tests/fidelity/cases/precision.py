"""Mixed precision, evaluation in half precision, compilation."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.fidelity.record import Record
from tests.fidelity.registry import scenario
from tests.fidelity.side import Side
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, language_rows, token_rows, vector_rows
from tests.scenarios.metrics import accuracy
from tests.scenarios.models import LogitsOnly, NoisyClassifier, VectorClassifier, tiny_bert_classifier, tiny_gpt2


def bert_trainer(side: Side, **changes: Any) -> Any:
    return side.Trainer(
        model=tiny_bert_classifier(),
        args=side.arguments(**{"num_train_epochs": 1, **changes}),
        data_collator=pad_tokens,
        train_dataset=Rows(token_rows(12)),
        eval_dataset=Rows(token_rows(5, seed=1)),
        compute_metrics=accuracy,
        callbacks=[side.watcher],
    )


@scenario(predicts=True, saves=True, extra=True)
def bf16_and_what_the_model_computes_afterwards(side: Side) -> Record:
    trainer = bert_trainer(side, bf16=True, eval_strategy="epoch", save_strategy="epoch")
    trained = trainer.train()
    predictions = trainer.predict(Rows(token_rows(5, seed=2)))
    ids = torch.tensor([[6, 7, 8], [9, 10, 11]])
    with torch.no_grad():
        logits = trainer.model(input_ids=ids).logits
    return side.record(trainer, trained, predictions=predictions, extra={"logits": logits, "dtype": str(logits.dtype)})


@scenario()
def bf16_with_a_loss_computed_from_the_outputs(side: Side) -> Record:
    def summed_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        weight = torch.ones(3, 3, dtype=torch.float32)
        total = nn.functional.cross_entropy(outputs["logits"] @ weight + outputs["logits"], labels, reduction="sum")
        return total / (labels.numel() if num_items_in_batch is None else num_items_in_batch)

    return side.train(
        side.Trainer(
            model=LogitsOnly(),
            args=side.arguments(
                bf16=True,
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


@scenario()
def bf16_with_label_smoothing_and_checkpointed_activations(side: Side) -> Record:
    return side.train(
        side.Trainer(
            model=tiny_gpt2(n_layer=2),
            args=side.arguments(bf16=True, label_smoothing_factor=0.2, gradient_checkpointing=True),
            data_collator=pad_tokens,
            train_dataset=Rows(language_rows(10)),
            callbacks=[side.watcher],
        )
    )


@scenario(predicts=True)
def bf16_evaluation_before_any_training(side: Side) -> Record:
    trainer = bert_trainer(side, bf16=True)
    return side.record(trainer, trainer.evaluate(), predictions=trainer.predict(Rows(token_rows(5, seed=2))))


@scenario()
def fp16_on_a_cpu(side: Side) -> Record:
    return side.train(
        side.Trainer(
            model=VectorClassifier(),
            args=side.arguments(fp16=True),
            train_dataset=Rows(vector_rows(10)),
            callbacks=[side.watcher],
        )
    )


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
        side.Trainer(
            model=model,
            args=side.arguments(
                torch_compile=True,
                torch_compile_backend="eager",
                torch_compile_mode="default",
                eval_strategy="epoch",
                save_strategy="epoch",
                num_train_epochs=1,
            ),
            train_dataset=Rows(vector_rows(16)),
            eval_dataset=Rows(vector_rows(6, seed=1)),
            compute_metrics=accuracy,
            callbacks=[side.watcher],
        )
    )
