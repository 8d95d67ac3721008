"""What torch says of itself and of the devices, asked in a process of its own: a broken driver may end that process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

GIB = 1 << 30
SECONDS = 120
BACK_ENDS = ("gloo", "nccl", "mpi", "ucc", "xccl")
# Imports what this process would, wherever it was started.
PROGRAM = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from littrainer.installation.devices import answer
answer()
"""


def start() -> subprocess.Popen[str]:
    """Begin to ask; `read` has the answer."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(sys.path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace")


def read(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Name of a fact -> the fact in words; where torch cannot be imported, `error` says why."""
    try:
        printed, complaints = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"error": f"import torch and the look at its devices took more than {SECONDS} seconds"}
    try:
        # Libraries may print before.
        return dict(json.loads(printed.splitlines()[-1]))
    except (IndexError, ValueError, TypeError):
        said = (complaints.strip().splitlines() or ["nothing was said"])[-1]
        status = process.returncode
        how = f"signal {-status}" if status < 0 else f"status {status}"
        return {"error": f"import torch ended its process with {how}: {said}"}


def answer() -> None:
    """Print the facts as JSON."""
    found: dict[str, Any] = {}
    try:
        import torch
    except Exception as error:
        found["error"] = f"import torch fails with {type(error).__name__}: {error}"
    else:
        for name, ask in FACTS.items():
            try:
                fact = ask(torch)
            except Exception as error:
                fact = f"cannot be found out ({type(error).__name__}: {error})"
            if fact:
                found[name] = fact
    print(json.dumps(found))


def _build(torch: Any) -> str:
    kinds = (("CUDA", torch.version.cuda), ("ROCm", torch.version.hip), ("XPU", getattr(torch.version, "xpu", None)))
    built = [f"{kind} {version}" for kind, version in kinds if version]
    return f"{torch.__version__}, built for {' and '.join(built) or 'CPUs alone'}"


def _cudnn(torch: Any) -> str:
    return str(torch.backends.cudnn.version() or "") if torch.version.cuda else ""


def _nccl(torch: Any) -> str:
    if not torch.version.cuda or not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))


def _devices(torch: Any) -> list[str]:
    found = []
    for kind in ("cuda", "xpu"):
        module: Any = getattr(torch, kind, None)
        for number in range(module.device_count() if module is not None and module.is_available() else 0):
            about = module.get_device_properties(number)
            capability = f", compute capability {about.major}.{about.minor}" if kind == "cuda" else ""
            found.append(f"{kind}:{number} {about.name}, {about.total_memory / GIB:.1f} GiB{capability}")
    if torch.backends.mps.is_available():
        found.append("mps")
    return found or ["cpu alone"]


def _back_ends(torch: Any) -> str:
    if not torch.distributed.is_available():
        return "none: torch was built without torch.distributed"
    built = [name for name in BACK_ENDS if getattr(torch.distributed, f"is_{name}_available", bool)()]
    return ", ".join(built) or "none"


def _threads(torch: Any) -> str:
    return f"{torch.get_num_threads()} within operations, {torch.get_num_interop_threads()} between them"


def _instructions(torch: Any) -> str:
    return str(torch.backends.cpu.get_cpu_capability())


FACTS: dict[str, Callable[[Any], Any]] = {
    "build": _build,
    "devices": _devices,
    "cuDNN": _cudnn,
    "NCCL": _nccl,
    "distributed back ends": _back_ends,
    "threads": _threads,
    "CPU instructions": _instructions,
}
