from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from transformers.trainer_pt_utils import LengthGroupedSampler as TheirLengthGroupedSampler

from littrainer.data.samplers import compute_sample_lengths, make_train_sampler
from tests.scenarios.trainers import quiet_arguments

SAMPLES = [[0] * length for length in (3, 50, 7, 0, 12, 1, 30, 29, 8, 8, 8, 40, 2, 19, 5, 6, 11, 13, 4, 22)]


def table(samples: list[Any] = SAMPLES, kind: Any = None) -> Any:
    columns = {
        "input_ids": pa.array(samples, kind or pa.list_(pa.int64())),
        "length": [len(sample or ()) for sample in samples],
    }
    return datasets.Dataset(datasets.table.InMemoryTable(pa.table(columns)))


def load_from_disk(folder: Path) -> Any:
    table().save_to_disk(folder / "table", num_shards=3)
    return datasets.load_from_disk(str(folder / "table")).shuffle(seed=3)


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
@pytest.mark.parametrize("column", ["length", "weight"])
def test_the_named_column_of_lengths_is_read_in_a_single_call(
    tmp_path: Path, rows_decoded: list[int], strategy: str, column: str
) -> None:
    dataset = load_from_disk(tmp_path).rename_column("length", column)
    args = quiet_arguments(tmp_path, train_sampling_strategy=strategy, length_column_name=column)
    rows_decoded.clear()
    lengths = make_train_sampler(args, dataset, None).lengths  # type: ignore[attr-defined]
    assert rows_decoded == [len(dataset)]
    assert all(type(length) is int for length in lengths)
    assert lengths == [int(row[column]) for row in dataset]
