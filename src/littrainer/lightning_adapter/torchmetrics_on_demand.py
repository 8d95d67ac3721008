"""Loading Lightning without what torchmetrics loads with it.

Lightning needs two base classes of torchmetrics. The package that they lie in loads all of its metrics, and for some of
these scipy and the models of transformers, where they are installed: more CPU time than `import torch` takes, for a
training that may use neither. So a package that has not run stands in `sys.modules` while Lightning is imported, and is
taken out then. Whoever imports torchmetrics afterwards imports it as any other package, by the import system's own ways
with names, threads and failures; only that it runs in the module that Lightning got, which has the parts loaded for it.
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
# The base class and its tools import each other, which works out where the tools come first.
COMES_FIRST = "torchmetrics.utilities"
# What Lightning takes from the package -> where it lies.
NEEDED_BY_LIGHTNING = {
    "Metric": "torchmetrics.metric",
    "MetricCollection": "torchmetrics.collections",
    "__version__": "torchmetrics.__about__",
}
# The logger that these parts take from the package.
LOGGER = "_logger"

# Nothing is imported by who holds it.
_taking_out = threading.Lock()


@contextlib.contextmanager
def torchmetrics_on_demand() -> Iterator[None]:
    """Within it Lightning may be imported; torchmetrics as a whole is loaded when it is next imported after that.

    Where torchmetrics is loaded already, nothing is different.
    """
    package = None if PACKAGE in sys.modules else _not_yet_run()
    # Another thread may have begun to import it meanwhile.
    if package is None or sys.modules.setdefault(PACKAGE, package) is not package:
        yield
        return
    sys.meta_path.insert(0, _RunsInTheSameModule(package))
    try:
        yield
    finally:
        _take_out(package)


def _not_yet_run() -> ModuleType | None:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.loader is None:
        return None
    package = importlib.util.module_from_spec(spec)
    if type(package) is not ModuleType:
        # Somebody else has ideas about when it is loaded.
        return None
    package.__class__ = _NotYetRun
    return package


def _take_out(package: ModuleType) -> None:
    with _taking_out:
        if type(package) is not ModuleType and sys.modules.get(PACKAGE) is package:
            del sys.modules[PACKAGE]


class _NotYetRun(ModuleType):
    """The package for Lightning: the parts that it loads are loaded one by one."""

    def __getattr__(self, name: str) -> Any:
        if type(self) is not ModuleType and not _can_be_had(name, self):
            _take_out(self)
            importlib.import_module(PACKAGE)
        try:
            return self.__dict__[name]
        except KeyError:
            raise AttributeError(f"module {PACKAGE!r} has no attribute {name!r}") from None


class _RunsInTheSameModule:
    """Finds the package, and loads it, where it is imported after Lightning."""

    def __init__(self, package: ModuleType) -> None:
        assert package.__spec__ is not None, f"{PACKAGE} was made from its spec"
        self.package, self.own_spec = package, package.__spec__

    def __getattr__(self, name: str) -> Any:
        # What else the package's loader can do.
        return getattr(self.own_spec.loader, name)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != PACKAGE:
            return None
        spec = copy.copy(self.own_spec)
        spec.loader = self  # type: ignore[assignment]
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self.package.__class__ = ModuleType
        return self.package

    def exec_module(self, module: ModuleType) -> None:
        loader = self.own_spec.loader
        assert module.__spec__ is not None and loader is not None, f"{PACKAGE} was made from its spec"
        module.__spec__.loader = loader
        loader.exec_module(module)
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)


def _can_be_had(name: str, package: ModuleType) -> bool:
    if name == LOGGER:
        package.__dict__[name] = logging.getLogger(PACKAGE)
        return True
    if name not in NEEDED_BY_LIGHTNING:
        return False
    try:
        importlib.import_module(COMES_FIRST)
        package.__dict__[name] = getattr(importlib.import_module(NEEDED_BY_LIGHTNING[name]), name)
    except (ImportError, AttributeError):
        # Another release may have it elsewhere; the package as a whole knows.
        return False
    return True
