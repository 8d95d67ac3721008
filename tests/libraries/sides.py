"""Runs an unchanged script on both sides, `python script.py` and `littrainer run script.py`, and reads what it left.

A side's record is made of files that any training script writes: the log histories in `trainer_state.json`, weights in
`*.safetensors`, numbers in `*results.json`.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

import littrainer
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
        files: paths of all files, files that only littrainer writes left out.
        own_files: paths of files that only littrainer writes.
        values: path of a file -> name in it -> a tensor, or a value of JSON.
        output: what the script printed.
    """

    files: set[str]
    own_files: set[str]
    values: dict[str, dict[str, Any]]
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
    own_paths = {name for name, path in names.items() if path.name in LITTRAINER_FILES}
    values = {name: values_in(path) for name, path in names.items() if holds_values(path)}
    return SideRecord(set(names) - own_paths, own_paths, values, output)


def holds_values(path: Path) -> bool:
    """Return whether a file's content is compared."""
    return path.suffix == ".safetensors" or path.name == "trainer_state.json" or path.name.endswith("results.json")


def values_in(path: Path) -> dict[str, Any]:
    """Return the values of a file by name, without durations."""
    if path.suffix == ".safetensors":
        return dict(load_file(path))
    content = json.loads(path.read_text())
    if path.name == "trainer_state.json":
        state = {name: value for name, value in content.items() if name not in ("log_history", "stateful_callbacks")}
        # Log entries are numbered, since several may belong to a step.
        logs = {f"log {number}": entry for number, entry in enumerate(content["log_history"])}
        content = {**state, **logs}
    return dict(_flat(content))


def _flat(content: Any, name: str = "") -> list[tuple[str, Any]]:
    if isinstance(content, dict | list):
        items = content.items() if isinstance(content, dict) else enumerate(content)
        return [pair for key, value in items for pair in _flat(value, f"{name} / {key}" if name else str(key))]
    return [] if any(part in name for part in TIMES) else [(name, content)]


def described(both: Both) -> list[str]:
    """Return a line for each file that a side lacks and each value that differs, with both values if they are short."""
    lines = [
        f"{path}: only {'ours' if path in both.ours.files else 'theirs'}"
        for path in sorted(both.ours.files ^ both.theirs.files)
    ]
    for path in sorted(both.ours.values.keys() & both.theirs.values.keys()):
        ours, theirs = both.ours.values[path], both.theirs.values[path]
        for name in sorted(ours.keys() | theirs.keys()):
            pair = ours.get(name, "absent"), theirs.get(name, "absent")
            if not are_equal(*pair):
                is_tensor = any(isinstance(value, torch.Tensor) for value in pair)
                lines.append(f"{path}: {name}" + ("" if is_tensor else f": ours {pair[0]}, theirs {pair[1]}"))
    return lines


def are_equal(item: Any, other: Any) -> bool:
    """Return whether two values are equal bit for bit."""
    if isinstance(item, torch.Tensor) and isinstance(other, torch.Tensor):
        return item.dtype == other.dtype and torch.equal(item, other)
    are_nan = isinstance(item, float) and isinstance(other, float) and math.isnan(item) and math.isnan(other)
    return are_nan or bool(item == other)
