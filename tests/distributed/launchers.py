"""What launchers put into the environment of the processes that they start."""

from __future__ import annotations

import os

import pytest
import torch

PYTORCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Prefixes of variables that say something about processes.
PREFIXES = ("SLURM_", "PMI_", "OMPI_", "MV2_", "MPI_", "ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "LITTRAINER_")
# The sixth of eight tasks on two nodes.
SLURM_STEP: dict[str, str | None] = {
    "SLURM_JOB_ID": "4405678",
    "SLURM_JOB_NAME": "train",
    "SLURM_NTASKS": "8",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NODELIST": "gpu-[07-08]",
}


def set_only(patch: pytest.MonkeyPatch, **variables: str | None) -> None:
    """Let the environment say this about processes, and nothing else, until the test ends."""
    for name in {*PYTORCH_VARIABLES, *(name for name in os.environ if name.startswith(PREFIXES))}:
        # What a test lets its subject set is undone too.
        patch.setenv(name, "")
        patch.delenv(name)
    for name, value in variables.items():
        if value is not None:
            patch.setenv(name, value)


def fake_gpus(patch: pytest.MonkeyPatch, count: int) -> None:
    """Let torch see as many GPUs, on none of which anything can be computed, until the test ends."""
    patch.setattr(torch.cuda, "is_available", lambda: count > 0)
    patch.setattr(torch.cuda, "device_count", lambda: count)
    patch.setattr(torch.cuda, "set_device", lambda device: None)
