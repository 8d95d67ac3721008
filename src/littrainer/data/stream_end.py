"""The common end of the data of all processes: a process with more batches would wait for the others for ever."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from littrainer.data.sharding import get_length
from littrainer.distributed.collectives import all_gather_object, any_rank, is_distributed

logger = logging.getLogger(__name__)


class UnequalData(ValueError):
    """The processes have different numbers of batches, or make different calls."""


def check_equal_lengths(loader: Any, what: str, call: str = "") -> None:
    """Refuse loaders of different lengths; all processes make this call.

    Parameters:
        what: the data, for the error: "training data".
        call: the purpose of an evaluation, such as "evaluation with metric_key_prefix='eval'". It has to be the same in
            all processes, and the number of samples too.

    Raises:
        UnequalData: the numbers of batches or the calls differ; it names the ranks.
    """
    if not is_distributed():
        return
    everywhere = all_gather_object((get_length(loader), get_length(getattr(loader, "dataset", None)), call))
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


class StreamEndSync:
    """Watches streams of unknown length, one in each process, for the first that ends."""

    def __init__(self) -> None:
        self._batches = 0
        self._has_warned = False

    def begin(self) -> None:
        """Begin to count the batches of an epoch."""
        self._batches = 0

    def any_rank_exhausted(self, has_ended: bool, is_training: bool) -> bool:
        """Return whether any stream has ended; all processes make this call at each batch.

        Parameters:
            has_ended: whether the stream of this process has.
            is_training: the others end with the shortest; else samples would be missing in the result.

        Raises:
            UnequalData: some have ended, others continue, and it is no training data.
        """
        if not any_rank(has_ended):
            self._batches += 1
            return False
        ended = all_gather_object(has_ended)
        if all(ended) or (is_training and self._has_warned):
            return True
        ranks = ", ".join(str(rank) for rank, has_ended in enumerate(ended) if has_ended)
        found = (
            f"The data of rank {ranks} has ended after {_counted(self._batches, 'batch', 'batches')}, and that of the "
            "other processes goes on"
        )
        instead = "set dispatch_batches=True in accelerator_config, and the first process reads for all"
        if not is_training:
            raise UnequalData(f"{found}. Evaluate equally long streams, or {instead}.")
        logger.warning(
            "%s: an epoch ends for all where the shortest stream ends. Give each process as many samples, or %s.",
            found,
            instead,
        )
        self._has_warned = True
        return True
