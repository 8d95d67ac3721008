"""Synchronized end of data: a process with more batches than the others would hang in a collective."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from littrainer.data.sharding import get_length
from littrainer.distributed.collectives import all_gather_object, any_rank, is_distributed

logger = logging.getLogger(__name__)


class UnequalData(ValueError):
    """Error for processes with different numbers of batches or different calls."""


def check_equal_lengths(loader: Any, what: str, call: str = "") -> None:
    """Refuse loaders of different lengths; a collective call.

    Parameters:
        call: text of an evaluation, such as "evaluation with metric_key_prefix='eval'". With it, the call and the
            number of samples must be equal in all processes.

    Raises:
        UnequalData: the numbers of batches or the calls differ.
    """
    if not is_distributed():
        return
    lengths = all_gather_object((get_length(loader), get_length(getattr(loader, "dataset", None)), call))
    batches, samples, calls = zip(*lengths, strict=True)
    if len(set(calls)) > 1:
        raise UnequalData(
            f"The processes do not evaluate the same: {_join_by_rank(calls)}. Code that runs in some of the processes "
            "only must not evaluate or predict, since all do it together."
        )
    if len(set(batches)) == 1 and (not call or len(set(samples)) == 1):
        return
    counts = _join_by_rank([_format_count(number, "batch", "batches") for number in batches])
    if len(set(samples)) > 1:
        raise UnequalData(
            f"The {what} is not equally long in all processes: {counts}; {_join_by_rank(samples)} samples. Give each "
            "process the same dataset, which is sharded here, or equally many samples if a DataLoader of your own "
            "shards the data; all processes have to make the same calls."
        )
    raise UnequalData(
        f"The {what} does not give all processes equally many batches: {counts}. Set even_batches=True in "
        "accelerator_config (accelerator.even_batches), which repeats samples, or drop_last in the batch sampler or "
        "dataloader_drop_last=True, which leaves some out."
    )


def _format_count(number: int | None, singular: str, plural: str) -> str:
    return f"an unknown number of {plural}" if number is None else f"{number} {singular if number == 1 else plural}"


def _join_by_rank(values: Sequence[Any]) -> str:
    return ", ".join(f"rank {rank} has {value}" for rank, value in enumerate(values))


class StreamEndSync:
    """Synchronization of streams of unknown length in all processes, which end with the shortest."""

    def __init__(self) -> None:
        self._batches = 0
        self._has_warned = False

    def begin(self) -> None:
        self._batches = 0

    def any_rank_exhausted(self, has_ended: bool, is_training: bool) -> bool:
        """Return whether the stream of any rank has ended; a collective call for each batch.

        Raises:
            UnequalData: only some streams of an evaluation have ended, which would miss samples.
        """
        if not any_rank(has_ended):
            self._batches += 1
            return False
        ended = all_gather_object(has_ended)
        if all(ended) or (is_training and self._has_warned):
            return True
        ranks = ", ".join(str(rank) for rank, has_ended in enumerate(ended) if has_ended)
        batches = _format_count(self._batches, "batch", "batches")
        problem = f"The data of rank {ranks} has ended after {batches}, and that of the other processes continues"
        advice = "set dispatch_batches=True in accelerator_config, and the first process reads for all"
        if not is_training:
            raise UnequalData(f"{problem}. Evaluate equally long streams, or {advice}.")
        logger.warning(
            "%s: an epoch ends for all where the shortest stream ends. Give each process as many samples, or %s.",
            problem,
            advice,
        )
        self._has_warned = True
        return True
