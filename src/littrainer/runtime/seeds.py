"""Seeding of every random number generator a training draws from."""

from __future__ import annotations

import os
import random

import numpy as np
import torch

# Read by cuBLAS and by kernels that have a deterministic variant; they have to stand in the environment before the
# first such kernel runs.
DETERMINISTIC_ENVIRONMENT = {
    "CUDA_LAUNCH_BLOCKING": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    "FLASH_ATTENTION_DETERMINISTIC": "1",
}


def set_seed(seed: int, deterministic: bool = False) -> None:
    """Seed Python's, NumPy's and torch's generators (all devices).

    Parameters:
        seed: the seed, the same for each generator.
        deterministic: also make torch refuse operations that have no deterministic implementation.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def enable_full_determinism(seed: int, warn_only: bool = False) -> None:
    """Seed everything and switch torch, cuDNN and cuBLAS to deterministic kernels.

    Parameters:
        seed: for Python, NumPy and torch.
        warn_only: warn about an operation without a deterministic implementation where the default is to fail.
    """
    set_seed(seed)
    os.environ.update(DETERMINISTIC_ENVIRONMENT)
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def seed_worker(worker_id: int, num_workers: int, rank: int) -> None:
    """Seed a DataLoader worker: torch already gave each its own seed, which also goes to Python's and NumPy's.

    Parameters:
        worker_id: index of the worker, which torch's seed already depends on.
        num_workers: workers of each rank.
        rank: rank of the process the worker belongs to.
    """
    set_seed(num_workers * rank + torch.initial_seed() % 2**32)
