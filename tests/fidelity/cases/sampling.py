"""The order of samples under each sampling strategy, the settings of the accelerator_config, and loader workers."""

from __future__ import annotations

from typing import Any

import torch

from tests.fidelity.cases.data import train_vectors
from tests.fidelity.cases.resume import interrupt_and_resume
from tests.fidelity.record import Record
from tests.fidelity.registry import Scenario, add, scenario
from tests.fidelity.side import Side
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import AugmentedRows, Row, Rows, Stream, language_rows, tiny_tokenizer, vector_rows
from tests.scenarios.models import KeywordClassifier, tiny_gpt2


class RowsCutAtRandom(Rows):
    """Drops the last token of some rows when they are read, drawn from torch's global generator."""

    def __getitem__(self, index: int) -> Row:
        row = super().__getitem__(index)
        if torch.rand(()) < 0.5:
            return row
        return {name: values[:-1] for name, values in row.items()}


def train_language(side: Side, dataset: Any, evaluated: Any = None, **changes: Any) -> Record:
    trainer = side.Trainer(
        model=tiny_gpt2(),
        args=side.arguments(eval_strategy="no" if evaluated is None else "epoch", **changes),
        data_collator=pad_tokens,
        train_dataset=dataset,
        eval_dataset=evaluated,
        processing_class=tiny_tokenizer(),
        callbacks=[side.watcher],
    )
    output = trainer.train()
    return side.record(trainer, output, predictions=trainer.predict(evaluated) if evaluated is not None else None)


def table_with_lengths(count: int, seed: int = 0) -> Any:
    """Rows with a column of lengths that are not those of their tokens."""
    import datasets

    rows = language_rows(count, seed)
    return datasets.Dataset.from_list([{**row, "weight": (7 * index) % 11 + 1} for index, row in enumerate(rows)])


@scenario(predicts=True)
def grouped_by_a_column_of_lengths(side: Side) -> Record:
    return train_language(
        side,
        table_with_lengths(40),
        table_with_lengths(11, seed=1),
        train_sampling_strategy="group_by_length",
        length_column_name="weight",
        remove_unused_columns=False,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
        data_seed=5,
    )


@scenario(predicts=True)
def grouped_by_the_length_of_tokens_where_the_column_of_lengths_is_dropped(side: Side) -> Record:
    return train_language(
        side,
        table_with_lengths(22),
        table_with_lengths(10, seed=1),
        train_sampling_strategy="group_by_length",
        length_column_name="weight",
        per_device_train_batch_size=2,
    )


@scenario()
def grouped_by_the_length_of_rows_cut_at_random(side: Side) -> Record:
    return train_language(
        side,
        RowsCutAtRandom(language_rows(26)),
        RowsCutAtRandom(language_rows(7, seed=1)),
        train_sampling_strategy="group_by_length",
    )


REBALANCED: dict[str, dict[str, Any]] = {
    "": {"gradient_accumulation_steps": 3},
    "_dropping_the_last": {"gradient_accumulation_steps": 2, "dataloader_drop_last": True, "num_train_epochs": 3},
    "_by_a_column": {"gradient_accumulation_steps": 4, "length_column_name": "weight", "remove_unused_columns": False},
    "_without_accumulation": {"max_steps": 5},
    "_with_more_steps_than_samples_left": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 6},
}


def rebalanced(changes: dict[str, Any]) -> Any:
    def script(side: Side) -> Record:
        evaluated = table_with_lengths(7, seed=1)
        return train_language(
            side, table_with_lengths(26), evaluated, train_sampling_strategy="batch_rebalance", **changes
        )

    return script


for _name, _changes in REBALANCED.items():
    add(Scenario(name=f"batches_rebalanced{_name}", run=rebalanced(_changes), predicts=True))


@scenario(saves=True)
def resumed_with_samples_grouped_by_length(side: Side) -> Record:
    return interrupt_and_resume(
        side,
        Rows(language_rows(18)),
        True,
        model=tiny_gpt2,
        data_collator=pad_tokens,
        train_sampling_strategy="group_by_length",
    )


@scenario(saves=True)
def resumed_with_batches_rebalanced(side: Side) -> Record:
    return interrupt_and_resume(
        side,
        Rows(language_rows(38)),
        True,
        model=tiny_gpt2,
        data_collator=pad_tokens,
        train_sampling_strategy="batch_rebalance",
        gradient_accumulation_steps=2,
        num_train_epochs=3,
    )


@scenario(saves=True)
def resumed_in_the_order_of_the_global_generator(side: Side) -> Record:
    return interrupt_and_resume(
        side, Rows(vector_rows(18)), True, accelerator_config={"use_seedable_sampler": False}, num_train_epochs=3
    )


@scenario()
def stream_under_a_strategy_that_needs_lengths(side: Side) -> Record:
    return train_vectors(side, Stream(vector_rows(18)), train_sampling_strategy="group_by_length", max_steps=4)


ACCELERATOR_CONFIGS: dict[str, dict[str, Any]] = {
    "order_of_the_global_generator": {"accelerator_config": {"use_seedable_sampler": False}},
    "order_of_the_global_generator_beside_a_data_seed": {
        "accelerator_config": {"use_seedable_sampler": False},
        "data_seed": 7,
        "gradient_accumulation_steps": 2,
    },
    "batches_split_between_processes": {"accelerator_config": {"split_batches": True}},
    "batches_dispatched_to_processes": {"accelerator_config": {"dispatch_batches": True}},
    "batches_of_uneven_number": {"accelerator_config": {"even_batches": False, "dispatch_batches": False}},
    "copies_that_do_not_block": {"accelerator_config": {"non_blocking": True}},
    "accumulation_asked_of_the_accelerator": {
        "accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 3, "sync_each_batch": True}}
    },
    "settings_of_an_accumulation_that_the_trainer_decides": {
        "accelerator_config": {
            "gradient_accumulation_kwargs": {"adjust_scheduler": False, "sync_with_dataloader": False}
        },
        "gradient_accumulation_steps": 2,
    },
}


def configured(changes: dict[str, Any]) -> Any:
    def script(side: Side) -> Record:
        trainer = side.vector_trainer(
            KeywordClassifier(), train_dataset=AugmentedRows(vector_rows(18)), eval_strategy="epoch", **changes
        )
        return side.train(trainer)

    return script


for _name, _changes in ACCELERATOR_CONFIGS.items():
    add(Scenario(name=_name, run=configured(_changes)))


@scenario()
def stream_that_is_not_dispatched(side: Side) -> Record:
    trainer = side.vector_trainer(
        train_dataset=Stream(vector_rows(18)),
        eval_dataset=Stream(vector_rows(7, seed=1)),
        max_steps=6,
        eval_strategy="steps",
        eval_steps=2,
        accelerator_config={"dispatch_batches": False},
    )
    return side.train(trainer)


@scenario()
def noise_drawn_by_two_lasting_workers_in_random_order(side: Side) -> Record:
    trainer = side.vector_trainer(
        train_dataset=AugmentedRows(vector_rows(18)),
        eval_dataset=AugmentedRows(vector_rows(7, seed=1)),
        dataloader_num_workers=2,
        dataloader_persistent_workers=True,
        gradient_accumulation_steps=2,
        eval_strategy="epoch",
        num_train_epochs=3,
    )
    return side.train(trainer)


@scenario()
def noise_drawn_by_two_workers_in_the_order_of_the_global_generator(side: Side) -> Record:
    return train_vectors(
        side,
        AugmentedRows(vector_rows(14)),
        dataloader_num_workers=2,
        dataloader_prefetch_factor=1,
        accelerator_config={"use_seedable_sampler": False},
    )


@scenario()
def rows_out_of_order_from_a_worker(side: Side) -> Record:
    return train_vectors(side, AugmentedRows(vector_rows(10)), dataloader_num_workers=1, dataloader_in_order=False)


def train_on_a_prepared_loader(side: Side, **changes: Any) -> Record:
    Trainer: Any = side.Trainer

    class PreparesItsLoader(Trainer):
        def get_train_dataloader(self) -> Any:
            loader = torch.utils.data.DataLoader(
                self.train_dataset, batch_size=5, shuffle=True, collate_fn=self.data_collator
            )
            return self.accelerator.prepare(loader)

    return side.train(
        side.vector_trainer(
            train_dataset=AugmentedRows(vector_rows(18)), kind=PreparesItsLoader, num_train_epochs=3, **changes
        )
    )


@scenario()
def loader_prepared_by_the_accelerator(side: Side) -> Record:
    return train_on_a_prepared_loader(side, data_seed=6)


@scenario()
def loader_prepared_by_the_accelerator_in_the_order_of_the_global_generator(side: Side) -> Record:
    return train_on_a_prepared_loader(side, accelerator_config={"use_seedable_sampler": False})
