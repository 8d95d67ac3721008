"""Streams that say where they stand, so that resuming need not read again what has been read."""

from __future__ import annotations

import copy
import io
import logging
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

logger = logging.getLogger(__name__)

# Parts of a `datasets.IterableDataset` whose states leave out what they hold back, and the names they nest under.
HOLDS_SAMPLES_BACK = "BufferShuffledExamplesIterable"
NESTED = ("_ex_iterable", "ex_iterable", "ex_iterables")


class ExactStreamState:
    """The state of a stream that implements `state_dict` and `load_state_dict`, where the state tells everything.

    Parameters:
        dataset: the stream.
    """

    def __init__(self, dataset: Any):
        self.dataset = dataset
        self._can_be_stored: bool | None = None

    @classmethod
    def of(cls, loader: Any) -> ExactStreamState | None:
        """That of a loader's dataset; None where what has been read has to be read again to go on exactly.

        Workers read copies of the dataset, whose states do not come back; a shuffle buffer's state lacks its samples.
        """
        dataset = getattr(loader, "dataset", None)
        tells = callable(getattr(dataset, "state_dict", None)) and callable(getattr(dataset, "load_state_dict", None))
        if not tells or not isinstance(loader, DataLoader) or not isinstance(dataset, IterableDataset):
            return None
        return None if loader.num_workers or holds_samples_back(dataset) else cls(dataset)

    def load(self, state: Any) -> None:
        """Let the next iteration go on from a state."""
        self.dataset.load_state_dict(state)

    def save(self) -> Any:
        """The state now; None where it holds more than tensors, numbers, texts and containers of them."""
        if self._can_be_stored is False:
            return None
        # A stream may go on changing what it returned.
        state = copy.deepcopy(self.dataset.state_dict())
        if self._can_be_stored is None:
            self._can_be_stored = loads_safely(state)
            if not self._can_be_stored:
                logger.warning(
                    "%s.state_dict() holds objects that no checkpoint stores: resuming will read the stream again "
                    "up to where it stood. Return tensors, numbers, texts and containers of them to avoid that.",
                    type(self.dataset).__name__,
                )
        return state if self._can_be_stored else None


def loads_safely(value: Any) -> bool:
    """Whether a value can be stored and loaded without running code."""
    stored = io.BytesIO()
    try:
        torch.save(value, stored)
        stored.seek(0)
        torch.load(stored, weights_only=True)
    except Exception:
        # Whatever it is that cannot be pickled or loaded.
        return False
    return True


def holds_samples_back(dataset: Any) -> bool:
    """Whether a `datasets.IterableDataset` shuffles in a buffer."""
    if type(dataset).__name__ == HOLDS_SAMPLES_BACK:
        return True
    nested = [vars(dataset).get(name) for name in NESTED] if hasattr(dataset, "__dict__") else []
    parts = [part for one in nested for part in (one if isinstance(one, list) else [one]) if part is not None]
    return any(holds_samples_back(part) for part in parts)
