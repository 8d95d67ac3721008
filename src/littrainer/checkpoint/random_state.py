"""The states of all random number generators, as rng_state.pth holds them.

A ValueError says that a file is damaged or could run code.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from littrainer.checkpoint.layout import RANDOM_STATE_NAME
from littrainer.checkpoint.safe_loading import load_tensors
from littrainer.data.workers import numpy_state, plain_numpy_state


def capture_random_states(gpu: bool = True) -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's generators, and of the current GPU's if there is one."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }
    if gpu and torch.cuda.is_available():
        states["cuda"] = torch.cuda.random.get_rng_state()
    return states


def random_state_name(args: Any) -> str:
    """Return the file with this process's states: each of several processes has its own."""
    return RANDOM_STATE_NAME if args.world_size <= 1 else rank_file(args.process_index)


def read_random_states(path: Path) -> Any:
    """Return what a file of random states holds."""
    # The file holds NumPy's state tuple, which the weights-only loader accepts only with these names allowed.
    numpy: Any = np
    allowed = [np.ndarray, np.dtype, numpy._core.multiarray._reconstruct, type(np.dtype(np.uint32))]
    return load_tensors(path, allowed)


def find_random_states(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the states that a checkpoint has of each process, by rank."""
    if (folder / RANDOM_STATE_NAME).is_file():
        return {0: read_random_states(folder / RANDOM_STATE_NAME)}
    ranks = [path.stem.rpartition("_")[2] for path in folder.glob(rank_file("*"))]
    return {int(rank): read_random_states(folder / rank_file(rank)) for rank in sorted(ranks) if rank.isdecimal()}


def rank_file(rank: int | str) -> str:
    """Return the file with the states of one of several processes."""
    return f"rng_state_{rank}.pth"


def portable_states(states: Mapping[str, Any]) -> dict[str, Any]:
    """States as a checkpoint of Lightning can keep them: tensors, numbers, texts and tuples of them."""
    others = {name: value for name, value in states.items() if name not in ("cpu", "numpy")}
    return {"torch": states["cpu"], "numpy": plain_numpy_state(states["numpy"]), **others}


def states_of_portable(portable: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `portable_states` was made of."""
    others = {name: value for name, value in portable.items() if name not in ("torch", "numpy")}
    states = {"cpu": portable["torch"], "numpy": numpy_state(portable["numpy"]), **others}
    # Who loads a checkpoint to a GPU has the tensors there, and generators take their states from the host.
    return {name: state.cpu() if isinstance(state, torch.Tensor) else state for name, state in states.items()}


def set_random_states(states: dict[str, Any]) -> None:
    """Put back states that `capture_random_states` returned; a GPU's only if they hold them."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.random.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        # Several processes keep the states of all GPUs of their node.
        if isinstance(states["cuda"], list):
            torch.cuda.random.set_rng_state_all(states["cuda"][: torch.cuda.device_count()])
        else:
            torch.cuda.random.set_rng_state(states["cuda"])
