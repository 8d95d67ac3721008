"""Starting several processes of one program, on one or several nodes, with torch's elastic agent."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import uuid
from dataclasses import dataclass
from typing import Any

from littrainer.distributed.environment import (
    GRACE,
    HIGHEST_PORT,
    LOCAL_ADDRESS,
    SECONDS_TO_SAVE,
    USUAL_PORT,
    whole_number,
)
from littrainer.distributed.failure_report import CONSEQUENCE

# A shell reports a program that a signal has ended by this number and the signal's.
ENDED_BY_SIGNAL = 128
# Whoever sets it wants to read what the agent does; else one sentence at the end says what has to be known of it.
AGENT_LOG_LEVEL = "LOGLEVEL"
THREADS = "OMP_NUM_THREADS"
LONGEST_MESSAGE = 500


class LaunchError(Exception):
    """The processes cannot be started; the message is one line that says what to do."""


@dataclass(frozen=True)
class Launch:
    """How many processes to start, and where they meet.

    Parameters:
        devices: processes on this node, one for each device.
        nodes: machines that take part.
        node_rank: which of them this is.
        main_address: address of the first machine; None is this one, and for one node only.
        main_port: port there; None takes a free one on one node, and torchrun's on several.
        grace_seconds: how long processes may take to end after a signal that asks for it, before they are killed; None
            leaves it to the environment, or takes ten minutes. After the failure of one the others have less.
    """

    devices: int
    nodes: int = 1
    node_rank: int = 0
    main_address: str | None = None
    main_port: int | None = None
    grace_seconds: int | None = None

    @property
    def world_size(self) -> int:
        """Number of all processes."""
        return self.devices * self.nodes


def check(launch: Launch) -> None:
    """Refuse what cannot be started.

    Raises:
        LaunchError: names the option and what to give.
    """
    if launch.devices < 1:
        raise LaunchError(f"--devices {launch.devices}: give the number of processes on this node, 1 or more")
    if launch.nodes < 1:
        raise LaunchError(f"--nodes {launch.nodes}: give the number of machines, 1 or more")
    if not 0 <= launch.node_rank < launch.nodes:
        raise LaunchError(
            f"--node-rank {launch.node_rank}: with --nodes {launch.nodes} the machines are numbered from 0 to "
            f"{launch.nodes - 1}"
        )
    port = launch.main_port
    if port is not None and not 0 < port <= HIGHEST_PORT:
        raise LaunchError(f"--main-port {port} is no port; it has to be from 1 to {HIGHEST_PORT}")
    _grace_seconds(launch)
    if launch.nodes > 1 and launch.main_address is None:
        raise LaunchError(
            f"--nodes {launch.nodes} needs --main-address: the address of the first machine, the same on each machine"
        )
    if launch.nodes > 1 and port is None:
        port = USUAL_PORT
    if port is not None and launch.node_rank == 0 and _is_taken(port):
        raise LaunchError(
            f"port {port} is in use on this machine; choose another one by --main-port, or stop what uses it"
        )


def run_processes(launch: Launch, command: list[str]) -> int:
    """Run one command in several processes until all have ended.

    Each gets torchrun's variables. When one fails the others are ended, and a line on stderr says which it was. Signals
    that ask this process to end go to all of them.

    Parameters:
        command: the python interpreter, and what it runs.

    Returns:
        0, or the exit status of the process that failed first; 128 and the signal's number if a signal ended it.

    Raises:
        LaunchError: the processes of several nodes have not found each other.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher import LaunchConfig, elastic_launch

    if AGENT_LOG_LEVEL not in os.environ:
        logging.disable()
    os.environ[GRACE] = str(_grace_seconds(launch))
    os.environ.setdefault(THREADS, str(max(1, (os.cpu_count() or 1) // launch.devices)))
    folder = tempfile.mkdtemp(prefix="littrainer-")
    config = LaunchConfig(
        min_nodes=launch.nodes,
        max_nodes=launch.nodes,
        nproc_per_node=launch.devices,
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=folder),
        **_meeting_of_agents(launch),
    )
    # The agent replaces names after a dollar sign.
    arguments = [argument.replace("$", "$$") for argument in command[1:]]
    try:
        elastic_launch(config, command[0])(*arguments)
    except ChildFailedError as error:
        rank, failure = _root_cause(error.failures)
        print(f"littrainer: {_failure_in_words(rank, launch, failure)}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else ENDED_BY_SIGNAL - failure.exitcode
    except SignalException as error:
        # The processes have ended by then. Whoever started this one sees that a signal has ended it.
        signal.signal(error.sigval, signal.SIG_DFL)
        shutil.rmtree(folder, ignore_errors=True)
        os.kill(os.getpid(), error.sigval)
    except (RuntimeError, OSError) as error:
        raise LaunchError(
            f"the launchers of {launch.nodes} machine{'' if launch.nodes == 1 else 's'} have not found each other at "
            f"{launch.main_address or LOCAL_ADDRESS}:{launch.main_port or USUAL_PORT}: "
            f"{_in_one_line(error)}; start the same command on each machine, with another --node-rank"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _grace_seconds(launch: Launch) -> int:
    try:
        seconds = whole_number(GRACE, SECONDS_TO_SAVE) if launch.grace_seconds is None else launch.grace_seconds
    except ValueError as error:
        raise LaunchError(str(error)) from error
    if seconds < 0:
        raise LaunchError(
            f"--grace {seconds}: give the seconds that processes may take to save and end, 0 or more, here or in the "
            f"environment variable {GRACE}"
        )
    return seconds


def _meeting_of_agents(launch: Launch) -> dict[str, Any]:
    if launch.nodes == 1:
        # An address that needs no name service; port 0 is any free one.
        return {
            "rdzv_backend": "c10d",
            "rdzv_endpoint": f"{LOCAL_ADDRESS}:{launch.main_port or 0}",
            "run_id": str(uuid.uuid4()),
            "local_addr": LOCAL_ADDRESS,
        }
    return {
        "rdzv_backend": "static",
        "rdzv_endpoint": f"{launch.main_address}:{launch.main_port or USUAL_PORT}",
        "rdzv_configs": {"rank": launch.node_rank},
        "run_id": "littrainer",
    }


def _root_cause(failures: dict[int, Any]) -> tuple[int, Any]:
    """Return the failure that came first, and not because another process had failed."""

    def order(entry: tuple[int, Any]) -> tuple[bool, int, int]:
        rank, failure = entry
        was_ended = failure.exitcode == -signal.SIGTERM or bool(failure.error_file_data.get(CONSEQUENCE))
        return was_ended, failure.timestamp, rank

    return min(failures.items(), key=order)


def _failure_in_words(rank: int, launch: Launch, failure: Any) -> str:
    how = f"was ended by {failure.signal_name()}" if failure.exitcode < 0 else f"ended with status {failure.exitcode}"
    node = f"node {launch.node_rank}, " if launch.nodes > 1 else ""
    report = failure.error_file_data.get("message")
    reported = report.get("message", "") if isinstance(report, dict) else ""
    why = f": {_in_one_line(reported)}" if failure.exitcode > 0 and reported else ""
    return (
        f"process {rank} of {launch.world_size} ({node}local rank {failure.local_rank}, pid {failure.pid}) {how}{why}; "
        f"the others{' of this machine' if launch.nodes > 1 else ''} were ended too"
    )


def _in_one_line(message: object) -> str:
    text = " ".join(str(message).split())
    return text if len(text) <= LONGEST_MESSAGE else f"{text[:LONGEST_MESSAGE]} ..."


def _is_taken(port: int) -> bool:
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        if os.name == "posix":
            # As the store itself binds: a port that a process has just left counts as free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False
