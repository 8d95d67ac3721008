"""The collators that both sides ship, in training: the same batches from the same random draws."""

from __future__ import annotations

from typing import Any

from tests.fidelity.record import Record
from tests.fidelity.registry import Scenario, add
from tests.fidelity.side import Side
from tests.scenarios.data import Rows, language_rows, tag_rows, text_rows, tiny_tokenizer
from tests.scenarios.models import tiny_bert_for_masked_tokens, tiny_bert_tagger, tiny_gpt2, tiny_llama


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


def masked_tokens(side: Side) -> Record:
    return masked(side, tokenized_rows(14, return_special_tokens_mask=True), {"gradient_accumulation_steps": 2})


def masked_tokens_from_a_seed(side: Side) -> Record:
    return masked(side, tokenized_rows(14), {}, seed=3, mask_replace_prob=0.3, random_replace_prob=0.5)


def masked_tokens_from_a_seed_in_two_workers(side: Side) -> Record:
    return masked(side, tokenized_rows(14), {"dataloader_num_workers": 2}, seed=3)


def masked_words(side: Side) -> Record:
    rows = tokenized_rows(
        12,
        padding="max_length",
        max_length=8,
        truncation=True,
        return_offsets_mapping=True,
        return_special_tokens_mask=True,
    )
    return masked(side, rows, {}, whole_word_mask=True)


def tokens_to_be_continued(side: Side) -> Record:
    collator = side.DataCollatorForLanguageModeling(tiny_tokenizer(), mlm=False, pad_to_multiple_of=4)
    return train(side, tiny_gpt2(), tokenized_rows(14, return_token_type_ids=False), collator)


def tokens_flattened_to_one_row(side: Side) -> Record:
    return train(side, tiny_llama(), Rows(language_rows(14)), side.DataCollatorWithFlattening())


def tagged_tokens(side: Side) -> Record:
    collator = side.DataCollatorForTokenClassification(tiny_tokenizer(), pad_to_multiple_of=4)
    return train(side, tiny_bert_tagger(), Rows(tag_rows(14)), collator)


for _script in (
    masked_tokens,
    masked_tokens_from_a_seed,
    masked_tokens_from_a_seed_in_two_workers,
    masked_words,
    tokens_to_be_continued,
    tokens_flattened_to_one_row,
    tagged_tokens,
):
    add(Scenario(name=f"collating_{_script.__name__}", run=_script))
