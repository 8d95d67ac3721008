"""Samples and batches (features, labels) as the Trainer reads them: dicts with these two names."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from littrainer.data.loaders import has_length

FEATURES, LABELS = "features", "labels"
# Columns that are labels in samples that are dicts, if the arguments name none; the first that is there counts.
LABEL_COLUMNS = ("labels", "label", "label_ids")
# What tf.data.Dataset.cardinality() returns for a dataset without end.
INFINITE = -1
WHAT_TO_PASS = (
    "Pass samples (features, labels): a list, a torch dataset such as TensorDataset(features, labels), a "
    "datasets.Dataset, an iterable, or a tf.data.Dataset."
)

Sample = Mapping[str, Any]
ReadSample = Callable[[Any], Sample]


# ---- Samples ---------------------------------------------------------------------------------------------------------


def reader_of_samples(model: Any, args: Any) -> ReadSample:
    """Return the function that makes `{"features": ..., "labels": ...}` of a sample for a model.

    Parameters:
        model: the Keras model, whose inputs' names choose columns among those of a sample that is a dict.
        args: `label_names` and `remove_unused_columns` count.
    """
    import keras

    # A model that has not been built has no inputs yet.
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
    """Return a sample as `{"features": ..., "labels": ...}`, without labels if it has none.

    Parameters:
        sample: a pair (features, labels); a row of columns, a dict; or features alone.
        label_names: columns that are labels; by default the first of `labels`, `label` and `label_ids` there is.
        input_names: columns to take alone, if the row has some of them.
        takes_one_tensor: one column that is left is the features, and not a dict with it.

    Raises:
        TypeError: a tuple of another length, such as one with sample weights.
        ValueError: a row without any column but labels.
    """
    if isinstance(sample, (tuple, list)):
        if len(sample) != 2:
            raise TypeError(
                f"A sample is a {type(sample).__name__} of {len(sample)}, and TFTrainer takes pairs (features, "
                "labels). Several inputs go into the first as a dict or tuple; sample weights into the loss that "
                "run_model returns."
            )
        return {FEATURES: sample[0], LABELS: sample[1]}
    if not isinstance(sample, Mapping):
        return {FEATURES: sample}
    usual = [name for name in LABEL_COLUMNS if name in sample][:1]
    labels = [name for name in label_names if name in sample] if label_names else usual
    columns = [name for name in sample if name not in labels]
    columns = [name for name in columns if name in input_names] or columns
    if not columns:
        raise ValueError(
            f"A sample has no features: its columns are {', '.join(map(str, sample))}, and "
            f"{', '.join(map(str, labels))} are labels."
        )
    is_tensor = len(columns) == 1 and takes_one_tensor
    parts: dict[str, Any] = {FEATURES: sample[columns[0]] if is_tensor else {name: sample[name] for name in columns}}
    if labels:
        parts[LABELS] = sample[labels[0]] if len(labels) == 1 else {name: sample[name] for name in labels}
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
    """Samples of an iterable, or batches that a script makes itself; read from the start for each epoch.

    Parameters:
        source: gives items when it is iterated over, each time from the first on; may be a tf.data.Dataset.
        read: makes features and labels of an item.
        most: items to read at most; all by default.
    """

    def __init__(self, source: Any, read: ReadSample, most: int | None = None):
        self.source, self.read, self.most = source, read, most

    def __iter__(self) -> Iterator[Sample]:
        items = self.source.as_numpy_iterator() if is_tensorflow_dataset(self.source) else self.source
        return map(self.read, itertools.islice(items, self.most))


def dataset_of_pairs(source: Any, read: ReadSample, name: str) -> Any:
    """Return a dataset as the Trainer takes it; None stays None.

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
        known = source.cardinality() >= 0
        return PairDataset(list(source.as_numpy_iterator()), read) if known else PairStream(source, read)
    is_pair = isinstance(source, (tuple, list)) and len(source) == 2
    are_columns = is_pair and all(isinstance(part, (np.ndarray, torch.Tensor)) and part.ndim > 0 for part in source)
    holds_no_samples = (
        are_columns
        or isinstance(source, (str, Mapping, DataLoader))
        or not (hasattr(source, "__iter__") or hasattr(source, "__getitem__"))
    )
    if holds_no_samples or iter(source) is source:
        raise TypeError(
            f"{name} is a {type(source).__name__}{' of two arrays' if are_columns else ''}, not a dataset of samples "
            f"that each epoch reads from the start. {WHAT_TO_PASS} Batches are what an override of get_train_tfdataset "
            "or get_eval_tfdataset returns."
        )
    is_sequence = has_length(source) and hasattr(source, "__getitem__")
    return PairDataset(source, read) if is_sequence else PairStream(source, read)


def is_tensorflow_dataset(source: Any) -> bool:
    """Return whether an object is a tf.data.Dataset; TensorFlow is not imported for it."""
    is_of_tensorflow = any(base.__module__.partition(".")[0] == "tensorflow" for base in type(source).__mro__)
    return is_of_tensorflow and hasattr(source, "as_numpy_iterator")


def count_samples(dataset: Any, name: str) -> int:
    """Return the number of samples to evaluate on; those of a stream are counted by reading it once.

    Raises:
        ValueError: it has no end.
    """
    if has_length(dataset):
        return len(dataset)
    source = getattr(dataset, "source", dataset)
    if is_tensorflow_dataset(source) and source.cardinality() == INFINITE:
        raise ValueError(f"{name} is a tf.data.Dataset without end: call take(...) on it.")
    return sum(1 for _ in dataset)


# ---- Batches ---------------------------------------------------------------------------------------------------------


def collate_pairs(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return a batch of samples: torch tensors, in dicts and tuples as in the samples; `labels` if all have some.

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
    is_row_of_numbers = isinstance(first, tuple) and all(isinstance(part, (int, float, np.generic)) for part in first)
    if isinstance(first, (Mapping, tuple)) and not is_row_of_numbers:
        names = list(first) if isinstance(first, Mapping) else range(len(first))
        if any(type(value) is not type(first) or len(value) != len(first) for value in values) or (
            isinstance(first, Mapping) and any(value.keys() != first.keys() for value in values)
        ):
            raise ValueError(
                f"The samples of a batch differ in the structure of their {place}: the first one has {list(names)}. "
                "Give all samples the same."
            )
        parts = {name: _stacked([value[name] for value in values], f"{place}[{name!r}]") for name in names}
        return parts if isinstance(first, Mapping) else tuple(parts.values())
    tensors = [as_tensor(value, place) for value in values]
    shapes = sorted({tuple(tensor.shape) for tensor in tensors})
    if len(shapes) > 1:
        raise ValueError(
            f"The {place} of a batch differ in shape: {', '.join(map(str, shapes))}. Pad them in the dataset, or "
            "override get_train_tfdataset and get_eval_tfdataset to return padded batches."
        )
    return torch.stack(tensors)


def as_tensor(value: Any, place: str) -> torch.Tensor:
    """Return a number or array as a tensor; float64, which Python's numbers are, becomes float32, as in Keras.

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


def named_tensors(batch: Any) -> dict[str, Any]:
    """Return a batch (features, labels) that a script makes itself as named torch tensors."""
    return {name: _tensors(part, name) for name, part in named_parts(batch).items() if part is not None}


def _tensors(value: Any, place: str) -> Any:
    if isinstance(value, Mapping):
        return {name: _tensors(part, f"{place}[{name!r}]") for name, part in value.items()}
    return tuple(_tensors(part, place) for part in value) if isinstance(value, tuple) else as_tensor(value, place)


class BatchedPairs:
    """A Trainer's loader as the first edition's methods hand it out: its batches are pairs (features, labels).

    Parameters:
        loader: batches with `features` and, if there are some, `labels`.
    """

    def __init__(self, loader: Any):
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for batch in self.loader:
            yield batch[FEATURES], batch.get(LABELS)


class LoaderOfBatches(DataLoader[Sample]):
    """A loader of batches that a script makes itself.

    Parameters:
        batches: an iterable of (features, labels), or a tf.data.Dataset of batches.
        steps: how many of them are read; None if nobody knows.
        num_examples: samples in them, if they are known.
    """

    # Class attributes, since DataLoader's own constructor watches assignments.
    steps: int | None = None
    num_examples: int | None = None

    def __init__(self, batches: Any, steps: int | None, num_examples: int | None):
        super().__init__(PairStream(batches, named_tensors, steps), batch_size=None)
        self.steps, self.num_examples = steps, num_examples

    def __len__(self) -> int:
        if self.steps is None:
            raise TypeError("the number of batches is not known")
        return self.steps


def loader_of(batches: Any, name: str, steps: int | None = None, num_examples: int | None = None) -> Any:
    """Return what the Trainer goes through for the batches that one of the `get_*_tfdataset` methods returned.

    Parameters:
        batches: what it returned.
        name: the method's, for errors.
        steps: batches to read; by default all.
        num_examples: samples in them.

    Raises:
        TypeError: it cannot be iterated over.
    """
    known = len(batches) if has_length(batches) else None
    if isinstance(batches, BatchedPairs) and steps in (None, known):
        return batches.loader
    if is_tensorflow_dataset(batches):
        known = int(batches.cardinality()) if batches.cardinality() >= 0 else None
    elif not hasattr(batches, "__iter__"):
        raise TypeError(f"{name} returned a {type(batches).__name__}, and has to return batches (features, labels).")
    return LoaderOfBatches(batches, known if steps is None else steps, num_examples)
