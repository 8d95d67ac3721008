"""What a dataset or a model is, in a few words, with a fingerprint of what it holds.

Reading a row may draw random numbers, download, or decode an image. So no row is asked for: what an object holds is
read instead, which is its attributes, lists, arrays, tensors and Arrow tables; of much data a sample.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from littrainer.data.loaders import length_of
from littrainer.errors.lazy_isinstance import is_a

# Of each list, table and dict, of each tensor and array, and of each parameter of a model: evenly spread.
MOST_ITEMS, MOST_NUMBERS, MOST_NUMBERS_OF_A_PARAMETER = 1000, 65_536, 64
# Of an image or a text; of all, so that a run begins without delay; and how deeply objects are searched.
LONGEST_TEXT, MOST_BYTES, DEEPEST = 4096, 8_000_000, 7
# What reading an object counts for besides its bytes.
BYTES_OF_AN_OBJECT = 64
PLAIN = {type(None), bool, int, float, complex}


def described(dataset: Any) -> dict[str, Any]:
    """Return a dataset's class, its rows, and a fingerprint of up to 1,000 of them; of a stream the class alone."""
    if isinstance(dataset, IterableDataset) or not hasattr(type(dataset), "__getitem__"):
        return {"class": type(dataset).__name__, "rows": None, "fingerprint": None}
    return {"class": type(dataset).__name__, "rows": length_of(dataset), "fingerprint": fingerprint(dataset)}


def described_model(model: torch.nn.Module) -> dict[str, Any]:
    """Return a model's class, how many parameters it has, and a fingerprint of some numbers of each."""
    parameters = dict(model.named_parameters())
    sample = {name: _sample(parameter, MOST_NUMBERS_OF_A_PARAMETER) for name, parameter in parameters.items()}
    count = sum(parameter.numel() for parameter in parameters.values())
    return {"class": type(model).__name__, "parameters": count, "fingerprint": fingerprint(sample)}


def fingerprint(value: Any) -> str:
    """Return twelve letters that stand for what an object holds."""
    digest, bytes_left = hashlib.blake2b(digest_size=6), MOST_BYTES
    # With how deeply they lie in the object; one that holds itself ends at the deepest.
    waiting: list[tuple[Any, int]] = [(value, 0)]
    while waiting and bytes_left > 0:
        one, depth = waiting.pop()
        content, inner = _content(one)
        if inner:
            if PLAIN.issuperset(map(type, inner)):
                content += repr(inner).encode()
            elif depth < DEEPEST:
                waiting += zip(reversed(inner), itertools.repeat(depth + 1))
        digest.update(content)
        bytes_left -= len(content) + BYTES_OF_AN_OBJECT
    return digest.hexdigest()


def _content(one: Any) -> tuple[bytes, Sequence[Any]]:
    """Return what stands for an object itself, and the objects in it."""
    kind = type(one)
    if kind in PLAIN:
        return repr(one).encode(), ()
    if isinstance(one, (str, bytes)):
        return repr((len(one), one[:LONGEST_TEXT])).encode("utf-8", "backslashreplace"), ()
    name = kind.__qualname__.encode()
    if isinstance(one, torch.Tensor):
        numbers = _sample(one, MOST_NUMBERS).view(torch.uint8).numpy().tobytes()
        return name + f"{one.dtype}{tuple(one.shape)}".encode() + numbers, ()
    if isinstance(one, (np.ndarray, np.generic)):
        array = np.asarray(one).reshape(-1)[_spread(one.size, MOST_NUMBERS)]
        holds_objects = one.dtype.hasobject
        content = name + f"{one.dtype}{one.shape}".encode() + (b"" if holds_objects else array.tobytes())
        return content, array.tolist() if holds_objects else ()
    if isinstance(one, (list, tuple)):
        # Not by a method of a subclass.
        base: Any = list if isinstance(one, list) else tuple
        return name + str(base.__len__(one)).encode(), base.__getitem__(one, _spread(base.__len__(one)))
    if isinstance(one, dict):
        return name, [*itertools.chain(*itertools.islice(dict.items(one), MOST_ITEMS))]
    if is_a(one, "datasets.Dataset"):
        from datasets.formatting import query_table

        # From the table nothing is decoded and no transform runs.
        rows = range(len(one))[_spread(len(one))]
        return name, [item for row in rows for item in query_table(one.data, row, indices=one._indices).to_pylist()]
    entries = getattr(one, "__dict__", None)
    # A class has no dict there, and a module or a function holds no data.
    return name, [entries] if isinstance(entries, dict) and not isinstance(one, (ModuleType, FunctionType)) else ()


def _sample(tensor: torch.Tensor, most: int) -> torch.Tensor:
    """Return numbers that are spread over a tensor, on the CPU; none if it has none here."""
    # A tensor that is split between processes has another class.
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if tensor.is_meta or tensor.layout is not torch.strided:
        return torch.empty(0)
    return tensor.detach().reshape(-1)[_spread(tensor.numel(), most)].cpu().contiguous()


def _spread(length: int, most: int = MOST_ITEMS) -> slice:
    return slice(None, None, max(1, math.ceil(length / most)))
