"""With this folder in PYTHONPATH and SIMULATED_GPUS set, a Python process has simulated GPUs once it imports torch.

torch reads its CUDA hooks early, so that the device is installed right after torch, before anything else queries it.
"""

import importlib.abc
import importlib.util
import os
import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[3])


class InstallAfterTorch(importlib.abc.MetaPathFinder):
    """Installs the simulated device when the module `torch` has been executed."""

    is_searching = False

    def find_spec(self, name, path=None, target=None):
        if name != "torch" or self.is_searching:
            return None
        self.is_searching = True
        try:
            spec = importlib.util.find_spec("torch")
        finally:
            self.is_searching = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_install(module):
            execute(module)
            sys.path.append(ROOT)
            try:
                from tests.simulated_gpu.torch_cuda import install
            finally:
                sys.path.remove(ROOT)
            install()

        spec.loader.exec_module = execute_and_install
        return spec


if os.environ.get("SIMULATED_GPUS"):
    sys.meta_path.insert(0, InstallAfterTorch())
