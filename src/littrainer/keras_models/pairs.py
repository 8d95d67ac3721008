"""Datasets of (features, labels) pairs, as the Trainer reads them: samples and batches with these two names."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from littrainer.data.loaders import has_length

FEATURES, LABELS = "features", "labels"
# Columns that are labels in samples that are dicts, where the arguments name none; the first that is there counts.
LABEL_COLUMNS = ("labels", "label", "label_ids")
# What tf.data.Dataset.cardinality() returns where there is no end.
INFINITE = -1

Sample = Mapping[str, Any]
ReadSample = Callable[[Any], Sample]


# ---- Samples ---------------------------------------------------------------------------------------------------------


def reader_of_samples(model: Any, args: Any) -> ReadSample:
    """What makes `{"features": ..., "labels": ...}` of a sample for a model; without labels where it has none.

    Parameters:
        model: the Keras model, whose inputs' names choose columns among those of a sample that is a dict.
        args: `label_names` and `remove_unused_columns` count.
    """
    import keras

    # One that has not been built has no inputs yet.
    inputs = (getattr(model, "inputs", None) or []) if model.built else []
    return partial(
        named_parts,
        label_names=tuple(args.label_names or ()),
        input_names=tuple(str(one.name) for one in inputs) if args.remove_unused_columns else (),
        takes_one_tensor=len(inputs) == 1 or isinstance(model, keras.Sequential),
    )


def named_parts(
    sample: Any, label_names: Sequence[str] = (), input_names: Sequence[str] = (), takes_one_tensor: bool = False
) -> dict[str, Any]:
    """A sample as `{"features": ..., "labels": ...}`.

    Parameters:
        sample: a pair (features, labels); a row of columns, a dict; or features alone.
        label_names: columns that are labels; by default the first of `labels`, `label` and `label_ids` there is.
        input_names: columns to take alone, where the row has some of them.
        takes_one_tensor: where one column is left it is the features, and not a dict with it.

    Raises:
        TypeError: a tuple of another length, such as one with sample weights.
        ValueError: a row without any column but labels.
    """
    if isinstance(sample, Mapping):
        return _parts_of_row(sample, label_names, input_names, takes_one_tensor)
    if not isinstance(sample, (tuple, list)):
        return {FEATURES: sample}
    if len(sample) != 2:
        raise TypeError(
            f"A sample is a {type(sample).__name__} of {len(sample)}, and TFTrainer takes pairs (features, labels). "
            "Several inputs go into the first as a dict or tuple; sample weights into the loss that run_model returns."
        )
    return {FEATURES: sample[0], LABELS: sample[1]}


def _parts_of_row(
    row: Mapping[str, Any], label_names: Sequence[str], input_names: Sequence[str], takes_one_tensor: bool
) -> dict[str, Any]:
    usual = [name for name in LABEL_COLUMNS if name in row][:1]
    labels = [name for name in label_names if name in row] if label_names else usual
    columns = [name for name in row if name not in labels]
    columns = [name for name in columns if name in input_names] or columns
    if not columns:
        raise ValueError(
            f"A sample has no features: its columns are {', '.join(map(str, row))}, and "
            f"{', '.join(map(str, labels))} are labels."
        )
    parts: dict[str, Any] = {FEATURES: {name: row[name] for name in columns}}
    if len(columns) == 1 and takes_one_tensor:
        parts[FEATURES] = row[columns[0]]
    if labels:
        parts[LABELS] = row[labels[0]] if len(labels) == 1 else {name: row[name] for name in labels}
    return parts


# ---- Datasets --------------------------------------------------------------------------------------------------------


class PairDataset(Dataset[Sample]):
    """Samples of a sequence or a map-style dataset.

    Parameters:
        source: has a length and items by number.
        read: makes features and labels of an item.
    """

    def __init__(self, source: Any, read: ReadSample):
        self.source, self.read = source, read

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        return self.read(self.source[index])


class PairStream(IterableDataset[Sample]):
    """Samples of an iterable, which is gone through from its start for each epoch.

    Parameters:
        source: gives items when it is iterated over, each time from the first on.
        read: makes features and labels of an item.
    """

    def __init__(self, source: Any, read: ReadSample):
        self.source, self.read = source, read

    def __iter__(self) -> Iterator[Sample]:
        items = self.source.as_numpy_iterator() if is_tensorflow_dataset(self.source) else self.source
        return map(self.read, items)

    def set_epoch(self, epoch: int) -> None:
        """Tell the source which epoch begins, where it wants to know."""
        if callable(getattr(self.source, "set_epoch", None)):
            self.source.set_epoch(epoch)


def dataset_of_pairs(source: Any, read: ReadSample, name: str) -> Any:
    """A dataset as the Trainer takes it; None stays None.

    A tf.data.Dataset that knows its length is read into memory, from where it is shuffled as a whole; one that does
    not is a stream.

    Parameters:
        source: a sequence, a torch or `datasets` dataset, an iterable, or a tf.data.Dataset that is not batched.
        read: makes features and labels of its items.
        name: the argument that it is, for errors.

    Raises:
        TypeError: it is none of these.
    """
    if source is None or isinstance(source, (PairDataset, PairStream)):
        return source
    if is_tensorflow_dataset(source):
        items = list(source.as_numpy_iterator()) if cardinality(source) >= 0 else None
        return PairStream(source, read) if items is None else PairDataset(items, read)
    _refuse_what_holds_no_samples(source, name)
    if has_length(source) and hasattr(source, "__getitem__"):
        return PairDataset(source, read)
    if not hasattr(source, "__iter__"):
        raise TypeError(f"{name} is a {type(source).__name__}. {WHAT_TO_PASS}")
    if iter(source) is source:
        raise TypeError(
            f"{name} is a {type(source).__name__}, which can be gone through once alone, and each epoch begins anew. "
            "Pass list(...) of it, or an object whose __iter__ makes a new one."
        )
    return PairStream(source, read)


WHAT_TO_PASS = (
    "Pass samples (features, labels): a list, a torch dataset such as TensorDataset(features, labels), a "
    "datasets.Dataset, an iterable, or a tf.data.Dataset."
)


def _refuse_what_holds_no_samples(source: Any, name: str) -> None:
    if isinstance(source, DataLoader):
        method = {"train_dataset": "train", "eval_dataset": "eval"}.get(name, "test")
        raise TypeError(
            f"{name} is a DataLoader, and TFTrainer batches samples itself: pass its dataset, or override "
            f"get_{method}_tfdataset() to return batches (features, labels)."
        )
    if isinstance(source, Mapping):
        raise TypeError(
            f"{name} is a dict with {', '.join(map(str, source))}, and TFTrainer takes one dataset. {WHAT_TO_PASS}"
        )
    are_columns = isinstance(source, (tuple, list)) and len(source) == 2 and all(_has_rows(part) for part in source)
    if are_columns or isinstance(source, str):
        raise TypeError(
            f"{name} is a {type(source).__name__}{' of two arrays' if are_columns else ''}, not a dataset of samples. "
            f"{WHAT_TO_PASS}"
        )


def _has_rows(part: Any) -> bool:
    return isinstance(part, (np.ndarray, torch.Tensor)) and part.ndim > 0


def is_tensorflow_dataset(source: Any) -> bool:
    """Whether an object is a tf.data.Dataset; TensorFlow is not imported for it."""
    is_of_tensorflow = any(base.__module__.partition(".")[0] == "tensorflow" for base in type(source).__mro__)
    return is_of_tensorflow and hasattr(source, "as_numpy_iterator")


def cardinality(source: Any) -> int:
    """Items of a tf.data.Dataset; negative where they are without end, or not known."""
    return int(source.cardinality())


def count_samples(dataset: Any, name: str) -> int:
    """Samples of a dataset to evaluate on; those of a stream are counted by reading it once.

    Raises:
        ValueError: it has no end.
    """
    if has_length(dataset):
        return len(dataset)
    source = getattr(dataset, "source", dataset)
    if is_tensorflow_dataset(source) and cardinality(source) == INFINITE:
        raise ValueError(f"{name} is a tf.data.Dataset without end: call take(...) on it.")
    return sum(1 for _ in dataset)


# ---- Batches ---------------------------------------------------------------------------------------------------------


def collate_pairs(samples: Sequence[Sample]) -> dict[str, Any]:
    """A batch of samples: torch tensors, in dicts and tuples as in the samples, `labels` where all of them have some.

    Raises:
        ValueError: the samples differ in shape or structure.
        TypeError: something is neither a number nor an array of numbers.
    """
    batch = {FEATURES: _stacked([sample[FEATURES] for sample in samples], FEATURES)}
    if all(sample.get(LABELS) is not None for sample in samples):
        batch[LABELS] = _stacked([sample[LABELS] for sample in samples], LABELS)
    return batch


def _stacked(values: list[Any], place: str) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        if any(not isinstance(value, Mapping) or value.keys() != first.keys() for value in values):
            raise ValueError(
                f"The samples of a batch differ in the names in {place}: the first one has "
                f"{', '.join(map(str, first))}. Give all samples the same."
            )
        return {name: _stacked([value[name] for value in values], f"{place}[{name!r}]") for name in first}
    if isinstance(first, tuple) and not all(isinstance(part, (int, float, np.generic)) for part in first):
        if any(not isinstance(value, tuple) or len(value) != len(first) for value in values):
            raise ValueError(
                f"The samples of a batch differ in the length of the tuple in {place}: the first one has {len(first)} "
                "entries. Give all samples as many."
            )
        return tuple(_stacked([value[i] for value in values], f"{place}[{i}]") for i in range(len(first)))
    tensors = [as_tensor(value, place) for value in values]
    shapes = sorted({tuple(tensor.shape) for tensor in tensors})
    if len(shapes) > 1:
        raise ValueError(
            f"The {place} of a batch differ in shape: {', '.join(map(str, shapes))}. Pad them in the dataset, or "
            "override get_train_tfdataset and get_eval_tfdataset to return padded batches."
        )
    return torch.stack(tensors)


def as_tensor(value: Any, place: str) -> torch.Tensor:
    """A number or array as a tensor; float64, which Python's numbers are, becomes float32, as Keras has it.

    Raises:
        ValueError: nested lists of unequal length.
        TypeError: it holds text or anything else that is no number.
    """
    try:
        # Tensors of TensorFlow and JAX become arrays too.
        array = value if isinstance(value, torch.Tensor) else np.asarray(value)
    except ValueError as error:
        raise ValueError(f"The {place} hold lists of unequal length: pad them in the dataset ({error}).") from error
    if isinstance(array, np.ndarray):
        if array.dtype.kind not in "biuf":
            raise TypeError(
                f"The {place} hold {value!r:.80}, and a Keras model on torch takes numbers: encode or drop it in the "
                "dataset."
            )
        # torch shares memory with arrays, and warns of those that may not be written to.
        array = torch.from_numpy(array if array.flags.writeable and array.flags.c_contiguous else array.copy())
    return array.float() if array.dtype == torch.float64 else array


def nested_tensors(value: Any, place: str) -> Any:
    """A batch of features or labels from another source as torch tensors."""
    if isinstance(value, Mapping):
        return {name: nested_tensors(part, f"{place}[{name!r}]") for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(nested_tensors(part, place) for part in value)
    return as_tensor(value, place)


class BatchedPairs:
    """A Trainer's loader as the first edition's methods hand it out: its batches are pairs (features, labels).

    Parameters:
        loader: batches with `features` and, where there are some, `labels`.
    """

    def __init__(self, loader: Any):
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for batch in self.loader:
            yield batch[FEATURES], batch.get(LABELS)


class BatchStream(IterableDataset[Sample]):
    """Batches (features, labels) that a script makes itself, as the Trainer takes them.

    Parameters:
        source: an iterable of batches, or a tf.data.Dataset of them.
        most: batches to read at most; all by default.
    """

    def __init__(self, source: Any, most: int | None = None):
        self.source, self.most = source, most

    def __iter__(self) -> Iterator[Sample]:
        items = self.source.as_numpy_iterator() if is_tensorflow_dataset(self.source) else self.source
        for item in itertools.islice(items, self.most):
            parts = named_parts(item)
            yield {name: nested_tensors(part, name) for name, part in parts.items() if part is not None}


class LoaderOfBatches(DataLoader[Sample]):
    """A loader of batches that a script makes itself.

    Parameters:
        batches: the script's batches.
        steps: how many of them are read; None where nobody knows.
        num_examples: samples in them, where they are known.
    """

    # Class attributes, since DataLoader's own constructor watches assignments.
    steps: int | None = None
    num_examples: int | None = None

    def __init__(self, batches: Any, steps: int | None, num_examples: int | None):
        super().__init__(BatchStream(batches, steps), batch_size=None)
        self.steps, self.num_examples = steps, num_examples

    def __len__(self) -> int:
        if self.steps is None:
            raise TypeError("the number of batches is not known")
        return self.steps


def loader_of(batches: Any, name: str, steps: int | None = None, num_examples: int | None = None) -> Any:
    """What the Trainer goes through, for what one of the `get_*_tfdataset` methods returned.

    Parameters:
        batches: what it returned.
        name: the method's, for errors.
        steps: batches to read; by default all.
        num_examples: samples in them.

    Raises:
        TypeError: it cannot be iterated over.
    """
    if isinstance(batches, BatchedPairs) and steps in (None, length_or_none(batches)):
        return batches.loader
    is_of_tensorflow = is_tensorflow_dataset(batches)
    if not hasattr(batches, "__iter__") and not is_of_tensorflow:
        raise TypeError(f"{name} returned a {type(batches).__name__}, and has to return batches (features, labels).")
    if steps is None:
        known = cardinality(batches) if is_of_tensorflow else length_or_none(batches)
        steps = None if known is None or known < 0 else known
    return LoaderOfBatches(batches, steps, num_examples)


def length_or_none(value: Any) -> int | None:
    """The length of what has one."""
    return len(value) if has_length(value) else None


def steps_of(num_examples: int, batch_size: int, drops_last: bool) -> int:
    """Batches in a number of examples."""
    return num_examples // batch_size if drops_last else math.ceil(num_examples / batch_size)
