from __future__ import annotations

import logging
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import RandomSampler, SequentialSampler
from transformers.trainer_pt_utils import BatchRebalanceSampler as TheirSampler
from transformers.trainer_pt_utils import LengthGroupedSampler as TheirLengthGroupedSampler
from transformers.trainer_pt_utils import get_length_grouped_indices as theirs_grouped

from littrainer.data.samplers import (
    QUADRATIC_COST,
    BatchRebalanceSampler,
    EpochSeededSampler,
    LengthGroupedSampler,
    evaluation_sampler,
    get_length_grouped_indices,
    train_sampler,
)
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, SizedStream, Stream, language_rows, vector_rows
from tests.scenarios.models import tiny_gpt2
from tests.scenarios.trainers import quiet_arguments, quiet_trainer

DATA = range(20)


def order(sampler: RandomSampler, epoch: int | None = None) -> list[int]:
    if epoch is not None:
        sampler.set_epoch(epoch)  # type: ignore[attr-defined]
    return list(sampler)


def test_the_order_of_an_epoch_depends_on_nothing_drawn_in_between() -> None:
    undisturbed = order(EpochSeededSampler(DATA, data_seed=3), epoch=2)
    sampler = EpochSeededSampler(DATA, data_seed=3)
    order(sampler)
    torch.rand(7)
    assert order(sampler, epoch=2) == undisturbed
    assert sorted(undisturbed) == list(DATA)


def test_without_a_data_seed_the_seed_last_given_to_torch_counts() -> None:
    torch.manual_seed(11)
    torch.rand(5)
    assert order(EpochSeededSampler(DATA)) == order(EpochSeededSampler(DATA, data_seed=11))


def test_the_order_is_that_of_accelerates_seedable_sampler() -> None:
    theirs = SeedableRandomSampler(DATA, data_seed=9)
    ours = EpochSeededSampler(DATA, data_seed=9)
    for epoch in (0, 1, 4):
        assert order(ours, epoch) == order(theirs, epoch)


def test_replacing_a_sampler_keeps_how_many_and_how_it_draws() -> None:
    generator = torch.Generator()
    replaced = EpochSeededSampler.replacing(
        RandomSampler(DATA, replacement=True, num_samples=50, generator=generator), data_seed=1
    )
    assert replaced.replacement and len(replaced) == 50 and replaced.generator is generator
    assert len(set(order(replaced))) < 50


LENGTHS = [3, 50, 7, 7, 12, 1, 30, 29, 8, 8, 8, 40, 2, 19, 5, 6, 11, 13, 4, 22, 50, 9]


class Measured:
    """Samples that are mappings, of the given lengths; counts how often one is read."""

    def __init__(self, lengths: list[int], name: str = "input_ids") -> None:
        self.lengths, self.name, self.reads = lengths, name, 0

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        self.reads += 1
        return {self.name: [0] * self.lengths[index]}


@pytest.mark.parametrize("count", [1, 2, 5, 16, 22])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 64])
@pytest.mark.parametrize("mega_batch_mult", [None, 1, 3])
def test_samples_of_similar_length_are_grouped_as_transformers_groups_them(
    count: int, batch_size: int, mega_batch_mult: int | None
) -> None:
    orders = []
    for group in (theirs_grouped, get_length_grouped_indices):
        generator = torch.Generator().manual_seed(count)
        orders.append(group(LENGTHS[:count], batch_size, mega_batch_mult, generator=generator))
    assert orders[0] == orders[1] and sorted(orders[1]) == list(range(count))


def test_grouping_draws_from_the_global_generator_unless_it_is_given_one() -> None:
    before = torch.get_rng_state()
    list(LengthGroupedSampler(3, lengths=LENGTHS, generator=torch.Generator()))
    assert torch.equal(torch.get_rng_state(), before)
    list(LengthGroupedSampler(3, lengths=LENGTHS))
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("make", [list, torch.tensor, tuple])
def test_lengths_may_come_as_list_tensor_or_column(make: Any) -> None:
    assert LengthGroupedSampler(3, lengths=make(LENGTHS)).lengths == LENGTHS


@pytest.mark.parametrize("name", [None, "input_ids", "pixels"])
def test_a_dataset_is_measured_by_its_main_input(name: str | None) -> None:
    dataset = Measured([4, 2, 9], name or "input_ids")
    assert LengthGroupedSampler(2, dataset=dataset, model_input_name=name).lengths == [4, 2, 9]


def test_a_dataset_is_read_as_often_as_transformers_reads_it() -> None:
    ours, theirs = Measured(LENGTHS), Measured(LENGTHS)
    LengthGroupedSampler(2, dataset=ours)
    TheirLengthGroupedSampler(2, dataset=theirs)
    # Python's own loop over a dataset without __iter__ reads once more, and ends with that read's IndexError.
    assert ours.reads == theirs.reads - 1 == len(LENGTHS) + 2


@pytest.mark.parametrize(
    ("dataset", "found"), [([[1, 2]], "a list"), (Measured([1], "pixels"), "the keys pixels")], ids=["list", "keys"]
)
def test_samples_without_a_length_are_refused_with_what_there_is_and_what_to_do(dataset: Any, found: str) -> None:
    with pytest.raises(ValueError, match=rf"'input_ids'.*{found}.*length_column_name"):
        LengthGroupedSampler(2, dataset=dataset)


def test_grouping_needs_a_dataset_or_lengths() -> None:
    with pytest.raises(ValueError, match=r"`dataset`.*`lengths`"):
        LengthGroupedSampler(2)


def test_nothing_to_group_is_an_empty_order() -> None:
    assert list(LengthGroupedSampler(2, lengths=[])) == []


SAMPLES = Rows(language_rows(20))
TOKENS = [len(row["input_ids"]) for row in language_rows(20)]


def table(**columns: list[Any]) -> Any:
    import datasets

    return datasets.Dataset.from_list(
        [{**row, **{name: values[n] for name, values in columns.items()}} for n, row in enumerate(language_rows(20))]
    )


@pytest.mark.parametrize(
    ("strategy", "training", "evaluation"),
    [
        ("random", RandomSampler, SequentialSampler),
        ("sequential", SequentialSampler, SequentialSampler),
        ("group_by_length", LengthGroupedSampler, LengthGroupedSampler),
        ("batch_rebalance", BatchRebalanceSampler, SequentialSampler),
    ],
)
def test_a_strategy_chooses_the_samplers_of_training_and_evaluation(
    tmp_path: Path, strategy: str, training: type, evaluation: type
) -> None:
    args = quiet_arguments(tmp_path, train_sampling_strategy=strategy)
    assert type(train_sampler(args, SAMPLES, None)) is training
    assert type(evaluation_sampler(args, SAMPLES, None)) is evaluation


def test_training_samples_are_grouped_for_the_whole_optimizer_step(tmp_path: Path) -> None:
    args = quiet_arguments(tmp_path, train_sampling_strategy="group_by_length", gradient_accumulation_steps=3)
    sampler: Any = train_sampler(args, SAMPLES, None)
    assert (sampler.batch_size, sampler.lengths, sampler.generator) == (12, TOKENS, None)
    assert evaluation_sampler(args, SAMPLES, None).batch_size == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("strategy", ["group_by_length", "batch_rebalance"])
@pytest.mark.parametrize(("column", "expected"), [("length", list(range(20))), ("weight", list(range(20, 0, -1)))])
def test_lengths_are_read_from_the_named_column_of_a_table(
    tmp_path: Path, strategy: str, column: str, expected: list[int]
) -> None:
    dataset = table(length=list(range(20)), weight=list(range(20, 0, -1)))
    args = quiet_arguments(tmp_path, train_sampling_strategy=strategy, length_column_name=column)
    assert train_sampler(args, dataset, None).lengths == expected  # type: ignore[attr-defined]


@pytest.mark.parametrize("strategy", ["group_by_length", "batch_rebalance"])
def test_without_that_column_the_main_input_of_the_processing_class_is_measured(tmp_path: Path, strategy: str) -> None:
    dataset = table(patches=[[0] * (n + 1) for n in range(20)])
    args = quiet_arguments(tmp_path, train_sampling_strategy=strategy)
    processor = SimpleNamespace(model_input_names=["patches", "mask"])
    assert train_sampler(args, dataset, processor).lengths == list(range(1, 21))  # type: ignore[attr-defined]
    assert train_sampler(args, dataset, None).lengths == TOKENS  # type: ignore[attr-defined]


@pytest.mark.parametrize(("data_seed", "seed"), [(None, 42), (3, 3)])
def test_evaluation_in_groups_has_the_same_order_each_time_seeded_by_the_data_seed(
    tmp_path: Path, data_seed: int | None, seed: int
) -> None:
    args = quiet_arguments(tmp_path, train_sampling_strategy="group_by_length", data_seed=data_seed)
    expected = LengthGroupedSampler(3, lengths=TOKENS, generator=torch.Generator().manual_seed(seed))
    assert list(evaluation_sampler(args, SAMPLES, None)) == list(expected)


@pytest.mark.parametrize("strategy", ["group_by_length", "batch_rebalance"])
def test_samples_without_the_main_input_are_refused_when_training_starts(tmp_path: Path, strategy: str) -> None:
    trainer = quiet_trainer(tmp_path, train_sampling_strategy=strategy)
    with pytest.raises(ValueError, match=r"'input_ids'.*the keys x, labels.*train_sampling_strategy"):
        trainer.train()


@pytest.mark.parametrize("stream", [Stream, SizedStream])
def test_a_strategy_that_a_stream_cannot_follow_is_told(
    tmp_path: Path, stream: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "littrainer")
    given = {"train_dataset": stream(vector_rows(8))}
    for strategy in ("random", "group_by_length"):
        quiet_trainer(tmp_path, given=given, max_steps=1, train_sampling_strategy=strategy).train()
    (record,) = [record for record in caplog.records if "train_sampling_strategy" in record.getMessage()]
    assert "'group_by_length'" in record.getMessage()


def test_rebalanced_micro_batches_of_unequal_size_are_trained_on(tmp_path: Path) -> None:
    sizes: list[int] = []

    def collate(rows: list[Any]) -> Any:
        sizes.append(len(rows))
        return pad_tokens(rows)

    quiet_trainer(
        tmp_path,
        model=tiny_gpt2(),
        given={"train_dataset": SAMPLES, "data_collator": collate},
        train_sampling_strategy="batch_rebalance",
        gradient_accumulation_steps=2,
        num_train_epochs=1,
    ).train()
    assert sum(sizes) == len(SAMPLES) and len(set(sizes)) > 1


def test_a_column_of_lengths_that_is_dropped_unread_is_told_and_one_that_is_kept_is_read(tmp_path: Path) -> None:
    lengths = list(range(20))

    def order(**changes: Any) -> list[int]:
        trainer = quiet_trainer(
            tmp_path,
            model=tiny_gpt2(),
            given={"train_dataset": table(length=lengths), "data_collator": pad_tokens},
            train_sampling_strategy="group_by_length",
            **changes,
        )
        return trainer.get_train_dataloader().sampler.lengths

    with pytest.warns(UserWarning, match=r"length_column_name='length' is not read.*remove_unused_columns=False"):
        assert order() == TOKENS
    assert order(remove_unused_columns=False) == lengths


KINDS = ("even", "few lengths", "a few very long ones")


def some_lengths(source: random.Random, kind: str, count: int) -> list[int]:
    if kind == "even":
        return [source.randint(1, 500) for _ in range(count)]
    if kind == "few lengths":
        return [source.choice([5, 50, 51]) for _ in range(count)]
    return [int(source.paretovariate(0.7) * 10) for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dp_size", [1, 2, 3, 5])
@pytest.mark.parametrize("grad_accum", [1, 2, 3, 8])
@pytest.mark.parametrize("drop_last", [False, True])
def test_every_rank_gets_the_micro_batches_that_transformers_gives_it(
    kind: str, dp_size: int, grad_accum: int, drop_last: bool
) -> None:
    source = random.Random(dp_size * 10 + grad_accum)
    for trial in range(8):
        lengths = some_lengths(source, kind, source.randint(1, 60))
        keywords: dict[str, Any] = {
            "effective_batch_size": dp_size * grad_accum * source.randint(1, 5) + source.randint(0, 3),
            "dp_size": dp_size,
            "grad_accum": grad_accum,
            "shuffle": trial % 3 > 0,
            "seed": trial,
            "drop_last": drop_last,
        }
        for rank in range(dp_size):
            theirs = TheirSampler(lengths, rank=rank, **keywords)
            ours = BatchRebalanceSampler(lengths, rank=rank, **keywords)
            for epoch in (0, 1):
                theirs.set_epoch(epoch)
                ours.set_epoch(epoch)
                assert list(ours) == list(theirs)
            assert len(ours) == len(theirs) == len(list(ours))


def cost(samples: list[int], lengths: list[int]) -> float:
    longest = max(lengths[index] for index in samples)
    return len(samples) * (longest + QUADRATIC_COST * longest**2)


def test_each_sample_is_drawn_once_and_micro_batches_of_a_step_cost_about_the_same() -> None:
    source = random.Random(0)
    lengths = [source.randint(10, 400) for _ in range(96)]
    sampler = BatchRebalanceSampler(lengths, effective_batch_size=32, dp_size=1, grad_accum=4)
    batches = list(sampler)
    assert sorted(index for batch in batches for index in batch) == list(range(96))
    assert len({len(batch) for batch in batches}) > 1
    for step in range(3):
        costs = [cost(batch, lengths) for batch in batches[4 * step : 4 * step + 4]]
        assert max(costs) < 1.5 * min(costs)
        assert costs == sorted(costs, reverse=True), "the most expensive micro-batch comes first"


@pytest.mark.parametrize(
    "keywords",
    [
        {"effective_batch_size": 3, "dp_size": 2, "grad_accum": 2},
        {"effective_batch_size": 4, "dp_size": 0, "grad_accum": 2},
        {"effective_batch_size": 4, "dp_size": 1, "grad_accum": 0},
    ],
    ids=str,
)
def test_an_optimizer_step_with_fewer_samples_than_micro_batches_is_refused(keywords: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"effective_batch_size={keywords['effective_batch_size']} .* cannot fill"):
        BatchRebalanceSampler([1, 2, 3, 4], **keywords)
