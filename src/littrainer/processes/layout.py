"""How the processes share the work: which of them see the same data, and which a part of it each."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from littrainer.arguments.process import ProcessFacts


def data_parallel_size(args: ProcessFacts) -> int:
    """Number of parts into which each batch of all processes is split; those with the same part share one model."""
    return args.world_size


def data_parallel_rank(args: ProcessFacts) -> int:
    """Which of these parts is this process's."""
    return args.process_index
