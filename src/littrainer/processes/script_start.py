"""A script that no launcher has started, on a machine with several GPUs: it is run again for each further one.

This process becomes the first; the others run the same command line, and come to the same place.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from types import ModuleType
from typing import TYPE_CHECKING, Any

from littrainer.processes import environment
from littrainer.processes.parent_watch import STARTED_BY

if TYPE_CHECKING:
    from littrainer.arguments.process import ProcessFacts

logger = logging.getLogger(__name__)

# Programs that run code of others: run again, they would do something else than this code.
HOSTS = frozenset(
    {
        "pytest",
        "py.test",
        "unittest",
        "ipykernel_launcher",
        "colab_kernel_launcher",
        "default_worker",
        "streamlit",
        "gunicorn",
        "uvicorn",
        "celery",
    }
)
# Where drivers of NVIDIA's and AMD's GPUs are found on Linux.
DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
# How long processes may take to end by themselves when another one has failed.
SECONDS_TO_END = 10.0
SECONDS_BETWEEN_LOOKS = 0.2

_told: set[str] = set()


def start_other_processes(args: ProcessFacts) -> None:
    """Run this script once more for each further GPU, unless a launcher has started it or one process is wanted.

    From then on this is process 0 of them. Where the code cannot be run again, as in a notebook, it stays alone.

    Parameters:
        args: training arguments; `use_cpu` counts.

    Raises:
        ValueError: the environment asks for a number of processes that cannot be.
    """
    if environment.is_launched() or getattr(args.accelerator_config, "use_configured_state", False):
        return
    count = wanted_processes(args)
    if count < 2:
        return
    reason = why_not_again(sys.modules["__main__"]) or _why_one_process_has_all_gpus()
    if reason is not None:
        _tell(
            f"There are {count} GPUs, and this process trains on one of them: {reason}. `littrainer run --devices "
            f"{count} script.py` trains on all of them; {environment.PROCESSES}=1 says that one is meant."
        )
        return
    _tell(
        f"Training on {count} devices in {count} processes, where transformers would use DataParallel: the script is "
        f"run once for each. {environment.PROCESSES}=1 trains on one device."
    )
    own = {
        environment.RANK: "0",
        environment.LOCAL_RANK: "0",
        environment.WORLD_SIZE: str(count),
        environment.LOCAL_WORLD_SIZE: str(count),
        environment.MAIN_ADDRESS: environment.LOCAL_ADDRESS,
        environment.MAIN_PORT: str(free_port()),
    }
    os.environ.update(own)
    command, folder = command_line(sys.modules["__main__"])
    others = {
        rank: subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            env={
                **os.environ,
                environment.RANK: str(rank),
                environment.LOCAL_RANK: str(rank),
                STARTED_BY: str(os.getpid()),
            },
        )
        for rank in range(1, count)
    }
    _Others(others).watch()


def wanted_processes(args: ProcessFacts) -> int:
    """How many processes a script is to have that nobody has launched.

    Raises:
        ValueError: the environment variable for it holds no number from 1 up.
    """
    if os.environ.get(environment.PROCESSES, "").strip():
        count = environment.whole_number(environment.PROCESSES, 1)
        if count < 1:
            raise ValueError(f"environment variable {environment.PROCESSES}={count} must be 1 or more.")
        return count
    if args.use_cpu or args.wants_cpu_by_environment():
        return 1
    if sys.platform == "linux" and "torch" not in sys.modules and not any(map(os.path.exists, DRIVERS)):
        # Arguments can be read in a moment, and loading torch takes a second.
        return 1
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 1


def why_not_again(main: ModuleType) -> str | None:
    """Why this program cannot be run again with the same effect; None where it can.

    Parameters:
        main: the module `__main__`.
    """
    if sys.flags.interactive or hasattr(sys, "ps1") or _is_notebook():
        return "a notebook or an interactive session cannot be run again in other processes"
    if multiprocessing.parent_process() is not None:
        return "it was started by multiprocessing"
    if threading.current_thread() is not threading.main_thread():
        return "the arguments are made in a thread, which cannot be run again in other processes"
    file: Any = getattr(main, "__file__", None)
    if file is None or not os.path.exists(file):
        return "there is no script file that could be run again in other processes"
    spec = main.__spec__
    name = os.path.basename(file).removesuffix(".py") if spec is None else spec.name.partition(".")[0]
    if name in HOSTS:
        return f"{name} cannot be run again in other processes"
    return None


def command_line(main: ModuleType) -> tuple[list[str], str]:
    """What starts this program again, and the working directory that it was started in.

    Parameters:
        main: the module `__main__`.
    """
    command = [sys.executable, *sys.orig_argv[1:]]
    file: Any = getattr(main, "__file__", None)
    given = next((argument for argument in sys.orig_argv[1:] if file and _names(argument, file)), None)
    if given is None:
        return command, os.getcwd()
    # The script may have changed its working directory since.
    return command, file[: -len(os.path.normpath(given))]


def free_port() -> int:
    """A port of this machine that nobody uses."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((environment.LOCAL_ADDRESS, 0))
        port: int = probe.getsockname()[1]
        return port


class _Others:
    """The processes that this one has started: all end when one fails, or when this one does.

    Parameters:
        processes: those with the higher ranks.
    """

    def __init__(self, processes: dict[int, subprocess.Popen[bytes]]):
        self._processes = processes
        self._starter = os.getpid()
        self._is_ending = threading.Event()

    def watch(self) -> None:
        """Look after them from now on."""
        threading.Thread(target=self._look_after, name="littrainer-processes", daemon=True).start()
        atexit.register(self._end)

    def _look_after(self) -> None:
        while not self._is_ending.wait(SECONDS_BETWEEN_LOOKS):
            failed = self._failed()
            if failed is None:
                continue
            # The error that the end of a process causes here says more, where this process is not stuck.
            if not self._is_ending.wait(SECONDS_TO_END):
                self._leave(failed)
            return

    def _failed(self) -> int | None:
        return next((rank for rank, process in self._processes.items() if process.poll()), None)

    def _leave(self, failed: int) -> None:
        status = self._processes[failed].returncode
        how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        self._stop()
        sys.stdout.flush()
        total = len(self._processes) + 1
        sys.stderr.write(f"littrainer: process {failed} of {total} {how}; the others were ended too\n")
        sys.stderr.flush()
        os._exit(status if status > 0 else 128 - status)

    def _end(self) -> None:
        """At the end of this process: wait for the others, or end them where an error has ended this one."""
        if os.getpid() != self._starter:
            return
        self._is_ending.set()
        if getattr(sys, "last_value", None) is not None:
            self._stop(after_seconds=SECONDS_TO_END)
            return
        while any(process.poll() is None for process in self._processes.values()):
            if self._failed() is not None:
                break
            time.sleep(SECONDS_BETWEEN_LOOKS)
        failed = self._failed()
        if failed is not None:
            self._leave(failed)

    def _stop(self, after_seconds: float = 0.0) -> None:
        self._wait(after_seconds)
        for ending in (signal.SIGTERM, getattr(signal, "SIGKILL", signal.SIGTERM)):
            for process in self._processes.values():
                if process.poll() is None:
                    process.send_signal(ending)
            self._wait(SECONDS_TO_END)

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(process.poll() is None for process in self._processes.values()):
            time.sleep(0.05)


def _names(argument: str, file: str) -> bool:
    """Whether an argument is the relative path of a file whose whole path is known."""
    path = os.path.normpath(argument)
    return not os.path.isabs(path) and not path.startswith(os.pardir) and file.endswith(os.sep + path)


def _is_notebook() -> bool:
    ipython: Any = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython, "get_ipython", lambda: None)() is not None


def _why_one_process_has_all_gpus() -> str | None:
    import torch

    if torch.cuda.is_initialized() and any(map(torch.cuda.memory_allocated, range(1, torch.cuda.device_count()))):
        return "the script has already put something on another GPU than the first, as a model that is spread over them"
    return None


def _tell(message: str) -> None:
    if message not in _told:
        _told.add(message)
        logger.warning(message)
