from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset
from transformers.trainer_pt_utils import LengthGroupedSampler as TheirLengthGroupedSampler

from littrainer.data.lengths import list_lengths, sample_lengths, whole_numbers_of
from littrainer.data.samplers import LengthGroupedSampler, train_sampler
from tests.scenarios.trainers import quiet_arguments

SAMPLES = [[0] * length for length in (3, 50, 7, 0, 12, 1, 30, 29, 8, 8, 8, 40, 2, 19, 5, 6, 11, 13, 4, 22)]


def table(samples: list[Any] = SAMPLES, kind: Any = None) -> Any:
    columns = {
        "input_ids": pa.array(samples, kind or pa.list_(pa.int64())),
        "length": [len(one or ()) for one in samples],
    }
    return datasets.Dataset(datasets.table.InMemoryTable(pa.table(columns)))


def in_chunks() -> Any:
    whole = table().data.table
    pieces = [whole.slice(0, 3), whole.slice(3, 0), whole.slice(3, 11), whole.slice(14)]
    return datasets.Dataset(datasets.table.InMemoryTable(pa.concat_tables(pieces)))


def from_disk(folder: Path) -> Any:
    table().save_to_disk(folder / "table", num_shards=3)
    return datasets.load_from_disk(str(folder / "table"))


NESTED = [[[1, 2], [3]], [], [[4]]]
TABLES: dict[str, Callable[[Path], Any]] = {
    "as it is": lambda _: table(),
    "in chunks": lambda _: in_chunks(),
    "chunks shuffled": lambda _: in_chunks().shuffle(seed=3),
    "from disk": from_disk,
    "from disk, shuffled": lambda folder: from_disk(folder).shuffle(seed=3),
    "a range selected": lambda _: table().select(range(4, 13)),
    "rows selected, some twice": lambda _: table().select([7, 1, 1, 18, 0]),
    "shuffled and a shard of it": lambda _: table().shuffle(seed=1).shard(3, 1),
    "filtered": lambda _: table().filter(lambda row: row["length"] > 7),
    "one half of a split": lambda _: table().train_test_split(0.4, seed=2)["train"],
    "concatenated": lambda _: datasets.concatenate_datasets([table(), in_chunks()]),
    "concatenated with shuffled ones": lambda _: datasets.concatenate_datasets([table().shuffle(seed=4), table()]),
    "a sliced array": lambda _: datasets.Dataset(datasets.table.InMemoryTable(table().data.table.slice(5, 9))),
    "large lists": lambda _: table(kind=pa.large_list(pa.int32())),
    "lists of one length": lambda _: table([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int64(), 2)).select([2, 0]),
    "lists of lists": lambda _: table(NESTED, pa.list_(pa.list_(pa.int64()))),
    "lists of texts": lambda _: table([["a"], ["b", "c"]], pa.list_(pa.string())),
    "NumPy's arrays": lambda _: table().shuffle(seed=5).with_format("numpy"),
    "tensors": lambda _: table().with_format("torch"),
    "tensors of one column": lambda _: table().with_format("torch", columns=["input_ids"]),
    "a column that the format leaves out": lambda _: table().with_format(
        "torch", columns=["length"], output_all_columns=True
    ),
    "without other columns": lambda _: table().shuffle(seed=5).remove_columns("length"),
    "torch's subset": lambda _: Subset(table().shuffle(seed=5), [3, 11, 2, -1]),
    "torch's concatenation": lambda _: ConcatDataset([table(), Subset(in_chunks(), range(4))]),
}


@pytest.mark.parametrize("name", TABLES)
def test_lengths_are_read_from_the_table_and_are_those_of_the_samples(
    tmp_path: Path, rows_decoded: list[int], name: str
) -> None:
    dataset = TABLES[name](tmp_path)
    expected = [len(dataset[index]["input_ids"]) for index in range(len(dataset))]
    rows_decoded.clear()
    assert sample_lengths(dataset) == expected
    assert rows_decoded == []


@pytest.mark.parametrize("name", ["as it is", "from disk, shuffled", "tensors", "torch's concatenation"])
def test_the_order_is_transformers(tmp_path: Path, name: str) -> None:
    dataset = TABLES[name](tmp_path)
    ours, theirs = (
        list(kind(2, dataset=dataset, generator=torch.Generator().manual_seed(7)))
        for kind in (LengthGroupedSampler, TheirLengthGroupedSampler)
    )
    assert ours == theirs


def transformed(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "input_ids": [[*row, 0] for row in batch["input_ids"]]}


class OneLonger(datasets.Dataset):
    """Reads otherwise than its table stands."""

    def __iter__(self) -> Any:
        return ({**row, "input_ids": [*row["input_ids"], 0]} for row in super().__iter__())


UNCERTAIN: dict[str, Callable[[], Any]] = {
    "a transform": lambda: table().with_transform(transformed),
    "a class of the script's own": lambda: OneLonger(table().data),
    "texts": lambda: table(["word", "", "another"], pa.string()),
    "mappings": lambda: table([{"a": 1, "b": 2}], pa.struct({"a": pa.int64(), "b": pa.int64()})),
    "a subset of a transform": lambda: Subset(table().with_transform(transformed), [4, 2]),
    "samples in Python": lambda: [{"input_ids": [1, 2]}, {"input_ids": []}],
}


@pytest.mark.parametrize("name", UNCERTAIN)
def test_where_a_table_does_not_tell_lengths_the_samples_are_measured(name: str) -> None:
    dataset = UNCERTAIN[name]()
    assert list_lengths(dataset, "input_ids") is None
    theirs = TheirLengthGroupedSampler(2, dataset=dataset).lengths
    assert sample_lengths(dataset) == theirs


def test_a_missing_value_is_the_error_of_measuring_it_only_where_it_is_read() -> None:
    holed = table([[1], None, [2, 3]])
    with pytest.raises(TypeError, match="NoneType"):
        sample_lengths(holed)
    assert sample_lengths(holed.select([2, 0])) == [2, 1]


@pytest.mark.parametrize(
    "dataset", [table().remove_columns("input_ids"), table().with_format("torch", columns=["length"])]
)
def test_a_column_that_samples_do_not_have_is_asked_for_by_name(dataset: Any) -> None:
    with pytest.raises(ValueError, match="'input_ids'"):
        sample_lengths(dataset)


@pytest.mark.parametrize("name", ["as it is", "from disk, shuffled", "NumPy's arrays", "tensors"])
def test_a_column_of_lengths_is_read_without_its_samples(tmp_path: Path, rows_decoded: list[int], name: str) -> None:
    dataset = TABLES[name](tmp_path)
    args = quiet_arguments(tmp_path, train_sampling_strategy="group_by_length")
    rows_decoded.clear()
    lengths = train_sampler(args, dataset, None).lengths  # type: ignore[attr-defined]
    assert all(type(length) is int for length in lengths)
    assert LengthGroupedSampler(2, lengths=dataset["length"]).lengths == lengths
    assert rows_decoded == []
    assert lengths == [int(row["length"]) for row in dataset]


def test_a_column_that_holds_no_whole_numbers_is_read_value_by_value() -> None:
    halves = datasets.Dataset.from_dict({"input_ids": [[1], [2]], "length": [2.5, 1.5]})
    assert whole_numbers_of(halves, "length") is None
    assert LengthGroupedSampler(2, lengths=halves["length"]).lengths == [2.5, 1.5]


def test_a_table_without_rows_is_the_error_of_reading_its_first_one() -> None:
    dataset = table().shuffle(seed=1).select([])
    assert list_lengths(dataset, "input_ids") is None
    for kind in (LengthGroupedSampler, TheirLengthGroupedSampler):
        with pytest.raises(IndexError):
            kind(2, dataset=dataset)


class DrawsByBatches(Dataset[Any]):
    """Samples of random length, for which a batch draws otherwise than its samples one by one."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        if index >= len(self):
            raise IndexError
        return {"input_ids": [0] * int(torch.randint(1, 50, ()))}

    def __getitems__(self, indices: list[int]) -> Any:
        return [{"input_ids": [0] * int(length)} for length in torch.randint(1, 9, (len(indices),))]


def test_samples_are_measured_one_by_one_also_where_batches_could_be_fetched() -> None:
    found = []
    for kind in (LengthGroupedSampler, TheirLengthGroupedSampler):
        torch.manual_seed(0)
        found.append((kind(2, dataset=DrawsByBatches()).lengths, torch.rand(1).item()))
    assert found[0] == found[1]
    assert len(set(found[0][0])) > 4
