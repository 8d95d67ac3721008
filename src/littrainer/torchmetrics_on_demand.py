"""Loading Lightning without what torchmetrics loads beside it.

Lightning needs two base classes of torchmetrics. The package that they lie in loads all of its metrics, and for some of
these scipy and the models of transformers, where they are installed: more CPU time than `import torch` takes, for a
training that may use neither. So the package stands in `sys.modules` as a module that has not run yet. It runs before
anybody imports a name from it or a further part of it, asks for a name that Lightning does not need, looks through its
names, or sets one; from then on it is an ordinary module. What differs from the lazy modules of `importlib.util` is that
what Lightning needs can be had without running it, and that threads wait for each other by the import system's lock.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

# A lock of our own would make a deadlock with those that the import system holds while it loads parts of the package.
_import_system: Any = importlib._bootstrap  # type: ignore[attr-defined]
# The names of a module, whatever its class says about them.
_names_of: Callable[[ModuleType], dict[str, Any]] = ModuleType.__dict__["__dict__"].__get__


@contextmanager
def torchmetrics_on_demand() -> Iterator[None]:
    """Within it Lightning may be imported; torchmetrics as a whole is loaded when it is first used after that.

    Where torchmetrics is loaded already, nothing is different.
    """
    package = None if PACKAGE in sys.modules else _not_yet_run()
    # Another thread may have begun to import it meanwhile.
    if package is None or sys.modules.setdefault(PACKAGE, package) is not package:
        yield
        return
    try:
        yield
    finally:
        with _lock_of_package() as is_held:
            if is_held and type(package) is _OpenToLightning:
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
        if _is_running(self) or not _can_be_had(name, self):
            _run(self)
        try:
            return _names_of(self)[name]
        except KeyError:
            raise AttributeError(f"module {PACKAGE!r} has no attribute {name!r}") from None


class _RunsWhenUsed(_OpenToLightning):
    """The package from then on."""

    @property
    def __path__(self) -> Any:  # type: ignore[override]
        """Asked for before any name or further part is imported from the package."""
        _run(self)
        return _names_of(self)["__path__"]

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        """For `vars`, and for `dir` and `inspect.getmembers`, which ask for it too."""
        _run(self)
        return _names_of(self)

    def __setattr__(self, name: str, value: Any) -> None:
        # Else the package would set the name once more when it runs.
        _run(self)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        _run(self)
        super().__delattr__(name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # What pickles modules knows them by their class.
        return importlib.import_module, (PACKAGE,)


def _can_be_had(name: str, package: ModuleType) -> bool:
    if name == LOGGER:
        _names_of(package)[name] = logging.getLogger(PACKAGE)
        return True
    if name not in NEEDED_BY_LIGHTNING:
        return False
    try:
        importlib.import_module(COMES_FIRST)
        _names_of(package)[name] = getattr(importlib.import_module(NEEDED_BY_LIGHTNING[name]), name)
    except (ImportError, AttributeError):
        # Another release may have it elsewhere; the package as a whole knows.
        return False
    return True


def _is_running(package: ModuleType) -> bool:
    return getattr(package.__spec__, "_initializing", False)


def _run(package: ModuleType) -> None:
    """Run the package, or wait for the thread that does; that one itself goes on with the names there are."""
    spec: Any = package.__spec__
    with _lock_of_package() as is_held:
        if not is_held or _is_running(package) or type(package) is ModuleType:
            return
        # With this, the import statements of other threads wait too.
        spec._initializing = True
        try:
            spec.loader.exec_module(package)
            ModuleType.__setattr__(package, "__class__", ModuleType)
        finally:
            spec._initializing = False


@contextmanager
def _lock_of_package() -> Iterator[bool]:
    """Hold the import system's lock, or not where its holder waits for this thread: as if the package had been run."""
    lock = _import_system._ModuleLockManager(PACKAGE)
    try:
        lock.__enter__()
    except _import_system._DeadlockError:
        yield False
        return
    try:
        yield True
    finally:
        lock.__exit__(None, None, None)
