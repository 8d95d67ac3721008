"""Processes that begin with the libraries imported: forks of a process that has only imported them.

Changes that a page's code makes to its process (a redirection, environment variables, working folder, seeds, loggers)
end with the process, and the imports take their seconds once.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe
from typing import Any

from tests.docs.blocks import ROOT

LIBRARIES = (
    "torch",
    "lightning.pytorch",
    "datasets",
    "torchmetrics",
    "torchmetrics.classification",
    "transformers.models.bert.modeling_bert",
    "transformers.models.auto.modeling_auto",
    "littrainer.trainer",
    "littrainer.seq2seq",
    "tests.docs.page_run",
)
"""None of them imports transformers' trainer, whose names `littrainer run` has to redirect before they are taken."""
PAGE_TIMEOUT_SECONDS = 1200


class Forks:
    """Starts processes for functions, each a fork of a process that only waits for orders."""

    def __init__(self, orders: Connection) -> None:
        self._orders = orders

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        folder: str | None = None,
        environment: dict[str, str] | None = None,
        log: str | None = None,
        seconds: int = PAGE_TIMEOUT_SECONDS,
    ) -> int:
        """Call the function in a separate process and wait for its end.

        Parameters:
            function: found by its name there.
            folder: where it works; here, by default.
            environment: its variables; those of this process, by default.
            log: a file for standard output and error; they are those of the forked process, by default.
            seconds: how long it may take, with the processes that it starts.

        Returns:
            The exit status as `subprocess` has it; 1 after an exception, whose traceback is on standard error.
        """
        where = folder or os.getcwd()
        variables = dict(os.environ) if environment is None else environment
        self._orders.send((function, arguments, where, variables, log, seconds))
        return self._orders.recv()

    @classmethod
    @contextlib.contextmanager
    def is_this_process(cls) -> Iterator[Forks]:
        """Forks of this process as it is."""
        here, there = Pipe()
        process = os.fork()
        if process == 0:
            here.close()
            _leave(lambda: _serve(there))
        there.close()
        try:
            yield cls(here)
        finally:
            # Closing the pipe is not enough: child processes may have inherited its end.
            here.send(None)
            os.waitpid(process, 0)


@contextlib.contextmanager
def forks_of_a_fresh_process() -> Iterator[Forks]:
    """Forks of a new process that has imported `LIBRARIES`."""
    here, there = Pipe()
    command = [sys.executable, "-m", "tests.docs.forks", str(there.fileno())]
    with subprocess.Popen(command, cwd=ROOT, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL) as process:
        there.close()
        try:
            yield Forks(here)
        finally:
            here.send(None)
            process.wait()


def _serve(orders: Connection) -> None:
    """Execute orders until there is none, or the sender has ended."""
    while True:
        try:
            order = orders.recv()
        except EOFError:
            return
        if order is None:
            return
        function, arguments, folder, environment, log, seconds = order
        process = os.fork()
        if process == 0:
            orders.close()
            os.setpgid(0, 0)
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(environment)
            if log is not None:
                for descriptor in (1, 2):
                    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), descriptor)
            _leave(functools.partial(function, *arguments))
        # A deadline for the process and its children.
        killer = threading.Timer(seconds, _kill_group, [process])
        killer.start()
        _, status = os.waitpid(process, 0)
        killer.cancel()
        killer.join()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process, signal.SIGKILL)
        orders.send(os.waitstatus_to_exitcode(status))


def _kill_group(process: int) -> None:
    os.write(2, b"the time for this is over\n")
    os.killpg(process, signal.SIGKILL)


def _leave(function: Callable[[], Any]) -> None:
    """Call the function and end the process, as an interpreter ends after its script."""
    status = 0
    try:
        function()
    except SystemExit as exit_:
        if isinstance(exit_.code, str):
            print(exit_.code, file=sys.stderr)
        status = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    with contextlib.suppress(Exception):
        import atexit

        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    for name in LIBRARIES:
        importlib.import_module(name)
    _leave(lambda: _serve(Connection(int(sys.argv[1]))))
