"""Loading Lightning without what torchmetrics loads beside it.

Lightning needs two base classes of torchmetrics. The package that they lie in loads all of its metrics, and for some of
these scipy and the models of transformers, where they are installed: more CPU time than `import torch` takes, for a
training that may use neither. So the package stands in `sys.modules` as a module that has not run yet, as those of
`importlib.util.LazyLoader` do. It runs when a name that Lightning does not need, or a further part of it, is asked for.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import sys
import threading
from collections.abc import Iterator
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

_lock = threading.RLock()


@contextlib.contextmanager
def torchmetrics_on_demand() -> Iterator[None]:
    """Within it Lightning may be imported; torchmetrics as a whole is loaded when it is first used after that.

    Where torchmetrics is loaded already, nothing is different.
    """
    package = None if PACKAGE in sys.modules else _not_yet_run()
    if package is None:
        yield
        return
    sys.modules[PACKAGE] = package
    try:
        yield
    finally:
        if type(package) is _OpenToLightning:
            package.__class__ = _RunsWhenUsed


def _not_yet_run() -> ModuleType | None:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.loader is None:
        return None
    package = importlib.util.module_from_spec(spec)
    if type(package) is not ModuleType:
        # Somebody else has ideas about when it is loaded.
        return None
    package.__class__ = _OpenToLightning
    return package


class _OpenToLightning(ModuleType):
    """The package while Lightning is being imported: the parts that Lightning loads are loaded one by one."""

    def __getattr__(self, name: str) -> Any:
        with _lock:
            if type(self) is not ModuleType and not _can_be_had(name, self):
                _run(self)
        try:
            return self.__dict__[name]
        except KeyError:
            raise AttributeError(f"module {PACKAGE!r} has no attribute {name!r}") from None


class _RunsWhenUsed(_OpenToLightning):
    """The package from then on: it runs before any further part of it is imported, as packages do."""

    @property
    def __path__(self) -> Any:  # type: ignore[override]
        with _lock:
            if type(self) is not ModuleType:
                _run(self)
        return self.__dict__["__path__"]


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


def _run(package: ModuleType) -> None:
    kind, spec = type(package), package.__spec__
    assert spec is not None and spec.loader is not None, f"{PACKAGE} was made from its spec"
    package.__class__ = ModuleType
    try:
        spec.loader.exec_module(package)
    except BaseException:
        package.__class__ = kind
        raise
