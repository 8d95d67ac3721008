"""Runs an unchanged script on both sides, `python script.py` and `littrainer run script.py`, and reads what it left.

A side's record is made of files that any training script writes: the log histories in `trainer_state.json`, weights in
`*.safetensors`, numbers in `*results.json`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file

import littrainer
from tests.fidelity.first_difference import first_difference
from tests.libraries.small_models import write_models

SCRIPTS = Path(__file__).parent / "scripts"
SOURCE_ROOT = Path(littrainer.__file__).parents[1]
PYTHON = Path(__file__).parents[2] / ".venv" / "libraries" / "bin" / "python"
"""The interpreter of an environment that has the libraries."""
needs_libraries = pytest.mark.skipif(not PYTHON.exists(), reason="`make test-all` installs TRL and others")
LIMIT_SECONDS = 600
SHOWN_CHARACTERS = 6000
# Files that only a checkpoint of littrainer has.
LITTRAINER_FILES = (
    "littrainer_manifest.json",
    "littrainer_resume.pt",
    "littrainer_run.json",
    "littrainer_trained_beside_adapters.pt",
)
# Parts of the names of logged durations.
TIMES = ("runtime", "per_second", "step_time", "preparation_time", "profiling/")


class SideRecord(NamedTuple):
    """A script's results on a side: paths of files and their values.

    Attributes:
        own_files: paths of files that only littrainer writes.
        values: path of each other file -> its compared content, or None.
        output: what the script printed.
    """

    own_files: set[str]
    values: dict[str, Any]
    output: str


class Both(NamedTuple):
    """The records of the two sides."""

    ours: SideRecord
    theirs: SideRecord


@dataclass
class _Side:
    name: str
    folder: Path
    process: subprocess.Popen[str]

    def output(self) -> str:
        try:
            return self.process.communicate(timeout=LIMIT_SECONDS)[0]
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()

    def failure(self, output: str) -> str:
        code = self.process.returncode
        return f"{self.name} ended with status {code}:\n{output[-SHOWN_CHARACTERS:]}\n" if code else ""


def run_both(program: str | Sequence[str], folder: Path) -> Both:
    """Run a program on both sides at once, each in a separate folder with small models in `models`.

    Parameters:
        program: the name of a script in `scripts/`, or what follows `python` or `littrainer run` on a command line.
        folder: an empty folder.

    Raises:
        AssertionError: a side ended with an error; its output is in the message.
    """
    write_models(folder / "models")
    command = [str(SCRIPTS / program)] if isinstance(program, str) else [*program]
    started = [
        _started("theirs", command, folder),
        _started("ours", ["-m", "littrainer", "run", *command], folder, PYTHONPATH=str(SOURCE_ROOT)),
    ]
    outputs = [side.output() for side in started]
    failures = [side.failure(output) for side, output in zip(started, outputs, strict=True)]
    assert not any(failures), "".join(failures)
    theirs, ours = (read_folder(side.folder, output) for side, output in zip(started, outputs, strict=True))
    return Both(ours, theirs)


def _started(name: str, command: list[str], folder: Path, **environment: str) -> _Side:
    cwd = folder / name
    shutil.copytree(folder / "models", cwd / "models")
    retained = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    settings = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "HF_HOME": str(folder / f"cache of {name}"),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    process = subprocess.Popen(
        [PYTHON, *command],
        cwd=cwd,
        env={**retained, **settings, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return _Side(name, cwd, process)


def read_folder(folder: Path, output: str = "") -> SideRecord:
    """Read what a script left in the folder that it ran in."""
    paths = [
        path for path in folder.rglob("*") if path.is_file() and "models" not in path.relative_to(folder).parts[:1]
    ]
    names = {path.relative_to(folder).as_posix(): path for path in paths}
    own_files = {name for name, path in names.items() if path.name in LITTRAINER_FILES}
    values = {name: read_values(path) for name, path in names.items() if name not in own_files}
    return SideRecord(own_files, values, output)


def read_values(path: Path) -> Any:
    """Return the weights, or the numbers without durations, in a file; None if it has neither."""
    if path.suffix == ".safetensors":
        return load_file(path)
    if path.name == "trainer_state.json" or path.name.endswith("results.json"):
        content = json.loads(path.read_text())
        content.pop("stateful_callbacks", None)
        return drop_times(content)
    return None


def drop_times(content: Any) -> Any:
    if isinstance(content, dict):
        return {name: drop_times(value) for name, value in content.items() if not any(part in name for part in TIMES)}
    return [drop_times(value) for value in content] if isinstance(content, list) else content


def list_differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Return a line for each file that a side lacks, and for the first difference in each other file."""
    lines = [f"{path}: only {'ours' if path in ours else 'theirs'}" for path in sorted(ours.keys() ^ theirs.keys())]
    differences = {path: first_difference(theirs[path], ours[path]) for path in sorted(ours.keys() & theirs.keys())}
    return lines + [f"{path}{difference}" for path, difference in differences.items() if difference]
