"""What Lightning iterates in an evaluation or a prediction: batches, one by one or in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from littrainer.data.limits import first_batches
from littrainer.data.loaders import LookaheadLoader
from littrainer.data.workers import read_batches

BATCHES_PER_CHUNK = 32


class BatchChunk:
    """Batches in a row that go through Lightning's loop as one of its steps.

    Parameters:
        first: the first of them, drawn when the chunk began.
        batches: where the further ones are drawn, each when it is asked for.
        length: how many batches there are at most.

    What Lightning does around a step takes longer than a small model takes for a batch. Where nobody listens to single
    batches it is done once for a chunk. No batch is drawn before its turn: the order of random draws stays.
    """

    def __init__(self, first: Any, batches: Iterator[Any], length: int):
        self._first, self._batches, self._length = first, batches, length
        self.is_last = False

    def __iter__(self) -> Iterator[Any]:
        yield self._first
        self._first = None
        for _ in range(self._length - 1):
            try:
                batch = next(self._batches)
            except StopIteration:
                self.is_last = True
                return
            yield batch


class BatchStream:
    """The batches of a loader, untouched.

    Parameters:
        loader: any iterable of batches.
        batches_per_step: above 1, hand them out in chunks of so many.
        limit: end after so many; None for all.

    The length given is one that is never reached: without any, Lightning looks a batch ahead and the order of random
    draws changes; with the loader's own, it stops there even if the loader gives more.
    """

    UNREACHABLE_LENGTH = 2**40

    def __init__(self, loader: Any, batches_per_step: int = 1, limit: int | None = None):
        self.loader = loader
        self.limit = limit
        self.batches_per_step = batches_per_step

    def __len__(self) -> int:
        return self.UNREACHABLE_LENGTH

    def __iter__(self) -> Iterator[Any]:
        # Lightning asks for an iterator twice, and a DataLoader draws a random number for each that it makes: one is
        # made with the first batch, and no sooner.
        return self._one_by_one() if self.batches_per_step == 1 else self._chunks()

    def _one_by_one(self) -> Iterator[Any]:
        yield from self._batches()

    def _chunks(self) -> Iterator[BatchChunk]:
        batches = self._batches()
        for first in batches:
            chunk = BatchChunk(first, batches, self.batches_per_step)
            yield chunk
            if chunk.is_last:
                # Some iterators begin again when they are asked once more.
                return

    def _batches(self) -> Iterator[Any]:
        reads_itself = isinstance(self.loader, LookaheadLoader)
        batches = iter(self.loader) if reads_itself else read_batches(self.loader)
        return batches if self.limit is None else first_batches(batches, self.limit)

    def release(self) -> None:
        """Let go of the loader and its data; Lightning keeps what it has iterated last."""
        self.loader = ()


def single_batches(handed_out: Any) -> Iterator[Any]:
    """The batches of a chunk, or the one batch that was handed out by itself."""
    return iter(handed_out) if isinstance(handed_out, BatchChunk) else iter((handed_out,))
