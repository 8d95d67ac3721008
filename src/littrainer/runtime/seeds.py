"""Seeding of the random number generators of a training."""

from __future__ import annotations

import os
import random

import numpy as np
import torch

# cuBLAS and some kernels read these before their first call.
DETERMINISTIC_ENVIRONMENT = {
    "CUDA_LAUNCH_BLOCKING": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    "FLASH_ATTENTION_DETERMINISTIC": "1",
}


def set_seed(seed: int, deterministic: bool = False) -> None:
    """Seed the generators of Python, NumPy and torch on all devices.

    Parameters:
        seed: seed of each generator.
        deterministic: let torch raise for operations without deterministic implementation.

    Examples:
        >>> import torch
        >>> from littrainer import set_seed
        >>> set_seed(42)
        >>> torch.rand(1)
        tensor([0.8823])
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def enable_full_determinism(seed: int, warn_only: bool = False) -> None:
    """Seed all generators and use deterministic kernels of torch, cuDNN and cuBLAS.

    Parameters:
        seed: seed of Python, NumPy and torch.
        warn_only: warn instead of raising for operations without deterministic implementation.
    """
    set_seed(seed)
    os.environ.update(DETERMINISTIC_ENVIRONMENT)
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def seed_worker(worker_id: int, num_workers: int, rank: int) -> None:
    """Seed a DataLoader worker from torch's seed, which includes `worker_id`."""
    set_seed(num_workers * rank + torch.initial_seed() % 2**32)
