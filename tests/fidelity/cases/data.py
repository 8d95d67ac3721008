"""Data order, random draws, collators, columns and loaders."""

from __future__ import annotations

from typing import Any

import torch

from tests.fidelity.record import Record
from tests.fidelity.registry import scenario
from tests.fidelity.side import Side
from tests.scenarios.collators import mask_at_random
from tests.scenarios.data import AugmentedRows, Rows, language_rows, text_rows, tiny_tokenizer, token_rows, vector_rows
from tests.scenarios.metrics import accuracy
from tests.scenarios.models import VectorClassifier, tiny_bert_classifier, tiny_bert_for_masked_tokens, tiny_gpt2


def train_vectors(side: Side, dataset: Any, **changes: Any) -> Record:
    return side.train(side.vector_trainer(train_dataset=dataset, **changes))


@scenario()
def rows_in_order_read_by_two_workers(side: Side) -> Record:
    return train_vectors(
        side,
        AugmentedRows(vector_rows(10)),
        train_sampling_strategy="sequential",
        dataloader_num_workers=2,
        num_train_epochs=2,
    )


@scenario()
def data_seed_that_differs_from_the_seed(side: Side) -> Record:
    return train_vectors(side, Rows(vector_rows(18)), data_seed=99, seed=3)


@scenario(predicts=True)
def datasets_with_unused_columns(side: Side) -> Record:
    import datasets

    def table(count: int, seed: int) -> Any:
        rows = token_rows(count, seed, shortest=5, longest=5)
        return datasets.Dataset.from_list(
            [{"idx": index, "label": row["labels"], "input_ids": row["input_ids"]} for index, row in enumerate(rows)]
        )

    trainer = side.Trainer(
        model=tiny_bert_classifier(),
        args=side.arguments(eval_strategy="epoch"),
        train_dataset=table(11, 0),
        eval_dataset=table(5, 1),
        compute_metrics=accuracy,
        callbacks=[side.watcher],
    )
    return side.record(trainer, trainer.train(), predictions=trainer.predict(table(4, 2)))


@scenario()
def rows_with_unused_columns(side: Side) -> Record:
    rows = [{**row, "note": "unused", "idx": index} for index, row in enumerate(vector_rows(10))]
    return train_vectors(side, Rows(rows))


@scenario()
def label_ids_and_lists_through_the_default_collator(side: Side) -> Record:
    rows = [{"x": row["x"].tolist(), "label_ids": [row["labels"]]} for row in vector_rows(10)]

    class Squeezing(VectorClassifier):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            return super().forward(x, None if labels is None else labels.squeeze(-1))

    return side.train(side.vector_trainer(Squeezing(), train_dataset=Rows(rows)))


@scenario(saves=True, predicts=True)
def text_padded_by_the_tokenizer(side: Side) -> Record:
    import datasets

    tokenizer = tiny_tokenizer()

    def table(count: int, seed: int) -> Any:
        texts = datasets.Dataset.from_list(text_rows(count, seed))
        return texts.map(lambda row: tokenizer(row["text"]))

    trainer = side.Trainer(
        model=tiny_bert_classifier(),
        args=side.arguments(num_train_epochs=1, save_strategy="epoch", eval_strategy="epoch"),
        train_dataset=table(11, 0),
        eval_dataset=table(5, 1),
        processing_class=tokenizer,
        compute_metrics=accuracy,
        callbacks=[side.watcher],
    )
    return side.record(trainer, trainer.train(), predictions=trainer.predict(table(4, 2)))


@scenario()
def tokens_masked_at_random_by_the_collator(side: Side) -> Record:
    return side.train(
        side.Trainer(
            model=tiny_bert_for_masked_tokens(),
            args=side.arguments(eval_strategy="steps", eval_steps=2),
            data_collator=mask_at_random,
            train_dataset=Rows(token_rows(14)),
            eval_dataset=Rows(token_rows(7, seed=1)),
            callbacks=[side.watcher],
        )
    )


@scenario()
def tokens_masked_at_random_while_accumulating(side: Side) -> Record:
    return side.train(
        side.Trainer(
            model=tiny_bert_for_masked_tokens(),
            args=side.arguments(gradient_accumulation_steps=3),
            data_collator=mask_at_random,
            train_dataset=Rows(token_rows(18)),
            callbacks=[side.watcher],
        )
    )


@scenario()
def custom_loader(side: Side) -> Record:
    Trainer: Any = side.Trainer

    class CustomLoader(Trainer):
        def get_train_dataloader(self) -> Any:
            generator = torch.Generator().manual_seed(4)
            return torch.utils.data.DataLoader(
                self.train_dataset, batch_size=5, shuffle=True, generator=generator, collate_fn=self.data_collator
            )

    return side.train(side.vector_trainer(kind=CustomLoader, gradient_accumulation_steps=2))


@scenario(extra=True)
def input_tokens_counted_without_padding(side: Side) -> Record:
    trainer = side.token_trainer(
        tiny_gpt2(),
        language_rows,
        rows=14,
        trainer_kwargs={"processing_class": tiny_tokenizer()},
        include_num_input_tokens_seen="non_padding",
        gradient_accumulation_steps=2,
    )
    output = trainer.train()
    return side.record(trainer, output, extra={"tokens": trainer.state.num_input_tokens_seen})
