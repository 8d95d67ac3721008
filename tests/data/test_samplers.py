from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
import torch
from torch.utils.data import RandomSampler, SequentialSampler
from transformers.trainer_pt_utils import BatchRebalanceSampler as TheirSampler
from transformers.trainer_pt_utils import LengthGroupedSampler as TheirLengthGroupedSampler
from transformers.trainer_pt_utils import get_length_grouped_indices as theirs_grouped

from littrainer.data.samplers import (
    EpochSeededSampler,
    LengthGroupedSampler,
    compute_sample_lengths,
    get_length_grouped_indices,
    make_evaluation_sampler,
    make_train_sampler,
)
from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, SizedStream, Stream, language_rows, vector_rows
from tests.scenarios.models import tiny_gpt2
from tests.scenarios.trainers import quiet_arguments, quiet_trainer

DATA = range(20)


def test_a_replaced_sampler_keeps_its_settings() -> None:
    generator = torch.Generator()
    replaced = EpochSeededSampler.replace(
        RandomSampler(DATA, replacement=True, num_samples=50, generator=generator), data_seed=1
    )
    assert replaced.replacement and len(replaced) == 50 and replaced.generator is generator
    assert len(set(replaced)) < 50


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


# ---- Lengths of samples ----------------------------------------------------------------------------------------------


TOKEN_LISTS = [[0] * length for length in (3, 50, 7, 0, 12, 1, 30, 29, 8, 8, 8, 40, 2, 19, 5, 6, 11, 13, 4, 22)]


def table(samples: list[Any] = TOKEN_LISTS, kind: Any = None) -> Any:
    columns = {
        "input_ids": pa.array(samples, kind or pa.list_(pa.int64())),
        "length": [len(sample or ()) for sample in samples],
    }
    return datasets.Dataset(datasets.table.InMemoryTable(pa.table(columns)))


def load_from_disk(folder: Path) -> Any:
    table().save_to_disk(folder / "table", num_shards=3)
    return datasets.load_from_disk(str(folder / "table")).shuffle(seed=3)


@pytest.fixture
def rows_decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of Arrow rows that `datasets` decodes in each call."""
    counts: list[int] = []
    real = datasets.arrow_dataset.format_table

    def count_rows(table: Any, *args: Any, formatter: Any, **kwargs: Any) -> Any:
        if not isinstance(formatter, datasets.formatting.ArrowFormatter):
            counts.append(len(table))
        return real(table, *args, formatter=formatter, **kwargs)

    monkeypatch.setattr(datasets.arrow_dataset, "format_table", count_rows)
    return counts


TABLES: dict[str, Callable[[Path], Any]] = {
    "as it is": lambda _: table(),
    "from disk, shuffled": load_from_disk,
    "large lists": lambda _: table(kind=pa.large_list(pa.int32())),
    "lists of one length": lambda _: table([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int64(), 2)).select([2, 0]),
    "NumPy's arrays": lambda _: table().shuffle(seed=5).with_format("numpy"),
    "tensors of one column": lambda _: table().with_format("torch", columns=["input_ids"]),
    "a column that the format leaves out": lambda _: table().with_format(
        "torch", columns=["length"], output_all_columns=True
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_lengths_are_read_from_the_table_and_are_those_of_the_samples(
    tmp_path: Path, rows_decoded: list[int], name: str
) -> None:
    dataset = TABLES[name](tmp_path)
    theirs = TheirLengthGroupedSampler(2, dataset=dataset).lengths
    rows_decoded.clear()
    assert compute_sample_lengths(dataset) == theirs
    assert rows_decoded == []


def transformed(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "input_ids": [[*row, 0] for row in batch["input_ids"]]}


class LongerRows(datasets.Dataset):
    """Dataset whose rows differ from its table."""

    def __iter__(self) -> Any:
        return ({**row, "input_ids": [*row["input_ids"], 0]} for row in super().__iter__())


MEASURED: dict[str, Callable[[], Any]] = {
    "a transform": lambda: table().with_transform(transformed),
    "a class of the script's own": lambda: LongerRows(table().data),
    "texts": lambda: table(["word", "", "another"], pa.string()),
    "mappings": lambda: table([{"a": 1, "b": 2}], pa.struct({"a": pa.int64(), "b": pa.int64()})),
    "samples in Python": lambda: [{"input_ids": [1, 2]}, {"input_ids": []}],
}


@pytest.mark.parametrize("name", MEASURED)
def test_samples_are_measured_if_the_table_does_not_define_them(name: str) -> None:
    dataset = MEASURED[name]()
    assert compute_sample_lengths(dataset) == TheirLengthGroupedSampler(2, dataset=dataset).lengths


@pytest.mark.parametrize(
    ("dataset", "error", "words"),
    [
        (table([[1], None, [2, 3]]), TypeError, "NoneType"),
        (table().select([]), IndexError, ""),
        (table().remove_columns("input_ids"), ValueError, "'input_ids'"),
        (table().with_format("torch", columns=["length"]), ValueError, "'input_ids'"),
    ],
    ids=["a missing value", "no rows", "no such column", "a column that is not shown"],
)
def test_samples_that_cannot_be_measured_raise_the_error_of_reading(
    dataset: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        compute_sample_lengths(dataset)


@pytest.mark.parametrize("strategy", ["group_by_length", "batch_rebalance"])
def test_the_named_column_of_lengths_is_read_in_a_single_call(
    tmp_path: Path, rows_decoded: list[int], strategy: str
) -> None:
    dataset = load_from_disk(tmp_path).rename_column("length", "weight")
    args = quiet_arguments(tmp_path, train_sampling_strategy=strategy, length_column_name="weight")
    rows_decoded.clear()
    lengths = make_train_sampler(args, dataset, None).lengths  # type: ignore[attr-defined]
    assert rows_decoded == [len(dataset)]
    assert all(type(length) is int for length in lengths)
    assert lengths == [int(row["weight"]) for row in dataset]
