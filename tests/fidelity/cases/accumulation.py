"""Gradient accumulation: optimizer steps of several micro-batches, the last one of an epoch shorter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.fidelity.record import Record
from tests.fidelity.registry import Script, add_scripts, scenario
from tests.fidelity.side import Side
from tests.scenarios.data import language_rows
from tests.scenarios.models import CountingClassifier, KeywordClassifier, VectorClassifier, tiny_gpt2, tiny_llama


def make_declining_module() -> KeywordClassifier:
    """Return a module that takes any keyword and declines the item count."""
    model = KeywordClassifier()
    model.accepts_loss_kwargs = False  # type: ignore[assignment]
    return model


def make_vector_script(make_model: Callable[[], Any], rows: int, accumulation: int, **changes: Any) -> Script:
    return lambda side: side.train(
        side.vector_trainer(make_model(), rows=rows, gradient_accumulation_steps=accumulation, **changes)
    )


def make_token_script(make_model: Callable[[], Any], rows: int, accumulation: int, **changes: Any) -> Script:
    return lambda side: side.train(
        side.token_trainer(make_model(), language_rows, rows=rows, gradient_accumulation_steps=accumulation, **changes)
    )


add_scripts(
    {
        "plain_module_accumulating_3_of_5_batches": make_vector_script(VectorClassifier, 18, 3),
        "llama_accumulating_3_of_5_batches": make_token_script(tiny_llama, 18, 3),
        "gpt2_accumulating_4_of_7_batches": make_token_script(tiny_gpt2, 26, 4),
        "gpt2_accumulating_without_averaging_across_devices": make_token_script(
            tiny_gpt2, 10, 2, average_tokens_across_devices=False
        ),
        "module_that_takes_the_item_count_and_ignores_it": make_vector_script(KeywordClassifier, 18, 2),
        "module_that_declines_the_item_count": make_vector_script(make_declining_module, 18, 2),
        "accumulation_longer_than_an_epoch": make_vector_script(VectorClassifier, 11, 8, num_train_epochs=3),
        "accumulation_with_the_last_incomplete_batch_dropped": make_vector_script(
            VectorClassifier, 19, 3, dataloader_drop_last=True, num_train_epochs=3
        ),
    }
)


@scenario()
def trainer_that_says_whether_its_loss_is_scaled(side: Side) -> Record:
    Trainer: Any = side.Trainer

    class UnscaledTrainer(Trainer):
        loss_is_scaled_for_ga = False

    return side.train(side.vector_trainer(KeywordClassifier(), kind=UnscaledTrainer, gradient_accumulation_steps=3))


@scenario(extra=True)
def accumulation_read_from_a_get_batch_samples_override(side: Side) -> Record:
    Trainer: Any = side.Trainer
    records: list[Any] = []

    class WatchingTrainer(Trainer):
        def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
            samples, count = super().get_batch_samples(epoch_iterator, num_batches, device)
            records.append((num_batches, len(samples), None if count is None else int(count)))
            return samples, count

    trainer = side.vector_trainer(CountingClassifier(), kind=WatchingTrainer, gradient_accumulation_steps=3)
    return side.train(trainer, extra={"windows": records})
