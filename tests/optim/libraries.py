"""Fake optimizer libraries: modules whose classes record their constructor arguments."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers.trainer_optimizer

CLASSES: dict[str, tuple[str, ...]] = {
    "bitsandbytes.optim": ("AdamW", "Lion", "RMSprop", "AdEMAMix"),
    "galore_torch": ("GaLoreAdamW", "GaLoreAdamW8bit", "GaLoreAdafactor"),
    "apollo_torch": ("APOLLOAdamW",),
    "lomo_optim": ("Lomo", "AdaLomo"),
    "grokadamw": ("GrokAdamW",),
    "schedulefree": ("AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"),
    "torchao.optim": ("AdamW4bit", "AdamW8bit"),
    "optimi": ("StableAdamW",),
    "torchdistx.optimizers": ("AnyPrecisionAdamW",),
    "torch_xla.amp.syncfree": ("AdamW",),
    "torch_npu.optim": ("NpuFusedAdamW",),
}
"""Module -> its optimizer classes."""


class Recording(torch.optim.Optimizer):
    """Plain gradient descent that records its constructor arguments."""

    def __init__(self, params: Any, lr: float = 0.1, **keywords: Any) -> None:
        self.params = params
        self.keywords = {"lr": lr, **keywords}
        parameters = params.parameters() if isinstance(params, torch.nn.Module) else params
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None, "libraries are tried with step() alone"
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.add_(parameter.grad, alpha=-group["lr"])


def install(monkeypatch: pytest.MonkeyPatch, library: str) -> list[Any]:
    """Install a fake library, for littrainer and transformers, until the test ends.

    Create training arguments and models before: transformers looks for installed libraries then.

    Parameters:
        library: its import name.

    Returns:
        the overrides that bitsandbytes' manager receives.
    """
    for name, classes in CLASSES.items():
        if name.split(".")[0] != library:
            continue
        module = add_module(monkeypatch, name)
        for class_name in classes:
            setattr(module, class_name, type(class_name, (Recording,), {"__module__": name}))
    overrides: list[Any] = []
    manager = SimpleNamespace(register_module_override=lambda *override: overrides.append(override))
    if library == "bitsandbytes":
        bitsandbytes: Any = sys.modules["bitsandbytes.optim"]
        bitsandbytes.GlobalOptimManager = SimpleNamespace(get_instance=lambda: manager)
    theirs = transformers.trainer_optimizer
    for name in vars(theirs).copy():
        if name.startswith("is_") and name.endswith("_available"):
            monkeypatch.setattr(theirs, name, lambda *_: True)
    versions = SimpleNamespace(metadata=SimpleNamespace(version=lambda name: "99.0"))
    monkeypatch.setattr(theirs, "importlib", versions)
    return overrides


def add_module(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    """Add an empty module, and its parents, until the test ends."""
    module = ModuleType(name)
    module.__path__ = []
    monkeypatch.setitem(sys.modules, name, module)
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(add_module(monkeypatch, parent), last, module)
    return module


def find(path: str) -> Any:
    """Return the fake class at "module:class"."""
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)
