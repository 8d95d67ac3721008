"""The JSON file of a run: each round's raw figures, and the machine, versions and commit they are of."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .benchmark import Benchmark, Case, Measured
from .figures import Figures
from .sides import ROOT

FORMAT = 1
RECORDED = ROOT / "docs" / "benchmarks" / "record.json"
"""The run whose figures the documentation shows."""
LIBRARIES = ("torch", "lightning", "transformers", "accelerate", "datasets", "torchmetrics", "littrainer")
Record = dict[str, Any]


def machine() -> dict[str, Any]:
    """The machine by its processor, cores and memory."""
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": memory_gib(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def processor() -> str:
    described = Path("/proc/cpuinfo")
    if described.exists():
        for line in described.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def memory_gib() -> int | None:
    described = Path("/proc/meminfo")
    if not described.exists():
        return None
    kib = int(described.read_text().split("MemTotal:", 1)[1].split()[0])
    return round(kib / 2**20)


def versions() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit that is measured, with a plus where files differ from it; None outside of a repository."""
    # Optional locks would write, beside whoever works in the repository.
    git = ["git", "--no-optional-locks", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--", "src"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def new_record() -> Record:
    return {"format": FORMAT, "machine": machine(), "versions": versions(), "benchmarks": {}}


def read(path: Path) -> Record:
    """A record as it was written.

    Raises:
        ValueError: the file is none of this format.
    """
    record = json.loads(path.read_text())
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError(f"{path} is no record of benchmarks in format {FORMAT}; take it anew with --json.")
    return record


def begun_or_new(path: Path | None) -> Record:
    """The record in that file, so that single benchmarks can be taken anew; a new one where there is none.

    Raises:
        ValueError: it is of another machine or of other versions, whose figures do not stand beside these.
    """
    begun = new_record()
    if path is None or not path.exists():
        return begun
    found = read(path)
    for part in ("machine", "versions"):
        if found[part] != begun[part]:
            raise ValueError(f"{path} has figures of other {part}: {found[part]}, here {begun[part]}. Name a new file.")
    return found


def write(record: Record, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(json.dumps(rounded(record), indent=1) + "\n")
    unfinished.replace(path)


def rounded(value: Any) -> Any:
    """Six significant digits, which is more than any clock is good for."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def case_entry(case: Case, measured: dict[str, list[Measured]]) -> dict[str, Any]:
    return {
        "name": case.name,
        "title": case.title,
        "curve": case.curve,
        "processes": case.processes.name.lower(),
        "settings": case.settings,
        "rounds": measured,
    }


def benchmark_entry(cases: list[dict[str, Any]], sizes: str, seconds: float) -> dict[str, Any]:
    """A benchmark's part of the record.

    Parameters:
        sizes: full or short.
        seconds: that taking it took.
    """
    return {
        "taken": datetime.date.today().isoformat(),
        "commit": commit(),
        "sizes": sizes,
        "seconds": round(seconds),
        # What else ran: on a quiet machine about 1, which is this run.
        "load": os.getloadavg()[0],
        "cases": cases,
    }


def figures_of(record: Record, benchmark: Benchmark) -> Figures:
    return Figures(record["benchmarks"][benchmark.name], record["versions"])
