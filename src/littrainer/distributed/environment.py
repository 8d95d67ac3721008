"""Ranks, addresses and requests of launchers, read from the environment of this process.

torchrun's variables are the ones that count: torch, accelerate and scripts read them too. What other launchers say is
written into them, once. What `accelerate launch`, and its configuration file, ask for is in further variables, and
`littrainer run --strategy` sets the same. Those about FSDP are read with `fsdp_config`, those about the layout of the
processes with `parallelism_config`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

# Names of torchrun's variables.
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
# The port that torch's launchers take if none is named.
DEFAULT_PORT = 29500
MAX_PORT = 65535

# Seconds to save a checkpoint and end, before processes are killed. torch's agent reads the same variable.
GRACE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
DEFAULT_GRACE_S = 600
# `littrainer run` says in it how it was called.
COMMAND = "LITTRAINER_COMMAND"

# Set by `littrainer run --restarts` and `--hang-timeout`: the launcher's process number and a folder for the reports of
# the processes of one start; a file about the trainings; the seconds.
REPORTS, TRAININGS, HANG_TIMEOUT = "LITTRAINER_REPORTS", "LITTRAINER_TRAININGS", "LITTRAINER_HANG_TIMEOUT"

USE_FSDP, USE_DEEPSPEED = "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"
TRUE_VALUES = ("1", "true", "yes", "on", "y", "t")
FALSE_VALUES = ("", "0", "false", "no", "off", "n", "f", "none")
# Texts that mean no value in the variables.
UNSET_VALUES = ("", "none")


class RendezvousPoint(NamedTuple):
    """The address of the first process, and the port there at which the processes meet."""

    address: str
    port: int

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


def read_env_int(name: str, default: int) -> int:
    """Return the number that an environment variable holds."""
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"environment variable {name}={text!r} must be a whole number; launchers set it.") from None


def get_hang_timeout(args: Any) -> float:
    """Return the seconds without progress after which a run ends, 0 for never; the command line goes first."""
    return float(os.environ.get(HANG_TIMEOUT) or args.hang_timeout or 0)


def world_size() -> int:
    """Return the number of processes that train together."""
    return read_env_int(WORLD_SIZE, 1)


def rank() -> int:
    """Return the rank of this process among all processes."""
    return read_env_int(RANK, 0)


def local_rank() -> int:
    """Return the rank of this process on its node."""
    return read_env_int(LOCAL_RANK, 0)


def local_world_size() -> int:
    """Return the number of processes on this node; by default all of them."""
    number = read_env_int(LOCAL_WORLD_SIZE, world_size())
    # Without a launcher accelerate's state, if a script makes it first, writes 1 in each process.
    launchers = ("TORCHELASTIC_RUN_ID", "SLURM_STEP_NUM_TASKS", *MPI_VARIABLES[LOCAL_WORLD_SIZE])
    is_by_hand = "accelerate.state" in sys.modules and not any(map(os.environ.get, launchers))
    return world_size() if number == 1 and (is_by_hand or rank() == local_rank() > 0) else number


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a launcher has started this process, be it the only one, by torchrun's variables."""
    return any(environment.get(name) for name in (RANK, WORLD_SIZE, LOCAL_RANK))


def get_reports_folder() -> Path | None:
    """Return where `littrainer run` collects the reports of this process; None if it has not started this very one."""
    launcher, _, folder = os.environ.get(REPORTS, "").partition(":")
    # A program that the script starts inherits the variable.
    return Path(folder) if folder and launcher == str(os.getppid()) else None


def get_rendezvous_point() -> RendezvousPoint | None:
    """Return where the processes meet; None if that is not set."""
    address = os.environ.get(MAIN_ADDRESS, "").strip()
    if not address:
        return None
    port = read_env_int(MAIN_PORT, DEFAULT_PORT)
    if not 0 < port <= MAX_PORT:
        raise ValueError(f"environment variable {MAIN_PORT}={port} is no port; it has to be from 1 to {MAX_PORT}.")
    return RendezvousPoint(address, port)


def check_ranks() -> None:
    """Refuse ranks and numbers of processes that do not fit together."""
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
    """Write what SLURM's or MPI's launcher says of this process into torchrun's variables, unless those are there."""
    if is_launched(environment):
        return
    for read in (_slurm_variables, _mpi_variables):
        found = read(environment)
        if found:
            environment.update({name: value for name, value in found.items() if not environment.get(name)})
            return


def _slurm_variables(environment: Mapping[str, str]) -> dict[str, str]:
    # Within an allocation, a script that srun has not started is alone, whatever was asked for.
    if _number(environment.get("SLURM_STEP_NUM_TASKS")) < 2 or "SLURM_PROCID" not in environment:
        return {}
    # Looks whether srun started a shell, finds the address in SLURM's list of nodes, and makes a port of the job.
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


def _mpi_variables(environment: Mapping[str, str]) -> dict[str, str]:
    found = {
        name: next((environment[source] for source in sources if environment.get(source)), "")
        for name, sources in MPI_VARIABLES.items()
    }
    if _number(found[WORLD_SIZE]) < 2 or not found[RANK]:
        return {}
    # Without more, mpirun has started all of them on one node.
    found[LOCAL_RANK] = found[LOCAL_RANK] or found[RANK]
    found[LOCAL_WORLD_SIZE] = found[LOCAL_WORLD_SIZE] or found[WORLD_SIZE]
    if found[LOCAL_WORLD_SIZE] == found[WORLD_SIZE]:
        found[MAIN_ADDRESS] = LOCAL_ADDRESS
    found[MAIN_PORT] = str(DEFAULT_PORT)
    return found


def _number(text: str | None) -> int:
    return int(text) if text and text.strip().isdecimal() else 0


# ---- What accelerate's launcher asks for -----------------------------------------------------------------------------


def is_env_true(name: str) -> bool:
    """Return whether a variable is set to a true value."""
    text = os.environ.get(name, "")
    if text.strip().lower() not in (*TRUE_VALUES, *FALSE_VALUES):
        raise ValueError(f"environment variable {name}={text!r} is neither true nor false; accelerate launch sets it.")
    return text.strip().lower() in TRUE_VALUES


# Variables that may ask for what is not supported, with the values that do not.
REFUSED_VARIABLES: dict[str, tuple[str, ...]] = {
    "ACCELERATE_USE_MEGATRON_LM": FALSE_VALUES,
    "ACCELERATE_USE_SAGEMAKER": FALSE_VALUES,
    "ACCELERATE_CPU_AFFINITY": FALSE_VALUES,
    "ACCELERATE_DYNAMO_BACKEND": ("", "no"),
    # Launchers set it, and a run under transformers obeys it.
    "ACCELERATE_MIXED_PRECISION": ("", "no", "bf16", "fp16"),
}


def get_refused_variables() -> dict[str, str]:
    """Return variables, with their values, that ask for what is not carried out."""
    values = {name: os.environ.get(name, "") for name in REFUSED_VARIABLES}
    return {name: value for name, value in values.items() if value.strip().lower() not in REFUSED_VARIABLES[name]}
