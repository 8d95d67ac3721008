"""Gradient accumulation: optimizer steps of several micro-batches, the last one of an epoch shorter."""

from __future__ import annotations

from typing import Any

from tests.fidelity.record import Record
from tests.fidelity.registry import scenario
from tests.fidelity.side import Side
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, language_rows, vector_rows
from tests.scenarios.models import CountingClassifier, KeywordClassifier, VectorClassifier, tiny_gpt2, tiny_llama


def accumulate_vectors(side: Side, model: Any, rows: int, **changes: Any) -> Record:
    return side.train(
        side.Trainer(
            model=model,
            args=side.arguments(**changes),
            train_dataset=Rows(vector_rows(rows)),
            callbacks=[side.watcher],
        )
    )


def accumulate_language(side: Side, rows: int, model: Any = None, **changes: Any) -> Record:
    return side.train(
        side.Trainer(
            model=model or tiny_gpt2(),
            args=side.arguments(**changes),
            data_collator=pad_tokens,
            train_dataset=Rows(language_rows(rows)),
            callbacks=[side.watcher],
        )
    )


@scenario()
def plain_module_accumulating_3_of_5_batches(side: Side) -> Record:
    return accumulate_vectors(side, VectorClassifier(), 18, gradient_accumulation_steps=3)


@scenario()
def plain_module_accumulating_4_of_7_batches(side: Side) -> Record:
    return accumulate_vectors(side, VectorClassifier(), 26, gradient_accumulation_steps=4, logging_steps=2)


@scenario()
def gpt2_accumulating_3_of_5_batches(side: Side) -> Record:
    return accumulate_language(side, 18, gradient_accumulation_steps=3)


@scenario()
def llama_accumulating_3_of_5_batches(side: Side) -> Record:
    return accumulate_language(side, 18, tiny_llama(), gradient_accumulation_steps=3)


@scenario()
def gpt2_accumulating_4_of_7_batches(side: Side) -> Record:
    return accumulate_language(side, 26, gradient_accumulation_steps=4)


@scenario()
def gpt2_accumulating_without_averaging_across_devices(side: Side) -> Record:
    return accumulate_language(side, 10, gradient_accumulation_steps=2, average_tokens_across_devices=False)


@scenario()
def counting_module_accumulating_3_of_5_batches(side: Side) -> Record:
    return accumulate_vectors(side, CountingClassifier(), 18, gradient_accumulation_steps=3)


@scenario()
def module_that_takes_the_item_count_and_ignores_it(side: Side) -> Record:
    return accumulate_vectors(side, KeywordClassifier(), 18, gradient_accumulation_steps=2)


@scenario()
def module_that_declines_the_item_count(side: Side) -> Record:
    model = KeywordClassifier()
    model.accepts_loss_kwargs = False  # type: ignore[assignment]
    return accumulate_vectors(side, model, 18, gradient_accumulation_steps=2)


@scenario()
def trainer_that_says_whether_its_loss_is_scaled(side: Side) -> Record:
    Trainer: Any = side.Trainer

    class UnscaledTrainer(Trainer):
        loss_is_scaled_for_ga = False

    return side.train(
        UnscaledTrainer(
            model=KeywordClassifier(),
            args=side.arguments(gradient_accumulation_steps=3),
            train_dataset=Rows(vector_rows(18)),
            callbacks=[side.watcher],
        )
    )


@scenario()
def accumulation_longer_than_an_epoch(side: Side) -> Record:
    return accumulate_vectors(side, VectorClassifier(), 11, gradient_accumulation_steps=8, num_train_epochs=3)


@scenario()
def accumulation_with_the_last_incomplete_batch_dropped(side: Side) -> Record:
    return accumulate_vectors(
        side, VectorClassifier(), 19, gradient_accumulation_steps=3, dataloader_drop_last=True, num_train_epochs=3
    )


@scenario(extra=True)
def accumulation_read_from_a_get_batch_samples_override(side: Side) -> Record:
    Trainer: Any = side.Trainer
    seen: list[Any] = []

    class WatchingTrainer(Trainer):
        def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
            samples, count = super().get_batch_samples(epoch_iterator, num_batches, device)
            seen.append((num_batches, len(samples), None if count is None else int(count)))
            return samples, count

    trainer = WatchingTrainer(
        model=CountingClassifier(),
        args=side.arguments(gradient_accumulation_steps=3),
        train_dataset=Rows(vector_rows(18)),
        callbacks=[side.watcher],
    )
    return side.train(trainer, extra={"windows": seen})
