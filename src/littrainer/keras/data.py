"""Samples and batches (features, labels) as the Trainer reads them: dicts with these two names."""

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
    """Return a pair (features, labels) as `{"features": ..., "labels": ...}`, features alone without labels."""
    if not isinstance(sample, (tuple, list)):
        return {FEATURES: sample}
    if len(sample) != 2:
        raise TypeError(
            f"A sample is a {type(sample).__name__} of {len(sample)}, and TFTrainer takes pairs (features, labels). "
            "Several inputs go into the first as a dict or tuple; sample weights into the loss that run_model returns."
        )
    return {FEATURES: sample[0], LABELS: sample[1]}


class PairDataset(Dataset[Sample]):
    """Samples (features, labels) of a sequence or a map-style dataset, as dicts."""

    def __init__(self, source: Any):
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        return split_sample(self.source[index])


def to_pair_dataset(source: Any, name: str) -> PairDataset | None:
    """Return a sequence, a torch dataset or an unbatched tf.data.Dataset as the Trainer takes it; None stays None."""
    if source is None or isinstance(source, PairDataset):
        return source
    if is_tensorflow_dataset(source) and source.cardinality() >= 0:
        return PairDataset(list(source.as_numpy_iterator()))
    are_columns = isinstance(source, (tuple, list)) and len(source) == 2 and all(map(_is_array, source))
    if are_columns or isinstance(source, (str, Mapping)) or not (has_length(source) and hasattr(source, "__getitem__")):
        raise TypeError(
            f"{name} is a {type(source).__name__}{' of two arrays' if are_columns else ''}, not a dataset of samples "
            "with a length. Pass samples (features, labels): a list, a torch dataset such as TensorDataset(features, "
            "labels), or a tf.data.Dataset of known cardinality. Batches, and what has no length, are what an override "
            "of get_train_tfdataset or get_eval_tfdataset returns."
        )
    return PairDataset(source)


def _is_array(value: Any) -> bool:
    return isinstance(value, (np.ndarray, torch.Tensor)) and value.ndim > 0


def is_tensorflow_dataset(source: Any) -> bool:
    """Return whether an object is a tf.data.Dataset; TensorFlow is not imported for it."""
    is_of_tensorflow = any(base.__module__.partition(".")[0] == "tensorflow" for base in type(source).__mro__)
    return is_of_tensorflow and hasattr(source, "as_numpy_iterator")


# ---- Batches ---------------------------------------------------------------------------------------------------------


def collate_pairs(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return a batch of samples: torch tensors, in dicts and tuples as in the samples; `labels` if all have some."""
    has_labels = all(sample.get(LABELS) is not None for sample in samples)
    names = (FEATURES, LABELS) if has_labels else (FEATURES,)
    return {name: _stack([to_tensors(sample[name], name) for sample in samples], name) for name in names}


def _stack(values: list[Any], place: str) -> Any:
    if len({_shape(value) for value in values}) > 1:
        shapes = sorted({str(_shape(value)) for value in values})
        raise ValueError(
            f"The {place} of a batch differ in shape or structure: {', '.join(shapes)}. Pad them in the dataset, or "
            "override get_train_tfdataset and get_eval_tfdataset to return padded batches."
        )
    first = values[0]
    if isinstance(first, Mapping):
        return {name: _stack([value[name] for value in values], f"{place}[{name!r}]") for name in first}
    if isinstance(first, tuple):
        return tuple(_stack([value[part] for value in values], f"{place}[{part}]") for part in range(len(first)))
    return torch.stack(values)


def _shape(value: Any) -> Any:
    if isinstance(value, Mapping):
        return frozenset(value)
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else tuple(value.shape)


def to_tensors(value: Any, place: str) -> Any:
    """Return numbers and arrays, in dicts and tuples, as tensors; float64, which Python's are, becomes float32."""
    if isinstance(value, Mapping):
        return {name: to_tensors(part, f"{place}[{name!r}]") for name, part in value.items()}
    if isinstance(value, tuple) and not all(isinstance(part, (int, float, np.generic)) for part in value):
        return tuple(to_tensors(part, place) for part in value)
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


class BatchedPairs:
    """A Trainer's loader as the first edition's methods hand it out: its batches are pairs (features, labels)."""

    def __init__(self, loader: Any):
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return ((batch[FEATURES], batch.get(LABELS)) for batch in self.loader)


class ScriptBatches(IterableDataset[Sample]):
    """Batches that a script makes itself, read from the start for each epoch, up to a number of steps."""

    def __init__(self, source: Any, steps: int | None):
        self.source, self.steps = source, steps

    def __iter__(self) -> Iterator[Sample]:
        items = self.source.as_numpy_iterator() if is_tensorflow_dataset(self.source) else self.source
        for batch in itertools.islice(items, self.steps):
            yield {name: to_tensors(part, name) for name, part in split_sample(batch).items() if part is not None}


class ScriptLoader(DataLoader[Sample]):
    """A loader of batches that a script makes itself, with the numbers of batches and samples if they are known."""

    # Class attributes, since DataLoader's own constructor watches assignments.
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
    """Return a loader of what a `get_*_tfdataset` method returned: batches, with `has_counts` their numbers too."""
    batches, steps, num_examples = returned, None, None
    if has_counts:
        if not isinstance(returned, tuple) or len(returned) != 3:
            raise TypeError(
                f"{name} returned a {type(returned).__name__}, and has to return a tuple: batches (features, labels), "
                "how many of them to read, and the number of samples in them."
            )
        batches, steps, num_examples = returned[0], int(returned[1]), int(returned[2])
    known = len(batches) if has_length(batches) else None
    if isinstance(batches, BatchedPairs) and steps in (None, known):
        return batches.loader
    if is_tensorflow_dataset(batches):
        known = int(batches.cardinality()) if batches.cardinality() >= 0 else None
    elif not hasattr(batches, "__iter__"):
        raise TypeError(f"{name} returned a {type(batches).__name__}, and has to return batches (features, labels).")
    return ScriptLoader(batches, known if steps is None else steps, num_examples)
