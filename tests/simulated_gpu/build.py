"""Builds the extension once for each environment, torch release and source: `python -m tests.simulated_gpu.build`."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType

SOURCES = Path(__file__).parent / "extension"
NAME = "simulated_gpu_extension"
COMPILER_FLAGS = ["-O1", "-g0", "-w"]
TESTED_TORCH = "2.13"


def reason_to_skip() -> str:
    """Return why the extension cannot be built here, or an empty text."""
    import torch

    if torch.version.cuda is not None and torch.backends.cuda.is_built():
        return "this build of torch has CUDA kernels of its own"
    if not torch.__version__.startswith(TESTED_TORCH):
        return f"the simulated GPU is written for torch {TESTED_TORCH}, and this is {torch.__version__}"
    if not build_path().exists() and shutil.which(os.environ.get("CXX", "g++")) is None:
        return "the simulated GPU is a C++ extension, and there is no g++ (Debian, Ubuntu: apt-get install g++)"
    return ""


def build_path() -> Path:
    """Return the path of the extension: in the environment, named after everything that it is built from."""
    import torch

    digest = hashlib.sha256(f"{torch.__version__} {sys.version} {COMPILER_FLAGS}".encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    return Path(sys.prefix, "simulated-gpu", digest.hexdigest()[:16], f"{NAME}.so")


def build_extension() -> Path:
    """Compile the extension if it is not there yet (up to three minutes), and return its path."""
    path = build_path()
    if path.exists():
        return path
    from torch.utils import cpp_extension

    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / "lock").open("w") as lock:
        # Several workers of the tests may start at once.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            building = path.parent / "build"
            building.mkdir(exist_ok=True)
            cpp_extension.load(
                NAME,
                [str(SOURCES / "extension.cpp")],
                build_directory=str(building),
                extra_cflags=COMPILER_FLAGS,
                is_python_module=False,
            )
            (building / path.name).replace(path)
            shutil.rmtree(building)
    return path


def load_extension() -> ModuleType:
    """Import the extension, which is built if it is not there yet."""
    spec = importlib.util.spec_from_file_location(NAME, build_extension())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    print(reason_to_skip() or f"the simulated GPU of the tests is {build_extension()}")
