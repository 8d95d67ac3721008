"""Modules that replace a service's client and record its calls."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest


class Calls(list[tuple[Any, ...]]):
    """Calls in order: (name, positional arguments, keywords)."""

    def recorder(self, name: str, result: Any = None) -> Any:
        """Return a function that records its calls under a name, and returns `result`."""

        def record(*args: Any, **kwargs: Any) -> Any:
            self.append((name, args, kwargs))
            return result

        return record

    def select(self, name: str) -> list[tuple[Any, ...]]:
        """Return the calls of a name."""
        return [call for call in self if call[0] == name]


class Recorder:
    """An object whose methods record their calls."""

    def __init__(self, calls: Calls, name: str = "") -> None:
        self.calls, self.name = calls, name

    def __getattr__(self, name: str) -> Any:
        return self.calls.recorder(f"{self.name}.{name}" if self.name else name)


def install_module(patch: pytest.MonkeyPatch, name: str, **members: Any) -> ModuleType:
    """Install a module and its parent packages until the test ends."""
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        fullname = ".".join(parts[:length])
        if length < len(parts) and fullname in sys.modules:
            continue
        module = ModuleType(fullname)
        module.__spec__ = ModuleSpec(fullname, None, is_package=True)
        module.__path__ = []
        patch.setitem(sys.modules, fullname, module)
        if length > 1:
            setattr(sys.modules[".".join(parts[: length - 1])], parts[length - 1], module)
    for member, value in members.items():
        setattr(module, member, value)
    return module
