"""Snapshots of the random number generators of this process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

# Name as in transformers' rng_state.pth -> functions that read and restore the state.
GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "python": (random.getstate, random.setstate),
    # Lambdas, since NumPy imports its generators lazily.
    "numpy": (lambda: np.random.get_state(), lambda state: np.random.set_state(state)),
    "cpu": (torch.random.get_rng_state, torch.random.set_rng_state),
}


def get_rng_states(gpu: bool = True, names: Iterable[str] = GENERATORS) -> dict[str, Any]:
    """Return generator states; reading Python's and NumPy's takes fifty times as long as reading torch's."""
    states = {}
    for name in names:
        states[name] = GENERATORS[name][0]()
    if gpu and torch.cuda.is_available():
        states["cuda"] = torch.cuda.random.get_rng_state()
    return states


def set_rng_states(states: Mapping[str, Any]) -> None:
    for name, (_, restore) in GENERATORS.items():
        if name in states:
            restore(states[name])
    if "cuda" in states and torch.cuda.is_available():
        # With several processes, transformers stores a list with the states of all GPUs of the node.
        if isinstance(states["cuda"], list):
            torch.cuda.random.set_rng_state_all(states["cuda"][: torch.cuda.device_count()])
        else:
            torch.cuda.random.set_rng_state(states["cuda"])


def encode_rng_states(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return states as types that `torch.load(weights_only=True)` accepts."""
    version, keys, gauss = states["python"]
    kind, numpy_keys, position, has_gauss, numpy_gauss = states["numpy"]
    return {
        "torch": states["cpu"],
        # A tensor is stored, since pickling 625 single numbers would take longer than pickling a small model.
        "python": (version, torch.from_numpy(np.array(keys)), gauss),
        "numpy": (
            str(kind),
            torch.from_numpy(numpy_keys.astype(np.int64)),
            int(position),
            int(has_gauss),
            float(numpy_gauss),
        ),
        **({"cuda": states["cuda"]} if "cuda" in states else {}),
    }


def decode_rng_states(portable: Mapping[str, Any]) -> dict[str, Any]:
    # Older checkpoints have a tuple of keys; tensors may have been loaded to a GPU.
    version, keys, gauss = portable["python"]
    keys = keys.cpu() if isinstance(keys, torch.Tensor) else keys
    kind, numpy_keys, *rest = portable["numpy"]
    states = {
        "python": (version, tuple(np.asarray(keys).tolist()), gauss),
        "numpy": (kind, numpy_keys.cpu().numpy().astype(np.uint32), *rest),
        "cpu": portable["torch"].cpu(),
    }
    if "cuda" in portable:
        cuda = portable["cuda"]
        states["cuda"] = cuda.cpu() if isinstance(cuda, torch.Tensor) else cuda
    return states


def find_advanced_generators(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    """Return the names of the generators whose states differ; names that are not in both are ignored."""
    advanced: set[str] = set()
    for name in before.keys() & after.keys():
        earlier, later = before[name], after[name]
        for old, new in zip(earlier, later, strict=True) if isinstance(earlier, tuple) else ((earlier, later),):
            if isinstance(old, torch.Tensor):
                # Comparing tensors would count as a device synchronization.
                old, new = old.numpy(), new.numpy()
            is_array = isinstance(old, np.ndarray)
            if old.tobytes() != new.tobytes() if is_array else old != new:
                advanced.add(name)
    return advanced
