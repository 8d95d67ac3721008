"""What Lightning iterates in an evaluation or a prediction: its batches, one by one or all as one step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from littrainer.data.limits import first_batches
from littrainer.data.loaders import LookaheadLoader
from littrainer.data.workers import read_batches


class BatchStream:
    """The batches of a loader, untouched.

    Parameters:
        loader: any iterable of batches.
        one_by_one: hand each of them out; else all go through Lightning's loop as one of its steps.
        limit: end after so many; None for all.

    The length given is one that is never reached: without any, Lightning looks a batch ahead and the order of random
    draws changes; with the loader's own, it stops there even if the loader gives more.
    """

    UNREACHABLE_LENGTH = 2**40

    def __init__(self, loader: Any, one_by_one: bool = False, limit: int | None = None):
        self.loader, self.one_by_one, self.limit = loader, one_by_one, limit

    def __len__(self) -> int:
        return self.UNREACHABLE_LENGTH

    def __iter__(self) -> Iterator[Any]:
        # Lightning asks for an iterator twice, and a DataLoader draws a random number for each that it makes: one is
        # made with the first batch, and no sooner.
        if self.one_by_one:
            yield from self.batches()
        else:
            yield WholePass(self)

    def batches(self) -> Iterator[Any]:
        """Yield the batches, none of which is drawn before its turn."""
        reads_itself = isinstance(self.loader, LookaheadLoader)
        batches = iter(self.loader) if reads_itself else read_batches(self.loader)
        yield from batches if self.limit is None else first_batches(batches, self.limit)

    def release(self) -> None:
        """Let go of the loader and its data; Lightning keeps what it has iterated last."""
        self.loader = ()


class WholePass:
    """All batches of a stream as one step of Lightning's loop.

    What Lightning does around a step takes longer than a small model takes for a batch. If nobody listens to single
    batches, it is done once.
    """

    def __init__(self, stream: BatchStream):
        self.stream = stream


def single_batches(handed_out: Any) -> Iterator[Any]:
    """Return all batches of a pass, or the one batch that was handed out by itself."""
    return handed_out.stream.batches() if isinstance(handed_out, WholePass) else iter((handed_out,))
