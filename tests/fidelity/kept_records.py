"""Records of transformers' side, kept from one run of the tests to the next until what they depend on changes."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import pickle
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fidelity.differences import read_record
from tests.fidelity.scenarios import SCENARIOS

TESTS = Path(__file__).resolve().parents[1]

HARNESS = ("fidelity/*.py", "scenarios/*.py", "distributed/*fidelity*.py")
"""What the records of every scenario depend on; the number of threads stands there too."""


@functools.cache
def machine() -> str:
    """Versions of Python, the system's libraries and all packages, and what the CPU can do."""
    packages = sorted(f"{package.name} {package.version}" for package in importlib.metadata.distributions())
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    cpu = sorted({line for line in lines if line.startswith(("model", "stepping", "flags", "CPU", "Features"))})
    return repr((sys.version, platform.platform(), platform.processor(), cpu, packages))


def with_imported_cases(case: Path) -> set[Path]:
    """A file of scenarios, and the others that it takes something from."""
    imported = re.findall(r"tests\.fidelity\.cases(?:\.| import )(\w+)", case.read_text(encoding="utf-8"))
    return {case}.union(*(with_imported_cases(case.with_name(f"{name}.py")) for name in imported))


def key_of(name: str) -> str:
    """The hash of all that a scenario's records depend on."""
    run = SCENARIOS[name].run
    case = getattr(run, "func", run).__module__.rpartition(".")[2]
    files = with_imported_cases(TESTS / "fidelity" / "cases" / f"{case}.py")
    files.update(path for pattern in HARNESS for path in TESTS.glob(pattern))
    digest = hashlib.sha256(machine().encode())
    for path in sorted(files):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class KeptRecords:
    """A file for each scenario, with its key and its records; what is kept under a new key replaces it.

    Parameters:
        folder: where the files are.
        processes: how many processes a scenario runs in, each of which leaves a record.
        fresh: whether to make all records anew.
    """

    folder: Path
    processes: int = 1
    fresh: bool = False

    def file(self, name: str) -> Path:
        return self.folder / f"{name}-{self.processes}"

    def put_into(self, run: Path, names: Iterable[str]) -> dict[str, str]:
        """Write kept records to the folder of a run.

        Returns:
            The scenarios that have none, with their keys as they are before the run.
        """
        missing = {}
        for name in names:
            key, file = key_of(name), self.file(name)
            kept_key, records = pickle.loads(file.read_bytes()) if file.exists() and not self.fresh else ("", {})
            if kept_key != key:
                missing[name] = key
                continue
            for place, content in records.items():
                (run / place).parent.mkdir(parents=True, exist_ok=True)
                (run / place).write_bytes(content)
        return missing

    def keep(self, run: Path, keys: Mapping[str, str]) -> None:
        """Keep what a run has recorded of scenarios under the keys that `put_into` gave, unless they raised."""
        for name, key in keys.items():
            files = [*run.glob(f"{name}.pickle"), *run.glob(f"rank*/{name}.pickle")]
            if len(files) == self.processes and not any(read_record(path.parent, name).error for path in files):
                records = {str(path.relative_to(run)): path.read_bytes() for path in files}
                # Another run of the tests may read or write the file at the same time.
                begun = self.folder / f"{name}-{self.processes}.{os.getpid()}"
                begun.write_bytes(pickle.dumps((key, records)))
                begun.replace(self.file(name))


def records_kept_in_cache(config: pytest.Config, otherwise: Path, processes: int = 1) -> KeptRecords:
    """The records in pytest's cache; if that is switched off, those in `otherwise`, the folder of this session."""
    folder = config.cache.mkdir("fidelity") if hasattr(config, "cache") else otherwise
    return KeptRecords(folder, processes, config.getoption("--fresh-oracle"))
