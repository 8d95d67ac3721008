"""How trials side by side share a machine: which GPU each of them has, and how many CPU threads."""

from __future__ import annotations

import operator
import os
from typing import Any

from littrainer.distributed import environment
from littrainer.search.failures import SearchMistake

# As Optuna has it: as many jobs as the machine has room for.
ALL = -1
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
# How libraries are told of the threads that they may use.
THREADS = "OMP_NUM_THREADS"
OTHER_THREADS = ("MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
# What a launcher says of the process that searches; each trial's process trains alone.
OF_LAUNCHERS = (
    environment.RANK,
    environment.WORLD_SIZE,
    environment.LOCAL_RANK,
    environment.LOCAL_WORLD_SIZE,
    environment.MAIN_ADDRESS,
    environment.MAIN_PORT,
)


def number_of_jobs(args: Any, n_jobs: Any) -> int:
    """How many trials run side by side.

    Parameters:
        args: training arguments, whose device counts.
        n_jobs: the number, or -1: one for each GPU, and without GPUs one for each core.

    Raises:
        SearchMistake: it is no such number.
    """
    is_number = hasattr(n_jobs, "__index__") and not isinstance(n_jobs, bool)
    if not is_number or (n_jobs < 1 and n_jobs != ALL):
        raise SearchMistake(
            f"n_jobs={n_jobs!r} has to be the number of trials side by side, or -1 for one on each GPU."
        )
    if n_jobs != ALL:
        return operator.index(n_jobs)
    gpus = visible_gpus(args)
    return len(gpus) if gpus else len(_own_cores())


def visible_gpus(args: Any) -> list[str]:
    """The GPUs that trials can have, as CUDA_VISIBLE_DEVICES names them; none where the arguments ask for the CPU."""
    if args.device.type != "cuda":
        return []
    import torch

    named = [name.strip() for name in os.environ.get(VISIBLE_GPUS, "").split(",") if name.strip()]
    count = torch.cuda.device_count()
    return named[:count] if len(named) >= count else [str(index) for index in range(count)]


def share_of(args: Any, job: int, jobs: int) -> dict[str, str]:
    """Environment variables of one of the processes that run side by side.

    Parameters:
        job: which of them, from 0 up.
        jobs: how many there are.
    """
    threads = str(threads_of_each(jobs))
    gpus = visible_gpus(args)
    kept = {name: value for name, value in os.environ.items() if name not in OF_LAUNCHERS}
    return {
        **dict.fromkeys(OTHER_THREADS, threads),
        **kept,
        THREADS: threads,
        **({VISIBLE_GPUS: gpus[job % len(gpus)]} if gpus else {}),
    }


def threads_of_each(jobs: int) -> int:
    """CPU threads of one of several processes; together they have as many as this process has."""
    import torch

    return max(1, torch.get_num_threads() // jobs)


def _own_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
