"""Samples and batches (features, labels) as dicts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from littrainer.data.loaders import has_length

FEATURES, LABELS = "features", "labels"

Sample = Mapping[str, Any]


def split_sample(sample: Any) -> dict[str, Any]:
    if not isinstance(sample, (tuple, list)):
        return {FEATURES: sample}
    if len(sample) != 2:
        raise TypeError(
            f"A sample is a {type(sample).__name__} of {len(sample)}, and TFTrainer takes pairs (features, labels). "
            "Several inputs go into the first as a dict or tuple; sample weights into the loss that run_model returns."
        )
    return {FEATURES: sample[0], LABELS: sample[1]}


class PairDataset(Dataset[Sample]):
    def __init__(self, source: Any):
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        return split_sample(self.source[index])


def to_pair_dataset(source: Any, name: str) -> PairDataset | None:
    if source is None or isinstance(source, PairDataset):
        return source
    if is_tensorflow_dataset(source) and source.cardinality() >= 0:
        return PairDataset(list(source.as_numpy_iterator()))
    is_pair = isinstance(source, (tuple, list)) and len(source) == 2 and all(map(_is_array, source))
    if is_pair or isinstance(source, (str, Mapping)) or not (has_length(source) and hasattr(source, "__getitem__")):
        raise TypeError(
            f"{name} is a {type(source).__name__}{' of two arrays' if is_pair else ''}, not a dataset of samples "
            "with a length. Pass samples (features, labels): a list, a torch dataset such as TensorDataset(features, "
            "labels), or a tf.data.Dataset of known cardinality. Return batches, or data without length, from an "
            "override of get_train_tfdataset or get_eval_tfdataset."
        )
    return PairDataset(source)


def _is_array(value: Any) -> bool:
    return isinstance(value, (np.ndarray, torch.Tensor)) and value.ndim > 0


def is_tensorflow_dataset(source: Any) -> bool:
    """Recognize a tf.data.Dataset without an import."""
    packages = {base.__module__.partition(".")[0] for base in type(source).__mro__}
    return "tensorflow" in packages and hasattr(source, "as_numpy_iterator")


# ---- Batches ---------------------------------------------------------------------------------------------------------


def collate_pairs(samples: Sequence[Sample]) -> dict[str, Any]:
    has_labels = all(sample.get(LABELS) is not None for sample in samples)
    names = (FEATURES, LABELS) if has_labels else (FEATURES,)
    return {name: _stack([to_tensors(sample[name], name) for sample in samples], name) for name in names}


def _stack(values: list[Any], name: str) -> Any:
    if len({_shape(value) for value in values}) > 1:
        shapes = sorted({str(_shape(value)) for value in values})
        raise ValueError(
            f"The {name} of a batch differ in shape or structure: {', '.join(shapes)}. Pad them in the dataset, or "
            "override get_train_tfdataset and get_eval_tfdataset to return padded batches."
        )
    first = values[0]
    if isinstance(first, Mapping):
        return {key: _stack([value[key] for value in values], f"{name}[{key!r}]") for key in first}
    if isinstance(first, tuple):
        return tuple(_stack([value[part] for value in values], f"{name}[{part}]") for part in range(len(first)))
    return torch.stack(values)


def _shape(value: Any) -> Any:
    if isinstance(value, Mapping):
        return frozenset(value)
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else tuple(value.shape)


def to_tensors(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        return {key: to_tensors(part, f"{name}[{key!r}]") for key, part in value.items()}
    if isinstance(value, tuple) and not all(isinstance(part, (int, float, np.generic)) for part in value):
        return tuple(to_tensors(part, name) for part in value)
    try:
        # Includes tensors of TensorFlow and JAX.
        array = value if isinstance(value, torch.Tensor) else np.asarray(value)
    except ValueError as error:
        raise ValueError(f"The {name} hold lists of unequal length: pad them in the dataset ({error}).") from error
    if isinstance(array, np.ndarray):
        if array.dtype.kind not in "biuf":
            raise TypeError(
                f"The {name} hold {value!r:.80}, and a Keras model on torch takes numbers: encode or drop it in the "
                "dataset."
            )
        # torch warns of read-only arrays.
        array = torch.from_numpy(array if array.flags.writeable and array.flags.c_contiguous else array.copy())
    return array.float() if array.dtype == torch.float64 else array


class BatchedPairs:
    def __init__(self, loader: Any):
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return ((batch[FEATURES], batch.get(LABELS)) for batch in self.loader)


class ScriptBatches(IterableDataset[Sample]):
    def __init__(self, source: Any, steps: int | None):
        self.source, self.steps = source, steps

    def __iter__(self) -> Iterator[Sample]:
        items = self.source.as_numpy_iterator() if is_tensorflow_dataset(self.source) else self.source
        for batch in itertools.islice(items, self.steps):
            yield {name: to_tensors(part, name) for name, part in split_sample(batch).items() if part is not None}


class ScriptLoader(DataLoader[Sample]):
    # DataLoader's constructor checks assignments.
    steps: int | None = None
    num_examples: int | None = None

    def __init__(self, batches: Any, steps: int | None, num_examples: int | None):
        super().__init__(ScriptBatches(batches, steps), batch_size=None)
        self.steps, self.num_examples = steps, num_examples

    def __len__(self) -> int:
        if self.steps is None:
            raise TypeError("the number of batches is not known")
        return self.steps


def make_loader(returned: Any, name: str, has_counts: bool = False) -> Any:
    """Return a loader of a `get_*_tfdataset` result."""
    batches, steps, num_examples = returned, None, None
    if has_counts:
        if not isinstance(returned, tuple) or len(returned) != 3:
            raise TypeError(
                f"{name} returned a {type(returned).__name__}, and has to return a tuple: batches (features, labels), "
                "how many of them to read, and the number of samples in them."
            )
        batches, steps, num_examples = returned[0], int(returned[1]), int(returned[2])
    length = len(batches) if has_length(batches) else None
    if isinstance(batches, BatchedPairs) and steps in (None, length):
        return batches.loader
    if is_tensorflow_dataset(batches):
        length = int(batches.cardinality()) if batches.cardinality() >= 0 else None
    elif not hasattr(batches, "__iter__"):
        raise TypeError(f"{name} returned a {type(batches).__name__}, and has to return batches (features, labels).")
    return ScriptLoader(batches, length if steps is None else steps, num_examples)
