"""Stand-ins for optimizer libraries: modules whose classes note what they were made with."""

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
    """Plain gradient descent that keeps the keywords it was made with."""

    def __init__(self, params: Any, lr: float = 0.1, **keywords: Any) -> None:
        self.given = params
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
    """Put a stand-in for a library into this process, for us and for transformers, until the test ends.

    What bitsandbytes' manager is told to keep in 32 bits comes into the list that is returned.

    Make training arguments and models beforehand: transformers looks around for libraries while it makes them.

    Parameters:
        library: the name it is imported by.
    """
    for name, classes in CLASSES.items():
        if name.split(".")[0] != library:
            continue
        module = add_module(monkeypatch, name)
        for class_name in classes:
            setattr(module, class_name, type(class_name, (Recording,), {"__module__": name}))
    overrides: list[Any] = []
    manager = SimpleNamespace(register_module_override=lambda *given: overrides.append(given))
    if library == "bitsandbytes":
        found: Any = sys.modules["bitsandbytes.optim"]
        found.GlobalOptimManager = SimpleNamespace(get_instance=lambda: manager)
    theirs = transformers.trainer_optimizer
    for name in vars(theirs).copy():
        if name.startswith("is_") and name.endswith("_available"):
            monkeypatch.setattr(theirs, name, lambda *_: True)
    versions = SimpleNamespace(metadata=SimpleNamespace(version=lambda name: "99.0"))
    monkeypatch.setattr(theirs, "importlib", versions)
    return overrides


def add_module(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    """An empty module of this name, and its parents, until the test ends."""
    module = ModuleType(name)
    module.__path__ = []
    monkeypatch.setitem(sys.modules, name, module)
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(add_module(monkeypatch, parent), last, module)
    return module


def find(home: str) -> Any:
    """The stand-in class at "module:class"."""
    module, name = home.split(":")
    return getattr(importlib.import_module(module), name)
