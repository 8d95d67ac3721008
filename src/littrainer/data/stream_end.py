"""Where the data of the processes ends: one that has more batches than the others would wait for them for ever."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from littrainer.data.sharding import length_of
from littrainer.distributed.agreement import agreed, are_several, from_each

logger = logging.getLogger(__name__)


class UnequalData(ValueError):
    """The processes have differently many batches, or have them for different calls."""


def check_equal_lengths(loader: Any, what: str, call: str = "") -> None:
    """Refuse loaders of different lengths; a call that all processes make.

    Parameters:
        loader: this process's; one without a length is not checked.
        what: the data, for the error: "training data".
        call: what it is read for: "evaluation with metric_key_prefix='eval'". It must be the same in all, and the
            number of samples too: what processes evaluate that are at different calls is a wrong number.

    Raises:
        UnequalData: the processes have differently many batches, or are at different calls; it names their ranks.
    """
    if not are_several():
        return
    everywhere = from_each((length_of(loader), length_of(getattr(loader, "dataset", None)), call))
    batches, samples, calls = zip(*everywhere, strict=True)
    if len(set(calls)) > 1:
        raise UnequalData(
            f"The processes do not evaluate the same: {_by_rank(calls)}. Code that runs in some of the processes only "
            "must not evaluate or predict, since all do it together."
        )
    if len(set(batches)) == 1 and (not call or len(set(samples)) == 1):
        return
    found = _by_rank([_counted(number, "batch", "batches") for number in batches])
    if len(set(samples)) > 1:
        raise UnequalData(
            f"The {what} is not equally long in all processes: {found}; {_by_rank(samples)} samples. Give each process "
            "the same dataset, of which it is handed its part, or as many samples each where a DataLoader of your own "
            "has the part already; all have to make the same calls."
        )
    raise UnequalData(
        f"The {what} does not give all processes equally many batches: {found}. Set even_batches=True in "
        "accelerator_config (accelerator.even_batches), which repeats samples, or drop_last in the batch sampler or "
        "dataloader_drop_last=True, which leaves some out."
    )


def _counted(number: int | None, singular: str, plural: str) -> str:
    return f"an unknown number of {plural}" if number is None else f"{number} {singular if number == 1 else plural}"


def _by_rank(values: Sequence[Any]) -> str:
    return ", ".join(f"rank {rank} has {value}" for rank, value in enumerate(values))


class CommonEnd:
    """Watches streams of unknown length, one in each process, for the first that ends."""

    def __init__(self) -> None:
        self._batches = 0
        self._is_told = False

    def begin(self) -> None:
        """The data is read from its beginning."""
        self._batches = 0

    def is_reached(self, has_ended: bool, is_training: bool) -> bool:
        """Whether any of them has ended; a call that all processes make at each batch.

        Parameters:
            has_ended: this process's has.
            is_training: the others end with the shortest; else samples would be missing in the result.

        Raises:
            UnequalData: some have ended, others go on, and it is no training data.
        """
        if not agreed(has_ended):
            self._batches += 1
            return False
        ended = from_each(has_ended)
        if not all(ended):
            self._tell(ended, is_training)
        return True

    def _tell(self, ended: list[bool], is_training: bool) -> None:
        ranks = ", ".join(str(rank) for rank, has_ended in enumerate(ended) if has_ended)
        found = (
            f"The data of rank {ranks} has ended after {_counted(self._batches, 'batch', 'batches')}, and that of the "
            "other processes goes on"
        )
        instead = "set dispatch_batches=True in accelerator_config, and the first process reads for all"
        if not is_training:
            raise UnequalData(f"{found}. Evaluate equally long streams, or {instead}.")
        if not self._is_told:
            logger.warning(
                "%s: an epoch ends for all where the shortest stream ends. Give each process as many samples, or %s.",
                found,
                instead,
            )
            self._is_told = True
