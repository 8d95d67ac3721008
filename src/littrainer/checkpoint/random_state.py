"""The states of all random number generators, as rng_state.pth holds them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch


def capture_random_states() -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's generators, and of the current GPU's where there is one."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.random.get_rng_state()
    return states


def restore_random_states(path: Path) -> None:
    """Put back the states that a file holds.

    Raises:
        FileNotFoundError: no such file.
    """
    # The file holds NumPy's state tuple, which the weights-only loader accepts only with these names allowed.
    numpy: Any = np
    allowed = [np.ndarray, np.dtype, numpy._core.multiarray._reconstruct, type(np.dtype(np.uint32))]
    with torch.serialization.safe_globals(allowed):
        states = torch.load(path, weights_only=True)
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.random.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.random.set_rng_state(states["cuda"])
