from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from littrainer.keras.data import BatchedPairs, PairDataset, collate_pairs, make_loader, to_pair_dataset, to_tensors


class FakeTensorFlowDataset:
    """A substitute for a tf.data.Dataset."""

    __module__ = "tensorflow.python.data.ops.dataset_ops"

    def __init__(self, items: list[Any], cardinality: int | None = None):
        self.items, self.number = items, len(items) if cardinality is None else cardinality

    def as_numpy_iterator(self) -> Iterator[Any]:
        return iter(self.items)

    def cardinality(self) -> np.ndarray:
        return np.array(self.number)


PAIR = (np.zeros(2, "float32"), 1)


def test_datasets_of_tensorflow_and_torch_are_accepted() -> None:
    dataset = to_pair_dataset(FakeTensorFlowDataset([PAIR, PAIR]), "train_dataset")
    assert isinstance(dataset, PairDataset)
    assert (len(dataset), dataset[1]["labels"]) == (2, 1)
    tensor_pairs = to_pair_dataset(TensorDataset(torch.ones(2, 3), torch.arange(2)), "train_dataset")
    assert tensor_pairs is not None
    assert collate_pairs([tensor_pairs[0], tensor_pairs[1]])["labels"].tolist() == [0, 1]
    with pytest.raises(TypeError, match=r"tuple of 3.*sample weights into the loss that run_model returns"):
        PairDataset([(1, 2, 3)])[0]


@pytest.mark.parametrize(
    "source",
    [
        *(DataLoader([1]), {"train": [PAIR]}, (np.ones((2, 2)), np.ones(2)), "data.csv", 3, iter([PAIR])),
        FakeTensorFlowDataset([PAIR], cardinality=-1),
    ],
    ids=lambda source: type(source).__name__,
)
def test_other_data_than_samples_is_refused_with_advice(source: Any) -> None:
    with pytest.raises(
        TypeError, match=rf"train_dataset is a {type(source).__name__}.*TensorDataset\(features, labels\)"
    ):
        to_pair_dataset(source, "train_dataset")


def test_a_batch_has_the_dicts_and_tuples_of_samples_and_float32() -> None:
    samples = [{"features": {"a": [1.0, 2.0], "b": (np.ones(2), 3), "c": (1, 2)}, "labels": 1} for _ in range(2)]
    batch = collate_pairs(samples)
    assert batch["features"]["a"].dtype == torch.float32
    assert [tuple(part.shape) for part in batch["features"]["b"]] == [(2, 2), (2,)]
    assert batch["features"]["c"].tolist() == [[1, 2], [1, 2]]
    assert batch["labels"].dtype == torch.int64
    assert "labels" not in collate_pairs([{"features": 1.0, "labels": 1}, {"features": 1.0}])
    array = np.arange(3, dtype="float32")
    array.flags.writeable = False
    assert to_tensors(array, "features").tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ([[1, 2], [1]], ValueError, r"features of a batch differ in shape or structure: \(1,\), \(2,\). Pad them"),
        ([[[1], [1, 2]]], ValueError, "lists of unequal length"),
        (["text"], TypeError, "The features hold 'text'"),
        ([{"a": 1}, {"b": 1}], ValueError, "The features of a batch differ in shape or structure"),
        ([(np.ones(1), np.ones(1)), (np.ones(1),)], ValueError, "differ in shape or structure: .*a tuple of 2"),
    ],
)
def test_samples_that_cannot_be_stacked_are_named(values: list[Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        collate_pairs([{"features": value} for value in values])


def test_batches_of_a_script_are_read_up_to_its_number_of_steps() -> None:
    batches = FakeTensorFlowDataset([(np.ones((2, 1)), np.ones(2))] * 5)
    loader = make_loader((batches, 3, 6), "get_eval_tfdataset", has_counts=True)
    assert (len(loader), len(list(loader)), loader.num_examples) == (3, 3, 6)
    assert len(make_loader(batches, "get_train_tfdataset")) == 5
    assert [labels.tolist() for _, labels in BatchedPairs(loader)] == [[1.0, 1.0]] * 3
    with pytest.raises(TypeError, match=r"get_train_tfdataset returned a NoneType.*batches \(features, labels\)"):
        make_loader(None, "get_train_tfdataset")
