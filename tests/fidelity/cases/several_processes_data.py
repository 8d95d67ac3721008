"""How two processes share the data: every way of it, in training, evaluation and after a resume."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler

from tests.fidelity.cases.resume import interrupt_and_resume
from tests.fidelity.record import Record
from tests.fidelity.registry import Scenario, add, scenario
from tests.fidelity.side import Side
from tests.scenarios.data import AugmentedRows, Rows, SizedStream, Stream, language_rows, tiny_tokenizer, vector_rows
from tests.scenarios.metrics import accuracy
from tests.scenarios.models import VectorClassifier, tiny_gpt2

Make = Callable[[int, int], Any]


def rows(count: int, seed: int) -> Rows:
    return Rows(vector_rows(count, seed))


def augmented(count: int, seed: int) -> Rows:
    return AugmentedRows(vector_rows(count, seed))


def stream(count: int, seed: int) -> Stream:
    return Stream(vector_rows(count, seed))


def sized_stream(count: int, seed: int) -> Stream:
    return SizedStream(vector_rows(count, seed))


def table_in_shards(shards: int) -> Make:
    def make(count: int, seed: int) -> Any:
        import datasets

        plain = [{"x": row["x"].tolist(), "labels": row["labels"]} for row in vector_rows(count, seed)]
        return datasets.Dataset.from_list(plain).to_iterable_dataset(num_shards=shards)

    return make


def shared(make: Make, trained: int = 18, evaluated: int = 7, **changes: Any) -> Callable[[Side], Record]:
    """A script that trains, evaluates at each epoch and predicts."""

    def script(side: Side) -> Record:
        trainer = side.vector_trainer(
            train_dataset=make(trained, 0),
            eval_dataset=make(evaluated, 1),
            compute_metrics=accuracy,
            **{"eval_strategy": "epoch", **changes},
        )
        return side.record(trainer, trainer.train(), predictions=trainer.predict(make(evaluated, 2)))

    return script


STEPS: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 3, "max_steps": 5}
SPLIT = {"accelerator_config": {"split_batches": True}}
DISPATCHED = {"accelerator_config": {"dispatch_batches": True}}
NOT_DISPATCHED = {"accelerator_config": {"dispatch_batches": False}}
EVEN_SIZES = {"per_device_eval_batch_size": 4}

SHARED: dict[str, Callable[[Side], Record]] = {
    "rows": shared(rows),
    "fewer_rows_than_one_batch_of_each": shared(rows, trained=5, evaluated=4),
    "rows_without_the_last_incomplete_batch": shared(rows, dataloader_drop_last=True),
    "rows_while_accumulating": shared(rows, trained=30, gradient_accumulation_steps=2),
    "rows_read_by_lasting_workers": shared(
        augmented, dataloader_num_workers=1, dataloader_persistent_workers=True, dataloader_prefetch_factor=1
    ),
    "rows_in_an_order_drawn_from_one_generator": shared(rows, accelerator_config={"use_seedable_sampler": False}),
    "halves_of_batches": shared(rows, **SPLIT, **EVEN_SIZES),
    "rows_without_repeating_any": shared(
        rows, trained=16, evaluated=6, accelerator_config={"even_batches": False}, num_train_epochs=1
    ),
    "rows_dispatched": shared(rows, **DISPATCHED),
    "rows_dispatched_in_halves": shared(
        rows, trained=17, accelerator_config={"dispatch_batches": True, "split_batches": True}, **EVEN_SIZES
    ),
    "stream_that_ends_early_dispatched": shared(stream, trained=15, **{**STEPS, "max_steps": 6}),
    "stream_dispatched_in_halves": shared(stream, **STEPS, **SPLIT, **EVEN_SIZES),
    "stream_with_a_length_read_by_each": shared(sized_stream, evaluated=6, **NOT_DISPATCHED),
    "table_in_shards_read_by_each": shared(table_in_shards(2), trained=20, evaluated=6, **STEPS, **NOT_DISPATCHED),
}


def enter(name: str, run: Callable[[Side], Record], **facts: bool) -> None:
    add(Scenario(name=f"two_processes_{name}", run=run, processes=2, **facts))


for _name, _script in SHARED.items():
    enter(f"share_{_name}", _script, predicts=True)


def language(side: Side, **changes: Any) -> Record:
    trainer = side.token_trainer(
        tiny_gpt2(),
        language_rows,
        rows=40,
        eval_rows=11,
        trainer_kwargs={"processing_class": tiny_tokenizer()},
        **changes,
    )
    return side.record(trainer, trainer.train(), trainer.evaluate())


@scenario(processes=2)
def two_processes_share_rows_grouped_by_length(side: Side) -> Record:
    return language(side, train_sampling_strategy="group_by_length", gradient_accumulation_steps=2, data_seed=5)


@scenario(processes=2)
def two_processes_share_rows_grouped_without_a_seedable_sampler(side: Side) -> Record:
    return language(side, train_sampling_strategy="group_by_length", accelerator_config={"use_seedable_sampler": False})


@scenario(processes=2)
def two_processes_share_rows_rebalanced(side: Side) -> Record:
    return language(side, train_sampling_strategy="batch_rebalance", gradient_accumulation_steps=2)


def train_with(side: Side, get_train_dataloader: Callable[[Any], Any], **changes: Any) -> Record:
    class CustomLoader(side.Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return get_train_dataloader(self)

    trainer = side.vector_trainer(rows=21, eval_rows=5, kind=CustomLoader, **changes)
    return side.record(trainer, trainer.train(), trainer.evaluate())


@scenario(processes=2)
def two_processes_with_a_custom_distributed_sampler(side: Side) -> Record:
    def loader(trainer: Any) -> Any:
        # Shuffled, a sampler is handed the epoch here and not by transformers, which is a known difference.
        sampler = DistributedSampler(trainer.train_dataset, shuffle=False)
        return DataLoader(trainer.train_dataset, batch_size=4, sampler=sampler, collate_fn=trainer.data_collator)

    return train_with(side, loader)


class BatchesOfUnequalSize(BatchSampler):
    """Batches of one to three rows in an order that is seeded by the epoch."""

    def __init__(self, count: int) -> None:
        super().__init__(SequentialSampler(range(count)), 2, False)
        del self.batch_size
        self.count = count
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-self.count // 6) * 3

    def __iter__(self) -> Any:
        source = random.Random(self.epoch)
        order = source.sample(range(self.count), self.count)
        for start in range(0, self.count, 6):
            six = order[start : start + 6]
            yield from (six[:1], six[1:3] or six[:1], six[3:] or six[:1])


PREPARED: dict[str, Callable[[Any], Any]] = {
    "a_loader_with_a_generator": lambda trainer: DataLoader(
        trainer.train_dataset,
        batch_size=4,
        shuffle=True,
        generator=torch.Generator().manual_seed(4 + trainer.args.process_index),
        collate_fn=trainer.data_collator,
    ),
    "batches_of_unequal_size": lambda trainer: DataLoader(
        trainer.train_dataset, batch_sampler=BatchesOfUnequalSize(21), collate_fn=trainer.data_collator
    ),
}


def prepared(name: str) -> Callable[[Side], Record]:
    return lambda side: train_with(side, lambda trainer: trainer.accelerator.prepare(PREPARED[name](trainer)))


for _name in PREPARED:
    enter(f"with_{_name}_prepared", prepared(_name))


def resumed(make: Make, trained: int = 36, **changes: Any) -> Callable[[Side], Record]:
    return lambda side: interrupt_and_resume(side, make(trained, 0), True, model=VectorClassifier, **changes)


RESUMED: dict[str, Callable[[Side], Record]] = {
    "rows": resumed(rows),
    "a_stream_dispatched": resumed(stream, max_steps=9),
}
for _name, _script in RESUMED.items():
    enter(f"resume_{_name}", _script, saves=True)
