"""What a dataset or a model is, in a few words, with a fingerprint of what it holds.

Reading a row may draw random numbers, download, or decode an image. So no row is asked for: what an object holds is
read instead, which is its attributes, lists, arrays, tensors and Arrow tables; of much data a sample.
"""

from __future__ import annotations

import hashlib
import itertools
import math
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
LONGEST_TEXT, MOST_BYTES, DEEPEST = 4096, 8_000_000, 6
PLAIN = (type(None), bool, int, float, complex)


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
    reading = _Reading()
    reading.add(value)
    return reading.digest.hexdigest()


class _Reading:
    def __init__(self) -> None:
        self.digest, self.bytes_left = hashlib.blake2b(digest_size=6), MOST_BYTES
        self.path: list[int] = []

    def write(self, *values: Any) -> None:
        for value in values:
            content = value if isinstance(value, bytes) else repr(value).encode("utf-8", "backslashreplace")
            self.digest.update(content)
            self.bytes_left -= len(content)

    def add(self, value: Any) -> None:
        if type(value) in PLAIN or isinstance(value, (str, bytes)):
            self.write((len(value), value[:LONGEST_TEXT]) if isinstance(value, (str, bytes)) else value)
            return
        self.write(type(value).__qualname__)
        if self.bytes_left < 0 or len(self.path) > DEEPEST or id(value) in self.path:
            return
        self.path.append(id(value))
        if isinstance(value, torch.Tensor):
            self.write(
                str(value.dtype), tuple(value.shape), _sample(value, MOST_NUMBERS).view(torch.uint8).numpy().tobytes()
            )
        elif isinstance(value, (np.ndarray, np.generic)):
            numbers = np.asarray(value).reshape(-1)[_spread(value.size, MOST_NUMBERS)]
            self.write(str(value.dtype), value.shape, b"" if value.dtype.hasobject else numbers.tobytes())
            self.add_items(numbers.tolist() if value.dtype.hasobject else ())
        elif isinstance(value, (list, tuple)):
            # Not by a method of a subclass.
            kind: Any = list if isinstance(value, list) else tuple
            self.add_items(kind.__getitem__(value, _spread(kind.__len__(value))))
        elif is_a(value, "datasets.Dataset"):
            from datasets.formatting import query_table

            # From the table nothing is decoded and no transform runs.
            for row in range(len(value))[_spread(len(value))]:
                self.add_items(query_table(value.data, row, indices=value._indices).to_pylist())
        else:
            entries = value if isinstance(value, dict) else getattr(value, "__dict__", None)
            # A class has no dict there, and a module or a function holds no data.
            if isinstance(entries, dict) and not isinstance(value, (ModuleType, FunctionType)):
                self.add_items(itertools.chain(*itertools.islice(dict.items(entries), MOST_ITEMS)))
        self.path.pop()

    def add_items(self, items: Any) -> None:
        if isinstance(items, (list, tuple)) and all(type(item) in PLAIN for item in items):
            self.write(items)
            return
        for item in items:
            self.add(item)


def _sample(tensor: torch.Tensor, most: int) -> torch.Tensor:
    """Return numbers that are spread over a tensor, on the CPU; none if it has none here."""
    tensor = tensor.to_local() if is_a(tensor, "sharded tensor") else tensor  # type: ignore[attr-defined]
    if tensor.is_meta or tensor.layout is not torch.strided:
        return torch.empty(0)
    return tensor.detach().reshape(-1)[_spread(tensor.numel(), most)].cpu().contiguous()


def _spread(length: int, most: int = MOST_ITEMS) -> slice:
    return slice(None, None, max(1, math.ceil(length / most)))
