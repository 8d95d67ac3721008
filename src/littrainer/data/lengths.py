"""Lengths of the samples of a `datasets.Dataset`, read from its Arrow table: no row is loaded or decoded.

The length of a list stands in the offsets of its column, eight bytes a sample, while decoding all samples takes as long
as an epoch of reading them. What is read is what `len()` of each decoded sample gives; wherever that is not certain
(a transform, a column that is no list, a missing value), nothing is read, and the samples have to be measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Subset

from littrainer.ecosystem import known_classes

# Formats in which a list of `n` values is something of length `n`.
FORMATS = (None, "numpy", "torch")
# The kinds of a column, among the features of `datasets`, whose values are lists; earlier releases also write `[kind]`.
LIST_FEATURES = ("List", "LargeList", "Sequence", "list")

Numbers = np.ndarray
# Takes a chunk of an Arrow column, returns a number for each row; None for a type that has none.
Measure = Callable[[Any], Numbers | None]


def list_lengths(dataset: Any, name: str) -> Numbers | None:
    """How long the lists of a column are, in the order of the dataset's rows; None where its table does not say it.

    A dataset without a row is left to reading too, which says that it is empty.

    Parameters:
        dataset: anything; a `datasets.Dataset`, or torch's `Subset` or `ConcatDataset` of such, may have lengths.
        name: of the column.
    """
    if type(dataset) is Subset:
        return _selected(list_lengths(dataset.dataset, name), dataset.indices)
    if type(dataset) is ConcatDataset:
        parts = [list_lengths(part, name) for part in dataset.datasets]
        return None if any(part is None for part in parts) else np.concatenate(parts)  # type: ignore[arg-type]
    if not _is_shown(dataset, name) or type(dataset.features[name]).__name__ not in LIST_FEATURES:
        return None
    return _by_row(dataset, name, _offsets_apart)


def whole_numbers_of(dataset: Any, name: str) -> Numbers | None:
    """The whole numbers of a column, in the order of the dataset's rows; None where its table has none.

    Parameters:
        dataset: anything; a `datasets.Dataset` may have them.
        name: of the column.
    """
    return _by_row(dataset, name, _whole_numbers) if _is_shown(dataset, name) else None


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


def _by_row(dataset: Any, name: str, measure: Measure) -> Numbers | None:
    if not len(dataset):
        return None
    chunks = [chunk for chunk in dataset.data.column(name).chunks if len(chunk)]
    if dataset._indices is not None:
        return _of_rows(_rows(dataset._indices), chunks, measure)
    parts = [_measured(chunk, measure) for chunk in chunks]
    return None if any(part is None for part in parts) else np.concatenate(parts)  # type: ignore[arg-type]


def _of_rows(rows: Numbers, chunks: list[Any], measure: Measure) -> Numbers | None:
    """The numbers of the rows of a table that `select`, `shuffle` or `filter` has left, in their order."""
    # Chunks without such a row are not looked at: of a large table few may be left.
    order = np.argsort(rows, kind="stable")
    ascending = rows[order]
    found = np.empty(len(rows), dtype=np.int64)
    begin = 0
    for chunk in chunks:
        first, last = np.searchsorted(ascending, (begin, begin + len(chunk)))
        if first < last:
            numbers = _measured(chunk, measure)
            if numbers is None:
                return None
            found[order[first:last]] = numbers[ascending[first:last] - begin]
        begin += len(chunk)
    return found


def _measured(chunk: Any, measure: Measure) -> Numbers | None:
    return None if chunk.null_count else measure(chunk)


def _rows(indices: Any) -> Numbers:
    return indices.column(0).to_numpy().astype(np.int64, copy=False)


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


def _selected(numbers: Numbers | None, indices: Any) -> Numbers | None:
    if numbers is None:
        return None
    chosen = np.asarray(indices)
    is_valid = chosen.ndim == 1 and chosen.dtype.kind in "iu" and len(chosen) > 0
    # An index that is out of range is an error of reading.
    return numbers[chosen] if is_valid and -len(numbers) <= chosen.min() and chosen.max() < len(numbers) else None
