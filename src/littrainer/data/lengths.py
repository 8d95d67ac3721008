"""Lengths of samples, from the Arrow table of a `datasets.Dataset` where it tells them: no row is loaded or decoded.

The length of a list stands in the offsets of its column, eight bytes a sample, while decoding all samples takes as long
as an epoch of reading them. What is read is what `len()` of each decoded sample gives; wherever that is not certain
(a transform, a column that is no list, a missing value), nothing is read, and the samples have to be measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Subset

from littrainer.errors.lazy_isinstance import known_classes

# Formats in which a list of `n` values is something of length `n`.
FORMATS = (None, "numpy", "torch")

Numbers = np.ndarray
# Takes a chunk of an Arrow column, returns a number for each row; None for a type that has none.
Measure = Callable[[Any], Numbers | None]


def sample_lengths(dataset: Any, model_input_name: str | None = None) -> list[int]:
    """The length of each sample's main input.

    Parameters:
        dataset: map-style, with mappings as samples.
        model_input_name: the key whose value is measured; `"input_ids"` by default.

    Those of a `datasets.Dataset` are read from its table, where that tells them.

    Raises:
        ValueError: samples are no mappings, or have no such key.
    """
    name = "input_ids" if model_input_name is None else model_input_name
    in_table = list_lengths(dataset, name)
    if in_table is not None:
        return in_table.tolist()
    # Read twice, as transformers does, so that a dataset that draws random numbers in reading stays in step with it.
    first = dataset[0]
    if not isinstance(first, Mapping) or name not in dataset[0]:
        found = f"the keys {', '.join(map(str, first))}" if isinstance(first, Mapping) else f"a {type(first).__name__}"
        raise ValueError(
            f"Samples are ordered by the length of their {name!r}, and the first one is {found}. Add {name!r} to the "
            "samples, name a column of lengths in length_column_name (a datasets.Dataset), or choose another "
            "train_sampling_strategy."
        )
    # One by one, also where batches of samples could be fetched: samples may be padded to the others of their batch.
    samples = dataset if hasattr(type(dataset), "__iter__") else (dataset[index] for index in range(len(dataset)))
    return [len(sample[name]) for sample in samples]


def whole_numbers(lengths: Any) -> list[int]:
    """Lengths as a list, whatever column, tensor or array they stand in: comparing them one by one has to be fast."""
    if hasattr(lengths, "source") and hasattr(lengths, "column_name"):
        # A column of a `datasets.Dataset`, which decodes each of its values for itself.
        in_table = whole_numbers_of(lengths.source, lengths.column_name)
        lengths = lengths if in_table is None else in_table
    return lengths.tolist() if hasattr(lengths, "tolist") else list(lengths)


def list_lengths(dataset: Any, name: str) -> Numbers | None:
    """How long the lists of a column are, in the order of the dataset's rows; None where its table does not say it.

    Parameters:
        dataset: anything; a `datasets.Dataset`, or torch's `Subset` or `ConcatDataset` of such, may have lengths.
        name: of the column.
    """
    if type(dataset) is Subset:
        numbers, indices = list_lengths(dataset.dataset, name), np.asarray(dataset.indices)
        return None if numbers is None or indices.dtype.kind not in "iu" else numbers[indices]
    if type(dataset) is ConcatDataset:
        return _joined([list_lengths(part, name) for part in dataset.datasets])
    return _by_row(dataset, name, _offsets_apart)


def whole_numbers_of(dataset: Any, name: str) -> Numbers | None:
    """The whole numbers of a column, in the order of the dataset's rows; None where its table has none."""
    return _by_row(dataset, name, _whole_numbers)


def _by_row(dataset: Any, name: str, measure: Measure) -> Numbers | None:
    # A dataset without a row is left to reading, which says that it is empty.
    if not _is_shown(dataset, name) or not len(dataset):
        return None
    chunks = [chunk for chunk in dataset.data.column(name).chunks if len(chunk)]
    numbers = _joined([None if chunk.null_count else measure(chunk) for chunk in chunks])
    if numbers is None or dataset._indices is None:
        return numbers
    return numbers[dataset._indices.column(0).to_numpy()]


def _is_shown(dataset: Any, name: str) -> bool:
    """Whether samples have a column as it stands in the table. A subclass may read otherwise."""
    if type(dataset) not in known_classes("datasets.Dataset") or not hasattr(dataset, "_indices"):
        return False
    shown = dataset.format
    return (
        shown["type"] in FORMATS
        and name in dataset.column_names
        and (name in shown["columns"] or shown["output_all_columns"])
    )


def _joined(parts: list[Numbers | None]) -> Numbers | None:
    return None if any(part is None for part in parts) else np.concatenate(parts)  # type: ignore[arg-type]


def _offsets_apart(chunk: Any) -> Numbers | None:
    import pyarrow as pa
    import pyarrow.compute as compute

    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    if not any(is_kind(chunk.type) for is_kind in kinds):
        return None
    return compute.list_value_length(chunk).to_numpy(zero_copy_only=False)


def _whole_numbers(chunk: Any) -> Numbers | None:
    import pyarrow as pa

    return chunk.to_numpy(zero_copy_only=False) if pa.types.is_integer(chunk.type) else None
