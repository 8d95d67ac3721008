"""Launcher of several processes with torch's elastic agent."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from littrainer.distributed.environment import (
    DEFAULT_GRACE_S,
    DEFAULT_PORT,
    GRACE,
    LOCAL_ADDRESS,
    MAX_PORT,
    REPORTS,
    TRAININGS,
    read_env_int,
)
from littrainer.distributed.failures import CONSEQUENCE, HEARTBEAT_FILE, HUNG_FILE, STACKS_FILE, STEP, is_running

# Exit status of a program that a signal ended: this plus the signal's number.
ENDED_BY_SIGNAL = 128
# If unset, the agent logs nothing, and a line on stderr summarizes a failure.
AGENT_LOG_LEVEL = "LOGLEVEL"
THREADS = "OMP_NUM_THREADS"
MAX_MESSAGE_LETTERS = 500
# Time to write stacks before a hanging process is killed.
STACKS_TIMEOUT_S = 2.0
# Time to end after a reported hang.
MIN_ENDING_TIMEOUT_S = 30.0


class LaunchError(Exception):
    """An error in starting the processes; the message is a line with advice."""


@dataclass(frozen=True)
class Launch:
    """Processes to start, and their rendezvous address.

    Parameters:
        devices: number of processes on this node.
        main_address: address of the first machine; None: this machine, with a single node.
        main_port: port there; None: any free port with a single node, else torchrun's default.
        grace_seconds: time to end after a signal; None: from the environment.
        min_devices: minimum number of processes after failures; None: `devices`.
        hang_seconds: time without a heartbeat after which a process is ended; None: never.
    """

    devices: int
    nodes: int = 1
    node_rank: int = 0
    main_address: str | None = None
    main_port: int | None = None
    grace_seconds: int | None = None
    min_devices: int | None = None
    restarts: int = 0
    hang_seconds: float | None = None

    @property
    def world_size(self) -> int:
        return self.devices * self.nodes

    @property
    def reduced_devices(self) -> int | None:
        """Next smaller number of processes that divides the global batch equally, or None."""
        counts = range(self.min_devices or self.devices, self.devices)
        return max((count for count in counts if self.devices % count == 0), default=None)

    @property
    def is_watched(self) -> bool:
        """True if the processes write reports for restarts or the detection of hangs."""
        return bool(self.restarts) or self.hang_seconds is not None


@dataclass(frozen=True)
class Failure:
    """Failure that ended a launch.

    Parameters:
        message: a line about the process that failed first.
        status: exit status of the command.
        rank: rank of that process; None if it did not respond.
        was_killed: whether it was ended by a signal, or did not respond.
        error: type and message of its exception, if reported.
        step: optimizer step of the exception, if a training raised it.
    """

    message: str
    status: int
    rank: int | None = None
    was_killed: bool = False
    error: str = ""
    step: int | None = None
    stacks: str = ""


def check_launch(launch: Launch) -> None:
    devices, nodes, minimum, port = launch.devices, launch.nodes, launch.min_devices, launch.main_port
    option = f"--devices {minimum}:{devices}"
    refused = {
        f"--devices {devices}: give the number of processes on this node, 1 or more": devices < 1,
        f"--nodes {nodes}: give the number of machines, 1 or more": nodes < 1,
        f"--node-rank {launch.node_rank}: with --nodes {nodes} the machines are numbered from 0 to {nodes - 1}": (
            not 0 <= launch.node_rank < nodes
        ),
        f"{option}: give MIN:MAX, both 1 or more, and MIN not above MAX": (
            minimum is not None and not 0 < minimum <= devices
        ),
        f"{option} needs --restarts N; give it too, or one number": minimum is not None and not launch.restarts,
        "--restarts takes a number from 0 up, and --hang-timeout seconds from 1 up": (
            launch.restarts < 0 or not (launch.hang_seconds is None or launch.hang_seconds >= 1)
        ),
        "--restarts, --hang-timeout and --devices MIN:MAX are about the processes of one machine, and --nodes "
        f"{nodes} asks for several; let the scheduler start the job again, and the script call "
        'train(resume_from_checkpoint="auto")': nodes > 1 and (launch.is_watched or minimum is not None),
        f"--main-port {port} is no port; it has to be from 1 to {MAX_PORT}": (
            port is not None and not 0 < port <= MAX_PORT
        ),
        f"--nodes {nodes} needs --main-address: the address of the first machine, the same on each machine": (
            nodes > 1 and launch.main_address is None
        ),
    }
    for message, is_refused in refused.items():
        if is_refused:
            raise LaunchError(message)
    _get_grace_seconds(launch)
    if nodes > 1 and port is None:
        port = DEFAULT_PORT
    if port is not None and launch.node_rank == 0 and _is_port_in_use(port):
        raise LaunchError(
            f"port {port} is in use on this machine; choose another one by --main-port, or stop what uses it"
        )


def run_processes(
    launch: Launch, command: list[str], restart: Callable[[Failure], Launch | None] = lambda failure: None
) -> int:
    """Run a command in several processes, with torchrun's variables, until all have ended.

    If a process fails, the others are ended, and a line on stderr names it. A signal that ends this process ends all.

    Parameters:
        command: the python interpreter and its arguments.
        restart: returns the next launch after a failure, or None to stop.

    Returns:
        0, or the exit status of the process that failed first; 128 plus the signal's number if a signal ended it.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    if AGENT_LOG_LEVEL not in os.environ:
        logging.disable()
    os.environ[GRACE] = str(_get_grace_seconds(launch))
    if launch.devices > 1:
        os.environ.setdefault(THREADS, str(max(1, (os.cpu_count() or 1) // launch.devices)))
    folder = tempfile.mkdtemp(prefix="littrainer-")
    if launch.is_watched:
        os.environ[TRAININGS] = os.path.join(folder, "trainings.json")
    next_launch: Launch | None = launch
    status = 0
    try:
        while next_launch is not None:
            failure = _run_once(next_launch, command, tempfile.mkdtemp(dir=folder))
            if failure is None:
                return 0
            print(f"littrainer: {failure.message}", file=sys.stderr, flush=True)
            status = failure.status
            next_launch = restart(failure)
    except SignalException as error:
        # All processes have ended. End by the same signal, so that the parent sees it.
        signal.signal(error.sigval, signal.SIG_DFL)
        shutil.rmtree(folder, ignore_errors=True)
        os.kill(os.getpid(), error.sigval)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return status


def _run_once(launch: Launch, command: list[str], folder: str) -> Failure | None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher import LaunchConfig, elastic_launch

    if launch.is_watched:
        os.environ[REPORTS] = f"{os.getpid()}:{folder}"
    config = LaunchConfig(
        min_nodes=launch.nodes,
        max_nodes=launch.nodes,
        nproc_per_node=launch.devices,
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=folder),
        **_get_rendezvous_settings(launch),
    )
    # The agent replaces names after a dollar sign.
    arguments = [argument.replace("$", "$$") for argument in command[1:]]
    failures: dict[int, Any] = {}
    with _end_processes_without_heartbeat(Path(folder), launch.hang_seconds) as ended:
        try:
            elastic_launch(config, command[0])(*arguments)
        except ChildFailedError as error:
            failures = error.failures
        except (RuntimeError, OSError) as error:
            raise LaunchError(
                f"the launchers of {launch.nodes} machine{'' if launch.nodes == 1 else 's'} have not found each other "
                f"at {launch.main_address or LOCAL_ADDRESS}:{launch.main_port or DEFAULT_PORT}: "
                f"{_join_lines(error)}; start the same command on each machine, with another --node-rank"
            ) from error
    for pid in {*ended, *(failure.pid for failure in failures.values())} if sys.platform != "win32" else ():
        # A stopped loader process must continue to notice that its parent has ended.
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGCONT)
    files = {path.stem.rpartition("-")[2]: path.read_text() for path in sorted(Path(folder).glob(f"{STACKS_FILE}-*"))}
    stacks = "".join(f"---- process {rank} ----\n{text}" for rank, text in files.items() if text)
    if ended:
        message = "; ".join(f"pid {pid} {reason} and was ended" for pid, reason in sorted(ended.items()))
        return Failure(message, ENDED_BY_SIGNAL + signal.SIGTERM, was_killed=True, stacks=stacks)
    if not failures:
        return None
    rank, failure = _root_cause(failures)
    was_killed = failure.exitcode < 0
    return Failure(
        _describe_failure(rank, launch, failure),
        ENDED_BY_SIGNAL - failure.exitcode if was_killed else failure.exitcode,
        rank,
        was_killed,
        "" if was_killed else _get_reported_error(failure),
        failure.error_file_data.get(STEP),
        stacks,
    )


@contextlib.contextmanager
def _end_processes_without_heartbeat(folder: Path, seconds: float | None) -> Iterator[dict[int, str]]:
    """End processes whose heartbeat stops, or that hang at their end; yield their ids and the reasons."""
    ended: dict[int, str] = {}
    if seconds is None:
        yield ended
        return
    is_over = threading.Event()
    limits = {HEARTBEAT_FILE: seconds, HUNG_FILE: max(seconds, MIN_ENDING_TIMEOUT_S)}
    # File -> its last modification, and when this process first saw it.
    heartbeats: dict[Path, tuple[int, float]] = {}

    def watch() -> None:
        while not is_over.wait(min(1.0, seconds / 4)):
            for path in [path for kind in limits for path in folder.glob(f"{kind}-*")]:
                with contextlib.suppress(OSError):
                    check_file(path)

    def check_file(path: Path) -> None:
        modified = path.stat().st_mtime_ns
        kind, _, number = path.name.rpartition("-")
        pid = int(number)
        if path not in heartbeats or heartbeats[path][0] != modified:
            heartbeats[path] = modified, time.monotonic()
        elif time.monotonic() - heartbeats[path][1] >= limits[kind] and is_running(pid):
            ended[pid] = f"has not responded for {limits[kind]:g} s (--hang-timeout)"
            end(pid)

    def end(pid: int) -> None:
        os.kill(pid, signal.SIGTERM)
        if sys.platform != "win32":
            # A stopped process must continue to write its stacks.
            os.kill(pid, signal.SIGCONT)
            if not is_over.wait(STACKS_TIMEOUT_S) and is_running(pid):
                os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield ended
    finally:
        is_over.set()
        thread.join()


def _get_grace_seconds(launch: Launch) -> int:
    try:
        seconds = read_env_int(GRACE, DEFAULT_GRACE_S) if launch.grace_seconds is None else launch.grace_seconds
    except ValueError as error:
        raise LaunchError(str(error)) from error
    if seconds < 0:
        raise LaunchError(
            f"--grace {seconds}: give the seconds that processes may take to save and end, 0 or more, here or in the "
            f"environment variable {GRACE}"
        )
    return seconds


def _get_rendezvous_settings(launch: Launch) -> dict[str, Any]:
    if launch.nodes == 1:
        # Localhost needs no name service; port 0 is any free port.
        return {
            "rdzv_backend": "c10d",
            "rdzv_endpoint": f"{LOCAL_ADDRESS}:{launch.main_port or 0}",
            "run_id": str(uuid.uuid4()),
            "local_addr": LOCAL_ADDRESS,
        }
    return {
        "rdzv_backend": "static",
        "rdzv_endpoint": f"{launch.main_address}:{launch.main_port or DEFAULT_PORT}",
        "rdzv_configs": {"rank": launch.node_rank},
        "run_id": "littrainer",
    }


def _root_cause(failures: dict[int, Any]) -> tuple[int, Any]:
    """Return rank and failure of the process that failed first, unless another caused it."""

    def order(item: tuple[int, Any]) -> tuple[bool, int, int]:
        rank, failure = item
        was_ended = failure.exitcode == -signal.SIGTERM or bool(failure.error_file_data.get(CONSEQUENCE))
        return was_ended, failure.timestamp, rank

    return min(failures.items(), key=order)


def _describe_failure(rank: int, launch: Launch, failure: Any) -> str:
    how = f"was ended by {failure.signal_name()}" if failure.exitcode < 0 else f"ended with status {failure.exitcode}"
    node = f"node {launch.node_rank}, " if launch.nodes > 1 else ""
    error = _get_reported_error(failure)
    reason = f": {_join_lines(error)}" if failure.exitcode > 0 and error else ""
    suffix = f"; the others{' of this machine' if launch.nodes > 1 else ''} were ended too"
    process = f"process {rank} of {launch.world_size} ({node}local rank {failure.local_rank}, pid {failure.pid})"
    return f"{process} {how}{reason}{suffix if launch.world_size > 1 else ''}"


def _get_reported_error(failure: Any) -> str:
    report = failure.error_file_data.get("message")
    return str(report.get("message", "")) if isinstance(report, dict) else ""


def _join_lines(message: object) -> str:
    text = " ".join(str(message).split())
    return text if len(text) <= MAX_MESSAGE_LETTERS else f"{text[:MAX_MESSAGE_LETTERS]} ..."


def _is_port_in_use(port: int) -> bool:
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        if os.name == "posix":
            # The store binds in the same way: a port that was just released counts as free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False
