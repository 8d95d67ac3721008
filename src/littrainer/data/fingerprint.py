"""Fingerprints of datasets and models: class, size, and a hash of the content.

No row is read, since `__getitem__` may draw random numbers, download or decode. Large content is sampled.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Sequence
from contextlib import suppress
from sys import getsizeof
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.utils.data import IterableDataset

from littrainer.data.loaders import get_length
from littrainer.runtime.lazy_isinstance import is_a

# Evenly spaced rows of a table, items of a container, and numbers of a tensor or array.
MAX_ITEMS = 1000
MAX_NUMBERS = 65_536
# Objects at each depth, and all their items, numbers and characters; limits the delay of a start.
MAX_OBJECTS = 50_000
MAX_SIZE_PER_DEPTH = 4_000_000
MAX_DEPTH = 8
PLAIN = {type(None), bool, int, float, complex}
ATTRIBUTES = (*PLAIN, str, bytes)


def fingerprint_dataset(dataset: Any) -> dict[str, Any]:
    is_stream = isinstance(dataset, IterableDataset) or not hasattr(type(dataset), "__getitem__")
    rows, content, attributes = (None,) * 3 if is_stream else (get_length(dataset), *compute_fingerprints(dataset))
    return {"class": type(dataset).__name__, "rows": rows, "fingerprint": content, "attributes": attributes}


def fingerprint_model(model: torch.nn.Module) -> dict[str, Any]:
    parameters = dict(model.named_parameters())
    count = sum([parameter.numel() for parameter in parameters.values() if not is_lazy(parameter)])
    return {"class": type(model).__name__, "parameters": count, "fingerprint": compute_fingerprints(parameters)[0]}


def compute_fingerprints(value: Any) -> tuple[str, str]:
    """Return hashes of an object's content and of its short plain attributes."""
    digests = hashlib.blake2b(digest_size=6), hashlib.blake2b(digest_size=6)
    objects = [value]
    for _ in range(MAX_DEPTH):
        if len(objects) > MAX_OBJECTS:
            # Random, since evenly spaced objects could be the same column of each row.
            objects = random.Random(0).sample(objects, MAX_OBJECTS)
        *contents, objects = _extract_content(objects) if objects else ([], [], [])
        for digest, content in zip(digests, contents, strict=True):
            digest.update(repr(content).encode("utf-8", "backslashreplace"))
    return digests[0].hexdigest(), digests[1].hexdigest()


def _extract_content(objects: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    attributes: list[Any] = []
    content: list[Any] = []
    inner: list[Any] = []
    max_size = 1 + MAX_SIZE_PER_DEPTH // (len(objects) or 1)
    max_items, max_numbers = 1 + min(MAX_ITEMS, max_size), 1 + min(MAX_NUMBERS, max_size)
    for value in objects:
        kind = type(value)
        summary: Any = None
        items: list[Any] = []
        if kind in PLAIN:
            summary = value
        elif isinstance(value, (str, bytes)):
            summary = len(value), value[:max_size]
        elif isinstance(value, torch.Tensor):
            summary = ()
            # Meta, sparse, lazy and quantized tensors have no readable numbers.
            with suppress(RuntimeError, ValueError):
                local: Any = value.to_local() if hasattr(value, "to_local") else value
                numbers = local.detach().reshape(-1)[:: 1 + local.numel() // max_numbers].cpu().contiguous()
                summary = str(value.dtype), tuple(value.shape), numbers.view(torch.uint8).numpy().tobytes()
        elif isinstance(value, (np.ndarray, np.generic)):
            sample = np.asarray(value).reshape(-1)[:: 1 + value.size // max_numbers]
            summary = str(value.dtype), value.shape, b"" if value.dtype.hasobject else sample.tobytes()
            items = sample.tolist() if value.dtype.hasobject else []
        elif isinstance(value, (list, tuple)):
            # A subclass may override these methods.
            base: Any = list if isinstance(value, list) else tuple
            summary = base.__len__(value)
            items = [*base.__getitem__(value, slice(None, None, 1 + summary // max_items))]
        elif isinstance(value, dict):
            pairs = [*dict.items(value)]
            summary = len(pairs)
            items = [*itertools.chain(*pairs[:: 1 + len(pairs) // max_items])]
        elif is_a(value, "datasets.Dataset"):
            from datasets.formatting import query_table

            # Reading the table decodes nothing and runs no transform.
            rows = range(0, len(value), 1 + len(value) // max_items)
            items = [query_table(value.data, rows, indices=value._indices).to_pydict()]
        elif not isinstance(value, (type, ModuleType, FunctionType)):
            entries = getattr(value, "__dict__", {}).items()
            # Short attributes, such as a time or a temporary folder, are no data; a long text is.
            plain = {name: entry for name, entry in entries if isinstance(entry, ATTRIBUTES) and _is_short(entry)}
            attributes += plain.items()
            items = [{name: entry for name, entry in entries if name not in plain}]
        if PLAIN.issuperset(map(type, items)):
            summary, items = (summary, items), []
        content.append((kind.__qualname__, summary))
        inner += items
    return content, attributes, inner


def _is_short(attribute: Any) -> bool:
    return getsizeof(attribute) < MAX_ITEMS
