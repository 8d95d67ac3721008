"""Descriptions of a dataset or a model: class, size, and a fingerprint of the content.

No row is read, since that may draw random numbers, download, or decode an image. The content of an object is the
content of its attributes, lists, arrays, tensors and Arrow tables; of much data a sample.
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

# Rows, or items of one list, table or dict; numbers of one tensor or array: evenly spread.
MOST_ITEMS, MOST_NUMBERS = 1000, 65_536
# Objects at one depth; items, numbers and letters of all of them, so that a run begins without delay; and depths.
MOST_OBJECTS, MOST_AT_A_DEPTH, DEPTHS = 50_000, 4_000_000, 8
PLAIN = {type(None), bool, int, float, complex}
ATTRIBUTES = (*PLAIN, str, bytes)


def fingerprint_dataset(dataset: Any) -> dict[str, Any]:
    """Return a dataset's class and rows, fingerprints of up to 1,000 and of attributes; of a stream the class alone."""
    is_stream = isinstance(dataset, IterableDataset) or not hasattr(type(dataset), "__getitem__")
    rows, rows_held, attributes = (None,) * 3 if is_stream else (get_length(dataset), *fingerprints(dataset))
    return {"class": type(dataset).__name__, "rows": rows, "fingerprint": rows_held, "attributes": attributes}


def fingerprint_model(model: torch.nn.Module) -> dict[str, Any]:
    """Return a model's class, how many parameters it has, and a fingerprint of some numbers of them."""
    parameters = dict(model.named_parameters())
    count = sum(parameter.numel() for parameter in parameters.values() if not is_lazy(parameter))
    return {"class": type(model).__name__, "parameters": count, "fingerprint": fingerprints(parameters)[0]}


def fingerprints(value: Any) -> tuple[str, str]:
    """Return twelve letters that stand for what an object holds, and for texts and numbers in attributes."""
    digests, objects = [hashlib.blake2b(digest_size=6) for _ in range(2)], [value]
    for _ in range(DEPTHS):
        if len(objects) > MOST_OBJECTS:
            # Every so many-th could be the same column of each row.
            objects = random.Random(0).sample(objects, MOST_OBJECTS)
        *contents, objects = _content(objects)
        for digest, content in zip(digests, contents, strict=True):
            digest.update(repr(content).encode("utf-8", "backslashreplace"))
    return digests[0].hexdigest(), digests[1].hexdigest()


def _content(objects: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Return what stands for the objects of one depth, their plain attributes, and the objects in them."""
    attributes: list[Any] = []
    content: list[Any] = []
    inner: list[Any] = []
    share = 1 + MOST_AT_A_DEPTH // (len(objects) or 1)
    # Every second is read of more than this number, every third of more than twice the number.
    many_items, many_numbers = 1 + min(MOST_ITEMS, share), 1 + min(MOST_NUMBERS, share)
    for value in objects:
        kind = type(value)
        own: Any = None
        items: list[Any] = []
        if kind in PLAIN:
            own = value
        elif isinstance(value, (str, bytes)):
            own = len(value), value[:share]
        elif isinstance(value, torch.Tensor):
            own = ()
            # It may be on the meta device, sparse, lazy or quantized.
            with suppress(RuntimeError, ValueError):
                # A tensor that is split between processes has another class.
                local: Any = value.to_local() if hasattr(value, "to_local") else value
                numbers = local.detach().reshape(-1)[:: 1 + local.numel() // many_numbers].cpu().contiguous()
                own = str(value.dtype), tuple(value.shape), numbers.view(torch.uint8).numpy().tobytes()
        elif isinstance(value, (np.ndarray, np.generic)):
            sample = np.asarray(value).reshape(-1)[:: 1 + value.size // many_numbers]
            own = str(value.dtype), value.shape, b"" if value.dtype.hasobject else sample.tobytes()
            items = sample.tolist() if value.dtype.hasobject else []
        elif isinstance(value, (list, tuple)):
            # Not by a method of a subclass.
            base: Any = list if isinstance(value, list) else tuple
            own = base.__len__(value)
            items = [*base.__getitem__(value, slice(None, None, 1 + own // many_items))]
        elif isinstance(value, dict):
            pairs = [*dict.items(value)]
            own, items = len(pairs), [*itertools.chain(*pairs[:: 1 + len(pairs) // many_items])]
        elif is_a(value, "datasets.Dataset"):
            from datasets.formatting import query_table

            # From the table nothing is decoded and no transform runs.
            rows = range(0, len(value), 1 + len(value) // many_items)
            items = [query_table(value.data, rows, indices=value._indices).to_pydict()]
        elif not isinstance(value, (type, ModuleType, FunctionType)):
            # What a class, a module or a function holds is no data.
            held = getattr(value, "__dict__", {}).items()
            # A time or a temporary folder changes no row; a long text is data.
            plain = {name: v for name, v in held if isinstance(v, ATTRIBUTES) and getsizeof(v) < MOST_ITEMS}
            attributes += plain.items()
            items = [{name: inside for name, inside in held if name not in plain}]
        if PLAIN.issuperset(map(type, items)):
            own, items = (own, items), []
        content.append((kind.__qualname__, own))
        inner += items
    return content, attributes, inner
