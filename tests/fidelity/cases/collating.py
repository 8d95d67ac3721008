"""Collators that draw random numbers, or make one row of a batch, in training."""

from __future__ import annotations

from typing import Any

from tests.fidelity.record import Record
from tests.fidelity.registry import Scenario, add
from tests.fidelity.side import Side
from tests.scenarios.data import Rows, language_rows, text_rows, tiny_tokenizer
from tests.scenarios.models import tiny_bert_for_masked_tokens, tiny_llama


def tokenized_rows(count: int, **options: Any) -> Rows:
    tokenizer = tiny_tokenizer()
    texts = [row["text"] for row in text_rows(count)]
    return Rows([dict(tokenizer(text, **options)) for text in texts])


def masked(side: Side, dataset: Any, changes: dict[str, Any], **settings: Any) -> Record:
    # Hiding many tokens, so that no batch is without a label.
    collator = side.DataCollatorForLanguageModeling(tiny_tokenizer(), mlm_probability=0.6, **settings)
    return train(side, tiny_bert_for_masked_tokens(), dataset, collator, **changes)


def train(side: Side, model: Any, dataset: Any, collator: Any, **changes: Any) -> Record:
    return side.train(
        side.Trainer(
            model=model,
            args=side.arguments(remove_unused_columns=False, **changes),
            data_collator=collator,
            train_dataset=dataset,
            callbacks=[side.watcher],
        )
    )


def masked_tokens_from_a_seed_in_two_workers(side: Side) -> Record:
    return masked(side, tokenized_rows(14), {"dataloader_num_workers": 2}, seed=3)


def tokens_flattened_to_a_row(side: Side) -> Record:
    return train(side, tiny_llama(), Rows(language_rows(14)), side.DataCollatorWithFlattening())


for _script in (
    masked_tokens_from_a_seed_in_two_workers,
    tokens_flattened_to_a_row,
):
    add(Scenario(name=f"collating_{_script.__name__}", run=_script))
