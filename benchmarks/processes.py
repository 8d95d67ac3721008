"""The processes that the sides run in, and asking them to measure."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .benchmark import Benchmark, Case, Measured, Processes
from .sides import ROOT, Side

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# Of processes that are kept.
RANKS = {Processes.KEPT: 1, Processes.PAIR: 2}


def environment_of(side: Side) -> dict[str, str]:
    """One thread, no network, and the side's own folder first on the path."""
    path = [str(side.folder)] if side.folder else []
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join([*path, str(ROOT)])}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class SideProcess:
    """A process of a side, or several that train together, which measure when they are asked.

    Parameters:
        side: Decides on the path; sides of the same library and folder may share a process.
        ranks: How many processes; more than one get the variables that torchrun sets.
        loads: Whether it imports the side's library at once, and not when it is first needed.
    """

    def __init__(self, side: Side, ranks: int = 1, *, loads: bool = False) -> None:
        self.errors = [tempfile.TemporaryFile("w+") for _ in range(ranks)]  # noqa: SIM115 (closed by end)
        port = str(free_port()) if ranks > 1 else ""
        self.processes = []
        for rank, errors in enumerate(self.errors):
            environment = environment_of(side)
            if ranks > 1:
                environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": port}
                environment |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
            command = [sys.executable, "-m", "benchmarks.side_process", *([side.library] if loads else [])]
            self.processes.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    env=environment,
                    cwd=ROOT,
                )
            )

    def measure(self, benchmark: Benchmark, side: Side, settings: dict[str, Any]) -> Measured:
        """What the first of the processes measures.

        Raises:
            RuntimeError: one of them failed; says on what, with the end of what it printed.
        """
        request = json.dumps([benchmark.name, side.name, side.library, side.variant, settings])
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(request + "\n")
                process.stdin.flush()
        return self.answers(f"{benchmark.name} failed on {side.name}, {settings}")[0]

    def wait_until_loaded(self, side: Side) -> None:
        """Wait for the import that was asked for.

        Raises:
            RuntimeError: it failed.
        """
        self.answers(f"{side.library} cannot be imported")

    def answers(self, failure: str) -> list[Any]:
        """The next line of each process."""
        lines = []
        for process, errors in zip(self.processes, self.errors, strict=True):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                errors.seek(0)
                raise RuntimeError(f"{failure}:\n{errors.read()[-4000:]}")
            lines.append(json.loads(line))
        return lines

    def end(self) -> None:
        """Close the requests, upon which the processes end by themselves."""
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process, errors in zip(self.processes, self.errors, strict=True):
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
            errors.close()


class Sides:
    """The processes of one run, started when they are first needed and kept for later cases."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, Path | None, int], SideProcess] = {}

    def start(self, case: Case, sides: Sequence[Side]) -> None:
        """Start those processes of a case that are not there, all at once, and wait until they have loaded."""
        if case.processes not in RANKS:
            return
        ranks = RANKS[case.processes]
        started = []
        for side in sides:
            key = side.library, side.folder, ranks
            if key not in self.kept:
                self.kept[key] = SideProcess(side, ranks, loads=True)
                started.append((side, self.kept[key]))
        for side, process in started:
            process.wait_until_loaded(side)

    def measure(self, benchmark: Benchmark, case: Case, side: Side) -> Measured:
        if case.processes is Processes.NONE:
            return benchmark.measure(side, **case.settings)
        if case.processes is Processes.FRESH:
            process = SideProcess(side)
            try:
                return process.measure(benchmark, side, case.settings)
            finally:
                process.end()
        self.start(case, [side])
        key = side.library, side.folder, RANKS[case.processes]
        try:
            return self.kept[key].measure(benchmark, side, case.settings)
        except BaseException:
            self.kept.pop(key).end()
            raise

    def end_all(self) -> None:
        while self.kept:
            self.kept.popitem()[1].end()


@contextlib.contextmanager
def side_processes() -> Iterator[Sides]:
    """Processes of sides, ended afterwards."""
    sides = Sides()
    try:
        yield sides
    finally:
        sides.end_all()
