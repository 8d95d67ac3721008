"""The random draws of collators, from torch's generators or from NumPy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class TorchDraws:
    """Draws from a torch generator, or from the global one.

    Parameters:
        generator: None for the global one.
    """

    def __init__(self, generator: torch.Generator | None):
        self.generator = generator

    def copy(self, values: Any) -> Any:
        """The same values, to be changed."""
        return values.clone()

    def truths(self, values: Any) -> Any:
        """A NumPy array of truths as a tensor."""
        return torch.from_numpy(values)

    def yes_or_no(self, probability: float, shape: Any, never: np.ndarray | None = None) -> Any:
        """One draw for each place, each true with that probability, and false where `never` says so."""
        probabilities = torch.full(shape, probability)
        if never is not None:
            probabilities.masked_fill_(torch.from_numpy(never), value=0.0)
        return torch.bernoulli(probabilities, generator=self.generator).bool()

    def tokens(self, vocabulary_size: int, places: Any) -> Any:
        """Token ids for the places that are true; one is drawn for every place."""
        drawn = torch.randint(vocabulary_size, places.shape, dtype=torch.long, generator=self.generator)
        return drawn[places]


class NumpyDraws:
    """Draws from a NumPy generator, or from the global one.

    Parameters:
        generator: None for the global one.
    """

    def __init__(self, generator: np.random.Generator | None):
        self.generator = generator

    def copy(self, values: Any) -> Any:
        """The same values, to be changed."""
        return np.copy(values)

    def truths(self, values: Any) -> Any:
        """The array itself."""
        return values

    def yes_or_no(self, probability: float, shape: Any, never: np.ndarray | None = None) -> Any:
        """One draw for each place, each true with that probability, and false where `never` says so."""
        probabilities: Any = probability if never is None else np.where(never, 0.0, probability)
        source: Any = np.random if self.generator is None else self.generator
        return source.binomial(1, probabilities, size=shape).astype(bool)

    def tokens(self, vocabulary_size: int, places: Any) -> Any:
        """Token ids for the places that are true; one is drawn for each of those."""
        count = np.count_nonzero(places)
        if self.generator is None:
            return np.random.randint(0, vocabulary_size, size=count, dtype=np.int64)
        return self.generator.integers(0, vocabulary_size, size=count, dtype=np.int64)
