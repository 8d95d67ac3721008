"""Arguments that act on the model, its loss or its memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.fidelity.record import Record
from tests.fidelity.registry import Scenario, add, scenario
from tests.fidelity.side import Side
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, language_rows, tag_rows, token_rows, vector_rows
from tests.scenarios.metrics import accuracy
from tests.scenarios.models import (
    NoisyClassifier,
    VectorClassifier,
    tiny_bert_classifier,
    tiny_bert_tagger,
    tiny_gpt2,
    tiny_llama,
)


def language_trainer(side: Side, model: Any, **changes: Any) -> Any:
    return side.token_trainer(model, language_rows, rows=12, **{"num_train_epochs": 1, **changes})


@scenario(predicts=True)
def label_smoothing_of_a_tagger(side: Side) -> Record:
    trainer = side.token_trainer(
        tiny_bert_tagger(),
        tag_rows,
        rows=14,
        compute_metrics=accuracy,
        label_smoothing_factor=0.3,
        eval_strategy="epoch",
        gradient_accumulation_steps=3,
    )
    return side.record(trainer, trainer.train(), predictions=trainer.predict(Rows(tag_rows(4, seed=2))))


@scenario()
def label_smoothing_of_a_causal_model_by_its_window(side: Side) -> Record:
    return side.train(language_trainer(side, tiny_llama(), label_smoothing_factor=0.1, gradient_accumulation_steps=2))


@scenario()
def label_smoothing_is_ignored_for_several_true_labels(side: Side) -> Record:
    rows = [{"input_ids": row["input_ids"], "labels": [1.0, 0.0, 1.0]} for row in token_rows(8)]
    model = tiny_bert_classifier(problem_type="multi_label_classification")

    def pad(samples: list[Any]) -> Any:
        batch = pad_tokens([{"input_ids": sample["input_ids"], "labels": 0} for sample in samples])
        return {**batch, "labels": torch.tensor([sample["labels"] for sample in samples])}

    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        trainer = side.Trainer(
            model=model,
            args=side.arguments(label_smoothing_factor=0.4),
            data_collator=pad,
            train_dataset=Rows(rows),
            callbacks=[side.watcher],
        )
    return side.train(trainer)


CHECKPOINTED: dict[str, dict[str, Any]] = {
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "activation_checkpointing_every_second_layer": {
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"every_n_layers": 2, "use_reentrant": False},
    },
    "gradient_checkpointing_that_is_reentrant": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "gradient_checkpointing_keywords_alone": {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
}


def script_for(changes: dict[str, Any]) -> Callable[[Side], Record]:
    def script(side: Side) -> Record:
        model = tiny_llama(num_hidden_layers=3)
        trainer = language_trainer(side, model, **changes)
        trained = trainer.train()
        flags = [getattr(module, "gradient_checkpointing", None) for module in model.modules()]
        return side.record(trainer, trained, extra={"checkpointed": flags})

    return script


for _name, _changes in CHECKPOINTED.items():
    add(Scenario(name=_name, run=script_for(_changes), extra=True))


class OldCheckpointing(VectorClassifier):
    """Knows activation checkpointing by its old name only."""

    checkpoints = False

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None, **kwargs: Any) -> None:
        self.checkpoints = True
        self.trainer_kwargs = (gradient_checkpointing_kwargs, kwargs)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        if not self.checkpoints:
            return super().logits(x)
        return self.head(checkpoint(lambda value: self.norm(torch.relu(self.inner(value))), x, use_reentrant=False))


@scenario(extra=True)
def gradient_checkpointing_of_a_model_with_its_old_name(side: Side) -> Record:
    model = OldCheckpointing()
    trainer = side.vector_trainer(
        model, rows=8, gradient_checkpointing=True, gradient_checkpointing_kwargs={"a": 1, "offload": True}
    )
    trained = trainer.train()
    return side.record(trainer, trained, extra={"trainer_kwargs": model.trainer_kwargs})


@scenario(extra=True)
def noise_on_the_embeddings(side: Side) -> Record:
    model = tiny_llama()
    trainer = language_trainer(side, model, neftune_noise_alpha=5.0, eval_strategy="steps", eval_steps=2)
    trained = trainer.train()
    embeddings = model.get_input_embeddings()
    model.train()
    remaining = {
        "hooks": len(embeddings._forward_hooks),
        "alpha": hasattr(embeddings, "neftune_noise_alpha"),
        "embedded": embeddings(torch.tensor([[6, 7]], device=trainer.args.device)),
    }
    return side.record(trainer, trained, extra=remaining)


@scenario()
def noise_on_the_embeddings_of_a_bert_trained_twice(side: Side) -> Record:
    trainer = side.token_trainer(
        tiny_bert_classifier(), token_rows, rows=9, neftune_noise_alpha=0.5, num_train_epochs=1
    )
    return side.record(trainer, trainer.train(), trainer.train())


class SmallMemory(NoisyClassifier):
    """Runs out of memory with micro-batches of more than five samples, from the second on."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        if self.training:
            self.sizes.append(len(x))
            if len(x) > 5 and self.sizes.count(len(x)) > 1:
                raise RuntimeError("CUDA out of memory. Tried to allocate more than there is.")
        return super().forward(x, labels)


@scenario(saves=True, extra=True)
def batch_size_after_memory_ran_out(side: Side) -> Record:
    model = SmallMemory()
    trainer = side.vector_trainer(
        model,
        rows=24,
        eval_rows=6,
        auto_find_batch_size=True,
        per_device_train_batch_size=8,
        save_strategy="epoch",
        eval_strategy="steps",
        eval_steps=2,
    )
    trained = trainer.train()
    return side.record(trainer, trained, extra={"sizes": model.sizes, "found": trainer._train_batch_size})


@scenario(extra=True)
def reduced_batch_size_is_resumed(side: Side) -> Record:
    def make(size: int, model: nn.Module, epochs: int) -> Any:
        return side.vector_trainer(
            model,
            rows=24,
            auto_find_batch_size=True,
            per_device_train_batch_size=size,
            save_strategy="epoch",
            num_train_epochs=epochs,
        )

    make(8, SmallMemory(), 1).train()
    model = SmallMemory()
    resumed = make(8, model, 2)
    trained = resumed.train(resume_from_checkpoint=True)
    return side.record(resumed, trained, extra={"sizes": model.sizes})


@scenario(predicts=True)
def memory_metrics(side: Side) -> Record:
    trainer = side.vector_trainer(
        rows=10, eval_rows=5, compute_metrics=accuracy, skip_memory_metrics=False, eval_strategy="epoch"
    )
    outputs = [trainer.train(), trainer.evaluate()]
    return side.record(trainer, *outputs, predictions=trainer.predict(Rows(vector_rows(4, seed=2))))


@scenario()
def cache_emptied_every_second_step(side: Side) -> Record:
    return side.train(language_trainer(side, tiny_gpt2(), torch_empty_cache_steps=2))


@scenario(extra=True)
def full_determinism(side: Side) -> Record:
    try:
        trainer = side.vector_trainer(NoisyClassifier(), rows=10, full_determinism=True, seed=3)
        trained = trainer.train()
        return side.record(trainer, trained, extra={"only": torch.are_deterministic_algorithms_enabled()})
    finally:
        torch.use_deterministic_algorithms(False)


@scenario()
def hooks_that_watch_for_overflow_change_nothing(side: Side) -> Record:
    return side.train(side.vector_trainer(rows=8, debug="underflow_overflow", max_steps=2))
