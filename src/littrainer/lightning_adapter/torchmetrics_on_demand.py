"""An import of Lightning without torchmetrics' metrics.

Lightning needs two base classes of torchmetrics, whose package also imports scipy and models of transformers, slower
than `import torch`. So a placeholder is in `sys.modules` while Lightning is imported. A later `import torchmetrics`
runs the package in the same module object.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import logging
import sys
import threading
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGE = "torchmetrics"
# Imported first, since the base class and its utilities import each other.
COMES_FIRST = "torchmetrics.utilities"
NEEDED_BY_LIGHTNING = {
    "Metric": "torchmetrics.metric",
    "MetricCollection": "torchmetrics.collections",
    "__version__": "torchmetrics.__about__",
}
LOGGER = "_logger"

# Never held during an import.
_removal_lock = threading.Lock()


@contextlib.contextmanager
def torchmetrics_on_demand() -> Iterator[None]:
    package = None if PACKAGE in sys.modules else _make_placeholder()
    # Another thread may import the package.
    if package is None or sys.modules.setdefault(PACKAGE, package) is not package:
        yield
        return
    sys.meta_path.insert(0, _PlaceholderFinder(package))
    try:
        yield
    finally:
        _remove(package)


def _make_placeholder() -> ModuleType | None:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.loader is None:
        return None
    package = importlib.util.module_from_spec(spec)
    if type(package) is not ModuleType:
        # Another tool loads the package lazily.
        return None
    package.__class__ = _Placeholder
    return package


def _remove(package: ModuleType) -> None:
    with _removal_lock:
        if type(package) is not ModuleType and sys.modules.get(PACKAGE) is package:
            del sys.modules[PACKAGE]


class _Placeholder(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if type(self) is not ModuleType and not _load_name(name, self):
            _remove(self)
            importlib.import_module(PACKAGE)
        try:
            return self.__dict__[name]
        except KeyError:
            raise AttributeError(f"module {PACKAGE!r} has no attribute {name!r}") from None


class _PlaceholderFinder:
    """A finder and loader that runs the package in the placeholder."""

    def __init__(self, package: ModuleType) -> None:
        assert package.__spec__ is not None, f"{PACKAGE} was made from its spec"
        self.package = package
        self.spec = package.__spec__

    def __getattr__(self, name: str) -> Any:
        return getattr(self.spec.loader, name)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != PACKAGE:
            return None
        spec = copy.copy(self.spec)
        spec.loader = self  # type: ignore[assignment]
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self.package.__class__ = ModuleType
        return self.package

    def exec_module(self, module: ModuleType) -> None:
        loader = self.spec.loader
        assert module.__spec__ is not None and loader is not None, f"{PACKAGE} was made from its spec"
        module.__spec__.loader = loader
        loader.exec_module(module)
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)


def _load_name(name: str, package: ModuleType) -> bool:
    if name == LOGGER:
        package.__dict__[name] = logging.getLogger(PACKAGE)
        return True
    if name not in NEEDED_BY_LIGHTNING:
        return False
    try:
        importlib.import_module(COMES_FIRST)
        package.__dict__[name] = getattr(importlib.import_module(NEEDED_BY_LIGHTNING[name]), name)
    except (ImportError, AttributeError):
        # Another layout: load the whole package.
        return False
    return True
