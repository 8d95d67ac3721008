"""Environment variables of launchers: ranks, addresses and options.

Variables of other launchers are copied into torchrun's, which torch, accelerate and scripts read too. `fsdp_config` and
`parallelism_config` read further variables of `accelerate launch`.
"""

from __future__ import annotations

import functools
import os
import shlex
import sys
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

RANK, WORLD_SIZE = "RANK", "WORLD_SIZE"
LOCAL_RANK, LOCAL_WORLD_SIZE = "LOCAL_RANK", "LOCAL_WORLD_SIZE"
MAIN_ADDRESS, MAIN_PORT = "MASTER_ADDR", "MASTER_PORT"

# Variables of MPI launchers, by precedence: Intel MPI, Open MPI, MVAPICH.
MPI_VARIABLES: dict[str, tuple[str, ...]] = {
    WORLD_SIZE: ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"),
    RANK: ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"),
    LOCAL_RANK: ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
    LOCAL_WORLD_SIZE: ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),
}
LOCAL_ADDRESS = "127.0.0.1"
# The default of torch's launchers.
DEFAULT_PORT = 29500
MAX_PORT = 65535

# Seconds to save a checkpoint and end before a process is killed; torch's agent reads it too.
GRACE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
DEFAULT_GRACE_S = 600
# The command line of `littrainer run`.
COMMAND = "LITTRAINER_COMMAND"

# Set by `littrainer run --restarts` and `--hang-timeout`: the launcher's process id and its folder of reports; a file
# about the trainings; the seconds.
REPORTS, TRAININGS, HANG_TIMEOUT = "LITTRAINER_REPORTS", "LITTRAINER_TRAININGS", "LITTRAINER_HANG_TIMEOUT"

USE_FSDP, USE_DEEPSPEED = "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"
TRUE_VALUES = ("1", "true", "yes", "on", "y", "t")
FALSE_VALUES = ("", "0", "false", "no", "off", "n", "f", "none")
UNSET_VALUES = ("", "none")


class RendezvousPoint(NamedTuple):
    """Address and port of the first process."""

    address: str
    port: int

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


def get_command() -> list[str]:
    """Return the words of the command that started this program."""
    return shlex.split(os.environ[COMMAND]) if COMMAND in os.environ else sys.orig_argv


def read_env_int(name: str, default: int) -> int:
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"environment variable {name}={text!r} must be a whole number; launchers set it.") from None


def get_hang_timeout(args: Any) -> float:
    """Return the seconds without progress after which a run ends, or 0. The command line overrides `args`."""
    return float(os.environ.get(HANG_TIMEOUT) or args.hang_timeout or 0)


world_size = functools.partial(read_env_int, WORLD_SIZE, 1)
rank = functools.partial(read_env_int, RANK, 0)
local_rank = functools.partial(read_env_int, LOCAL_RANK, 0)


def local_world_size() -> int:
    """Return the number of processes on this node; default: all."""
    total = world_size()
    size = read_env_int(LOCAL_WORLD_SIZE, total)
    # Without a launcher, accelerate's PartialState writes 1 in each process if a script creates it first.
    launchers = ("TORCHELASTIC_RUN_ID", "SLURM_STEP_NUM_TASKS", *MPI_VARIABLES[LOCAL_WORLD_SIZE])
    is_unlaunched = "accelerate.state" in sys.modules and not any(map(os.environ.get, launchers))
    return total if size == 1 != total and (is_unlaunched or rank() == local_rank() > 0) else size


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    return any(environment.get(name) for name in (RANK, WORLD_SIZE, LOCAL_RANK))


def get_reports_folder() -> Path | None:
    """Return the folder of `littrainer run` for reports of this process; None if another parent started it."""
    launcher, _, folder = os.environ.get(REPORTS, "").partition(":")
    # Programs that the script starts inherit the variable.
    return Path(folder) if folder and launcher == str(os.getppid()) else None


def get_rendezvous_point() -> RendezvousPoint | None:
    address = os.environ.get(MAIN_ADDRESS, "").strip()
    if not address:
        return None
    port = read_env_int(MAIN_PORT, DEFAULT_PORT)
    if not 0 < port <= MAX_PORT:
        raise ValueError(f"environment variable {MAIN_PORT}={port} is no port; it has to be from 1 to {MAX_PORT}.")
    return RendezvousPoint(address, port)


def check_ranks() -> None:
    size = world_size()
    if size < 1:
        raise ValueError(f"environment variable {WORLD_SIZE}={size} must be 1 or more.")
    if size > 1 and not os.environ.get(RANK, "").strip():
        raise ValueError(
            f"environment variable {WORLD_SIZE}={size} says that there are {size} processes, and {RANK} is not set, "
            f"which says which one this is. Start the script with `littrainer run --devices {size}` or torchrun, or "
            f"unset {WORLD_SIZE}."
        )
    for name, limit_name, limit in ((RANK, WORLD_SIZE, size), (LOCAL_RANK, LOCAL_WORLD_SIZE, local_world_size())):
        number = read_env_int(name, 0)
        if not 0 <= number < limit:
            raise ValueError(
                f"environment variable {name}={number} does not fit {limit_name}={limit}: ranks go from 0 to "
                f"{limit - 1}. Start the script with `littrainer run --devices` or torchrun, which set both."
            )


def set_torchrun_variables(environment: MutableMapping[str, str] = os.environ) -> None:
    """Copy the variables of SLURM's or MPI's launcher to torchrun's, unless these are set."""
    if is_launched(environment):
        return
    variables = _read_slurm_variables(environment) or _read_mpi_variables(environment)
    environment.update({name: value for name, value in variables.items() if not environment.get(name)})


def _read_slurm_variables(environment: Mapping[str, str]) -> dict[str, str]:
    # In an allocation, only srun starts several processes.
    if _parse_number(environment.get("SLURM_STEP_NUM_TASKS")) < 2 or "SLURM_PROCID" not in environment:
        return {}
    # Detects interactive shells of srun, and derives address and port from the job.
    from lightning.fabric.plugins.environments import SLURMEnvironment

    if not SLURMEnvironment.detect():
        return {}
    slurm = SLURMEnvironment()
    per_node = environment.get("SLURM_NTASKS_PER_NODE", "").partition("(")[0]
    variables: dict[str, Callable[[], object]] = {
        RANK: slurm.global_rank,
        WORLD_SIZE: slurm.world_size,
        LOCAL_RANK: slurm.local_rank,
        LOCAL_WORLD_SIZE: lambda: per_node,
        MAIN_ADDRESS: lambda: slurm.main_address,
        MAIN_PORT: lambda: slurm.main_port,
    }
    return {name: str(value()) for name, value in variables.items()}


def _read_mpi_variables(environment: Mapping[str, str]) -> dict[str, str]:
    values = {
        name: next((environment[source] for source in sources if environment.get(source)), "")
        for name, sources in MPI_VARIABLES.items()
    }
    if _parse_number(values[WORLD_SIZE]) < 2 or not values[RANK]:
        return {}
    # Without local ranks, assume a single node.
    values[LOCAL_RANK] = values[LOCAL_RANK] or values[RANK]
    values[LOCAL_WORLD_SIZE] = values[LOCAL_WORLD_SIZE] or values[WORLD_SIZE]
    if values[LOCAL_WORLD_SIZE] == values[WORLD_SIZE]:
        values[MAIN_ADDRESS] = LOCAL_ADDRESS
    values[MAIN_PORT] = str(DEFAULT_PORT)
    return values


def _parse_number(text: str | None) -> int:
    return int(text) if text and text.strip().isdecimal() else 0


# ---- Options of accelerate's launcher --------------------------------------------------------------------------------


def is_env_true(name: str) -> bool:
    text = os.environ.get(name, "")
    if text.strip().lower() not in (*TRUE_VALUES, *FALSE_VALUES):
        raise ValueError(f"environment variable {name}={text!r} is neither true nor false; accelerate launch sets it.")
    return text.strip().lower() in TRUE_VALUES


# Variables of unsupported options -> values that are allowed.
REFUSED_VARIABLES: dict[str, tuple[str, ...]] = {
    "ACCELERATE_USE_MEGATRON_LM": FALSE_VALUES,
    "ACCELERATE_USE_SAGEMAKER": FALSE_VALUES,
    "ACCELERATE_CPU_AFFINITY": FALSE_VALUES,
    "ACCELERATE_DYNAMO_BACKEND": ("", "no"),
    # Mixed precision is supported; transformers obeys this variable too.
    "ACCELERATE_MIXED_PRECISION": ("", "no", "bf16", "fp16"),
}


def get_refused_variables() -> dict[str, str]:
    values = {name: os.environ.get(name, "") for name in REFUSED_VARIABLES}
    return {name: value for name, value in values.items() if value.strip().lower() not in REFUSED_VARIABLES[name]}
