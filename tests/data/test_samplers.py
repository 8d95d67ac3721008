from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch.utils.data import RandomSampler, SequentialSampler
from transformers.trainer_pt_utils import BatchRebalanceSampler as TheirSampler
from transformers.trainer_pt_utils import get_length_grouped_indices as theirs_grouped

from littrainer.data.samplers import (
    EpochSeededSampler,
    LengthGroupedSampler,
    get_length_grouped_indices,
    make_evaluation_sampler,
    make_train_sampler,
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


def test_a_replaced_sampler_keeps_its_settings() -> None:
    generator = torch.Generator()
    replaced = EpochSeededSampler.replace(
        RandomSampler(DATA, replacement=True, num_samples=50, generator=generator), data_seed=1
    )
    assert replaced.replacement and len(replaced) == 50 and replaced.generator is generator
    assert len(set(order(replaced))) < 50


LENGTHS = [3, 50, 7, 7, 12, 1, 30, 29, 8, 8, 8, 40, 2, 19, 5, 6, 11, 13, 4, 22, 50, 9]


class Measured:
    """Mappings with inputs of given lengths."""

    def __init__(self, lengths: list[int], name: str = "input_ids") -> None:
        self.lengths, self.name = lengths, name

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {self.name: [0] * self.lengths[index]}


@pytest.mark.parametrize("count", [1, 5, 22])
@pytest.mark.parametrize("batch_size", [1, 3, 64])
@pytest.mark.parametrize("mega_batch_mult", [None, 3])
def test_samples_of_similar_length_are_grouped_as_transformers_groups_them(
    count: int, batch_size: int, mega_batch_mult: int | None
) -> None:
    orders = []
    for group in (theirs_grouped, get_length_grouped_indices):
        generator = torch.Generator().manual_seed(count)
        orders.append(group(LENGTHS[:count], batch_size, mega_batch_mult, generator=generator))
    assert orders[0] == orders[1] and sorted(orders[1]) == list(range(count))


@pytest.mark.parametrize(
    ("dataset", "content"), [([[1, 2]], "a list"), (Measured([1], "pixels"), "the keys pixels")], ids=["list", "keys"]
)
def test_samples_without_length_are_refused_with_advice(dataset: Any, content: str) -> None:
    with pytest.raises(ValueError, match=rf"'input_ids'.*{content}.*length_column_name"):
        LengthGroupedSampler(2, dataset=dataset)


def test_grouping_needs_a_dataset_or_lengths() -> None:
    with pytest.raises(ValueError, match=r"`dataset`.*`lengths`"):
        LengthGroupedSampler(2)


SAMPLES = Rows(language_rows(20))
TOKENS = [len(row["input_ids"]) for row in language_rows(20)]


@pytest.mark.parametrize(
    ("strategy", "training", "evaluation"),
    [
        ("random", RandomSampler, SequentialSampler),
        ("sequential", SequentialSampler, SequentialSampler),
        ("group_by_length", LengthGroupedSampler, LengthGroupedSampler),
        ("batch_rebalance", TheirSampler, SequentialSampler),
    ],
)
def test_a_strategy_chooses_the_samplers_of_training_and_evaluation(
    tmp_path: Path, strategy: str, training: type, evaluation: type
) -> None:
    args = quiet_arguments(tmp_path, train_sampling_strategy=strategy)
    assert type(make_train_sampler(args, SAMPLES, None)) is training
    assert type(make_evaluation_sampler(args, SAMPLES, None)) is evaluation


@pytest.mark.parametrize("stream", [Stream, SizedStream])
def test_a_length_strategy_without_effect_on_a_stream_is_warned_about(
    tmp_path: Path, stream: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "littrainer")
    keywords = {"train_dataset": stream(vector_rows(8))}
    for strategy in ("random", "group_by_length"):
        quiet_trainer(tmp_path, trainer_kwargs=keywords, max_steps=1, train_sampling_strategy=strategy).train()
    (record,) = [record for record in caplog.records if "train_sampling_strategy" in record.getMessage()]
    assert "'group_by_length'" in record.getMessage()


def test_a_dropped_length_column_is_warned_about_and_a_kept_column_is_read(tmp_path: Path) -> None:
    lengths = list(range(20))
    dataset = datasets.Dataset.from_list([{**row, "length": number} for number, row in enumerate(language_rows(20))])

    def order(**changes: Any) -> list[int]:
        trainer = quiet_trainer(
            tmp_path,
            model=tiny_gpt2(),
            trainer_kwargs={"train_dataset": dataset, "data_collator": pad_tokens},
            train_sampling_strategy="group_by_length",
            **changes,
        )
        return trainer.get_train_dataloader().sampler.lengths

    with pytest.warns(UserWarning, match=r"length_column_name='length' is not read.*remove_unused_columns=False"):
        assert order() == TOKENS
    assert order(remove_unused_columns=False) == lengths
