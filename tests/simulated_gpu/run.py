"""Runs a function of a module in a process with simulated GPUs.

    python -m tests.simulated_gpu.run MODULE FUNCTION FILE [WORD ...]

The words are its arguments, and its result is pickled to FILE.
"""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fidelity.conftest import ROOT
from tests.scenarios.other_processes import MAX_WAIT_SECONDS


def run_on_gpu(function: Callable[..., Any], folder: Path, environment: dict[str, str], *arguments: str) -> Any:
    """Run a module's function in a separate process, and return its result."""
    result = folder / f"{'-'.join([function.__name__, *arguments])}.pickle"
    command = [sys.executable, "-m", __name__, function.__module__, function.__name__, str(result), *arguments]
    finished = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=MAX_WAIT_SECONDS, check=False
    )
    if finished.returncode:
        pytest.fail(f"{function.__name__} failed on the simulated GPU:\n{finished.stderr[-6000:]}", pytrace=False)
    return pickle.loads(result.read_bytes())


if __name__ == "__main__":
    module, function, file, *arguments = sys.argv[1:]
    Path(file).write_bytes(pickle.dumps(getattr(importlib.import_module(module), function)(*arguments)))
