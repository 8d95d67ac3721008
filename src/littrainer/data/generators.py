"""Where the random number generators of the host stand: what reading and collating samples draws from."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

# Generator's name -> its state, in tensors, numbers, texts and tuples only, so that it can be saved and loaded safely.
HostStates = dict[str, Any]


def host_states(python: bool = True, numpy: bool = True) -> HostStates:
    """The states of torch's, Python's and NumPy's global generators.

    Parameters:
        python, numpy: whether to read these, which takes fifty times as long as reading torch's.
    """
    states: HostStates = {"torch": torch.random.get_rng_state()}
    if python:
        states["python"] = random.getstate()
    if numpy:
        states["numpy"] = plain_numpy_state(np.random.get_state(legacy=True))
    return states


def plain_numpy_state(state: Any) -> tuple[Any, ...]:
    """What NumPy's `get_state` returns, with a tensor in the place of its array."""
    kind, keys, position, has_gauss, gauss = state
    return str(kind), torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(gauss)


def numpy_state(plain: Any) -> tuple[Any, ...]:
    """What NumPy's `set_state` takes, from what `plain_numpy_state` returned."""
    kind, keys, *rest = plain
    return (kind, keys.numpy().astype(np.uint32), *rest)


def set_host_states(states: HostStates) -> None:
    """Put the generators back where `host_states` found them; those it did not read stay where they are."""
    torch.random.set_rng_state(states["torch"])
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states:
        np.random.set_state(numpy_state(states["numpy"]))


def drawn_from(before: HostStates, after: HostStates) -> set[str]:
    """The generators, of those that both states have, that something was drawn from in between."""
    return {name for name in before.keys() & after.keys() if not _equal(before[name], after[name])}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        # As NumPy sees them: these lie on the host, and `torch.equal` would look like a read of the device.
        return np.array_equal(one.numpy(), other.numpy())
    # Python's 625 numbers are compared as a whole: one by one they take 1,260 calls.
    if isinstance(one, tuple) and torch.Tensor in set(map(type, one)):
        # Cheapest first: a generator that was drawn from nearly always has another position.
        return len(one) == len(other) and all(_equal(a, b) for a, b in zip(reversed(one), reversed(other), strict=True))
    return one == other
