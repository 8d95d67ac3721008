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

# A shell reports a program that a signal has ended by this number and the signal's.
ENDED_BY_SIGNAL = 128
# Whoever sets it wants to read what the agent does; else one sentence at the end says what has to be known of it.
AGENT_LOG_LEVEL = "LOGLEVEL"
THREADS = "OMP_NUM_THREADS"
MAX_MESSAGE_LETTERS = 500
# In which a process that does not respond may write the stacks of its threads, before it is killed.
STACKS_TIMEOUT_S = 2.0
# In which a process that a hang ends may at least end by itself.
MIN_ENDING_TIMEOUT_S = 30.0


class LaunchError(Exception):
    """The processes cannot be started; the message is one line that says what to do."""


@dataclass(frozen=True)
class Launch:
    """The processes to start, and the address at which they meet.

    Parameters:
        devices: processes on this node, one for each device.
        nodes: machines that take part.
        node_rank: index of this machine.
        main_address: address of the first machine; None is this one, and for one node only.
        main_port: port there; None takes a free port on one node, and torchrun's on several.
        grace_seconds: seconds to end after a signal, before processes are killed; None takes the environment's.
        min_devices: processes that are enough after failures; None is as many as at first.
        restarts: number of restarts.
        hang_seconds: seconds after which a process that does not respond is ended; None never ends one.
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
        """Number of all processes."""
        return self.devices * self.nodes

    @property
    def reduced_devices(self) -> int | None:
        """The next smaller number of processes that may share the same global batch; None if there is none."""
        numbers = range(self.min_devices or self.devices, self.devices)
        return max((number for number in numbers if self.devices % number == 0), default=None)

    @property
    def is_watched(self) -> bool:
        """Whether the processes report where they stood when one has failed, and may be started again."""
        return bool(self.restarts) or self.hang_seconds is not None


@dataclass(frozen=True)
class Failure:
    """The failure that ended processes that were started together.

    Parameters:
        words: one line about the process that failed first.
        status: exit status for the command.
        rank: of that process; None if it did not respond.
        was_killed: it ended by a signal, or because it did not respond.
        error: type and message of its exception; empty if it reported none.
        step: the optimizer step of the exception, if a training raised it.
        stacks: stacks of the threads of the processes, as far as they have written them.
    """

    words: str
    status: int
    rank: int | None = None
    was_killed: bool = False
    error: str = ""
    step: int | None = None
    stacks: str = ""


def check_launch(launch: Launch) -> None:
    """Refuse what cannot be started."""
    devices, nodes, fewest, port = launch.devices, launch.nodes, launch.min_devices, launch.main_port
    asked = f"--devices {fewest}:{devices}"
    refused = {
        f"--devices {devices}: give the number of processes on this node, 1 or more": devices < 1,
        f"--nodes {nodes}: give the number of machines, 1 or more": nodes < 1,
        f"--node-rank {launch.node_rank}: with --nodes {nodes} the machines are numbered from 0 to {nodes - 1}": (
            not 0 <= launch.node_rank < nodes
        ),
        f"{asked}: give MIN:MAX, both 1 or more, and MIN not above MAX": (
            fewest is not None and not 0 < fewest <= devices
        ),
        f"{asked} needs --restarts N; give it too, or one number": fewest is not None and not launch.restarts,
        "--restarts takes a number from 0 up, and --hang-timeout seconds from 1 up": (
            launch.restarts < 0 or not (launch.hang_seconds is None or launch.hang_seconds >= 1)
        ),
        "--restarts, --hang-timeout and --devices MIN:MAX are about the processes of one machine, and --nodes "
        f"{nodes} asks for several; let the scheduler start the job again, and the script call "
        'train(resume_from_checkpoint="auto")': nodes > 1 and (launch.is_watched or fewest is not None),
        f"--main-port {port} is no port; it has to be from 1 to {MAX_PORT}": (
            port is not None and not 0 < port <= MAX_PORT
        ),
        f"--nodes {nodes} needs --main-address: the address of the first machine, the same on each machine": (
            nodes > 1 and launch.main_address is None
        ),
    }
    for complaint, is_wrong in refused.items():
        if is_wrong:
            raise LaunchError(complaint)
    _grace_seconds(launch)
    if nodes > 1 and port is None:
        port = DEFAULT_PORT
    if port is not None and launch.node_rank == 0 and _is_port_in_use(port):
        raise LaunchError(
            f"port {port} is in use on this machine; choose another one by --main-port, or stop what uses it"
        )


def run_processes(
    launch: Launch, command: list[str], restart: Callable[[Failure], Launch | None] = lambda failure: None
) -> int:
    """Run one command in several processes, with torchrun's variables, until all have ended.

    When a process fails the others are ended, and a line on stderr names it. Signals that end this process end all.

    Parameters:
        command: the python interpreter, and what it runs.
        restart: is called after a failure, and returns what to start next; None ends it.

    Returns:
        0, or the exit status of the process that failed first; 128 and the signal's number if a signal ended it.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    if AGENT_LOG_LEVEL not in os.environ:
        logging.disable()
    os.environ[GRACE] = str(_grace_seconds(launch))
    if launch.devices > 1:
        os.environ.setdefault(THREADS, str(max(1, (os.cpu_count() or 1) // launch.devices)))
    folder = tempfile.mkdtemp(prefix="littrainer-")
    if launch.is_watched:
        os.environ[TRAININGS] = os.path.join(folder, "trainings.json")
    following: Launch | None = launch
    status = 0
    try:
        while following is not None:
            failure = _run_once(following, command, tempfile.mkdtemp(dir=folder))
            if failure is None:
                return 0
            print(f"littrainer: {failure.message}", file=sys.stderr, flush=True)
            status, following = failure.status, restart(failure)
    except SignalException as error:
        # The processes have ended by then. Whoever started this one sees that a signal has ended it.
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
                f"{_in_one_line(error)}; start the same command on each machine, with another --node-rank"
            ) from error
    for number in {*ended, *(failure.pid for failure in failures.values())} if sys.platform != "win32" else ():
        # A loader process that was stopped has to continue to see that its parent has ended.
        with contextlib.suppress(OSError):
            os.killpg(number, signal.SIGCONT)
    files = {path.stem.rpartition("-")[2]: path.read_text() for path in sorted(Path(folder).glob(f"{STACKS_FILE}-*"))}
    stacks = "".join(f"---- process {number} ----\n{text}" for number, text in files.items() if text)
    if ended:
        words = "; ".join(f"pid {number} {why} and was ended" for number, why in sorted(ended.items()))
        return Failure(words, ENDED_BY_SIGNAL + signal.SIGTERM, was_killed=True, stacks=stacks)
    if not failures:
        return None
    rank, failure = _root_cause(failures)
    was_killed = failure.exitcode < 0
    return Failure(
        _describe_failure(rank, launch, failure),
        ENDED_BY_SIGNAL - failure.exitcode if was_killed else failure.exitcode,
        rank,
        was_killed,
        "" if was_killed else _reported(failure),
        failure.error_file_data.get(STEP),
        stacks,
    )


@contextlib.contextmanager
def _end_processes_without_heartbeat(folder: Path, seconds: float | None) -> Iterator[dict[int, str]]:
    """End processes that no longer touch their heartbeat file, or do not end; yields their numbers, and why."""
    ended: dict[int, str] = {}
    if seconds is None:
        yield ended
        return
    is_over = threading.Event()
    limits = {HEARTBEAT_FILE: seconds, HUNG_FILE: max(seconds, MIN_ENDING_TIMEOUT_S)}
    # File -> its time, and when this process saw that time first.
    seen: dict[Path, tuple[int, float]] = {}

    def watch() -> None:
        while not is_over.wait(min(1.0, seconds / 4)):
            for path in [path for kind in limits for path in folder.glob(f"{kind}-*")]:
                with contextlib.suppress(OSError):
                    check_file(path)

    def check_file(path: Path) -> None:
        time_of_file = path.stat().st_mtime_ns
        kind, _, number = path.name.rpartition("-")
        if path not in seen or seen[path][0] != time_of_file:
            seen[path] = time_of_file, time.monotonic()
        elif time.monotonic() - seen[path][1] >= limits[kind] and is_running(int(number)):
            ended[int(number)] = f"has not answered for {limits[kind]:g} s (--hang-timeout)"
            end(int(number))

    def end(number: int) -> None:
        os.kill(number, signal.SIGTERM)
        if sys.platform != "win32":
            # A stopped process has to continue to write its stacks.
            os.kill(number, signal.SIGCONT)
            if not is_over.wait(STACKS_TIMEOUT_S) and is_running(number):
                os.kill(number, signal.SIGKILL)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield ended
    finally:
        is_over.set()
        thread.join()


def _grace_seconds(launch: Launch) -> int:
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
        # An address that needs no name service; port 0 is any free one.
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
    """Return the failure that came first, and not because another process had failed."""

    def order(entry: tuple[int, Any]) -> tuple[bool, int, int]:
        rank, failure = entry
        was_ended = failure.exitcode == -signal.SIGTERM or bool(failure.error_file_data.get(CONSEQUENCE))
        return was_ended, failure.timestamp, rank

    return min(failures.items(), key=order)


def _describe_failure(rank: int, launch: Launch, failure: Any) -> str:
    how = f"was ended by {failure.signal_name()}" if failure.exitcode < 0 else f"ended with status {failure.exitcode}"
    node = f"node {launch.node_rank}, " if launch.nodes > 1 else ""
    reported = _reported(failure)
    why = f": {_in_one_line(reported)}" if failure.exitcode > 0 and reported else ""
    others = f"; the others{' of this machine' if launch.nodes > 1 else ''} were ended too"
    return (
        f"process {rank} of {launch.world_size} ({node}local rank {failure.local_rank}, pid {failure.pid}) {how}{why}"
        f"{others if launch.world_size > 1 else ''}"
    )


def _reported(failure: Any) -> str:
    report = failure.error_file_data.get("message")
    return str(report.get("message", "")) if isinstance(report, dict) else ""


def _in_one_line(message: object) -> str:
    text = " ".join(str(message).split())
    return text if len(text) <= MAX_MESSAGE_LETTERS else f"{text[:MAX_MESSAGE_LETTERS]} ..."


def _is_port_in_use(port: int) -> bool:
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        if os.name == "posix":
            # As the store itself binds: a port that a process has just left counts as free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False
