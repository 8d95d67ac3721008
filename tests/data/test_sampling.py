from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import RandomSampler, SequentialSampler

from littrainer.data.samplers import BatchRebalanceSampler, LengthGroupedSampler, evaluation_sampler, train_sampler
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, SizedStream, Stream, language_rows, vector_rows
from tests.scenarios.models import tiny_gpt2
from tests.scenarios.trainers import quiet_arguments, quiet_trainer

DATA = Rows(language_rows(20))
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
    assert type(train_sampler(args, DATA, None)) is training
    assert type(evaluation_sampler(args, DATA, None)) is evaluation


def test_training_samples_are_grouped_for_the_whole_optimizer_step(tmp_path: Path) -> None:
    args = quiet_arguments(tmp_path, train_sampling_strategy="group_by_length", gradient_accumulation_steps=3)
    sampler: Any = train_sampler(args, DATA, None)
    assert (sampler.batch_size, sampler.lengths, sampler.generator) == (12, TOKENS, None)
    assert evaluation_sampler(args, DATA, None).batch_size == 3  # type: ignore[attr-defined]


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
    assert list(evaluation_sampler(args, DATA, None)) == list(expected)


def test_batches_are_rebalanced_within_an_optimizer_step_and_the_last_one_kept_or_dropped(tmp_path: Path) -> None:
    settings = {"train_sampling_strategy": "batch_rebalance", "gradient_accumulation_steps": 3}
    kept: Any = train_sampler(quiet_arguments(tmp_path, **settings), DATA, None)
    dropped: Any = train_sampler(quiet_arguments(tmp_path, dataloader_drop_last=True, **settings), DATA, None)
    assert (kept.effective_batch_size, kept.dp_size, kept.grad_accum, kept.rank) == (12, 1, 3, 0)
    assert (len(kept), len(dropped)) == (6, 3)


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
        given={"train_dataset": DATA, "data_collator": collate},
        train_sampling_strategy="batch_rebalance",
        gradient_accumulation_steps=2,
        num_train_epochs=1,
    ).train()
    assert sum(sizes) == len(DATA) and len(set(sizes)) > 1


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
