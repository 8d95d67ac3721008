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
    return {name for name in before.keys() & after.keys() if _numbers_in(before[name]) != _numbers_in(after[name])}


def _numbers_in(state: Any) -> Any:
    """A generator's state, in which tensors are bytes; they lie on the host, and comparing them would look like a read
    of the device.
    """
    parts = state if isinstance(state, tuple) else (state,)
    return [part.numpy().tobytes() if isinstance(part, torch.Tensor) else part for part in parts]
