"""Redirection of imports of transformers' Trainer API to littrainer.

A finder in `sys.meta_path` also redirects imports by transformers, which replaces its package object while it loads.
Child processes import this module, so it must load quickly.
"""

from __future__ import annotations

import gc
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from littrainer.redirection.names import DERIVED, REPLACED, WITHDRAWN, WITHDRAWN_FROM_PACKAGE

# Faster than an import of typing.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import MutableMapping, Sequence
    from typing import Any

PACKAGE = "transformers"
# Attribute of patched package classes.
_HAS_WITHDRAWN_NAMES = "_has_withdrawn_names"

PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
STARTUP_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "startup")
# Garbage collection threshold until a Trainer is made; the default of 700 costs a fifth of a script's startup time.
STARTUP_GC_THRESHOLD = 20_000
_default_gc_threshold = gc.get_threshold()[0]


class RedirectFinder:
    """Finder of shims for the modules in `REPLACED` and `WITHDRAWN`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == PACKAGE:
            spec = self._find_original_spec(fullname, path)
            if spec is not None and spec.loader is not None:
                _add_withdrawn_names_after_loading(spec)
            return spec
        if fullname not in REPLACED and fullname not in WITHDRAWN:
            return None
        original = self._find_original_spec(fullname, path)
        if original is None and fullname not in WITHDRAWN:
            return None
        from littrainer.redirection.shim import ShimLoader

        return ShimLoader(fullname, original).spec()

    def _find_original_spec(self, fullname: str, path: Sequence[str] | None) -> ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, None)
            if spec is not None:
                return spec
        return None


def is_installed() -> bool:
    return any(isinstance(finder, RedirectFinder) for finder in sys.meta_path)


def install() -> None:
    """Redirect transformers' Trainer API to littrainer in this process and its Python child processes.

    Repeated calls have no effect. A `RuntimeWarning` lists names that modules have imported before.
    """
    if not is_installed():
        sys.meta_path.insert(0, RedirectFinder())
        gc.set_threshold(STARTUP_GC_THRESHOLD, *gc.get_threshold()[1:])
        if any(name in sys.modules for name in (*REPLACED, *DERIVED)):
            from littrainer.redirection.already_imported import replace_early_imports

            replace_early_imports()
        if PACKAGE in sys.modules:
            add_withdrawn_names(sys.modules[PACKAGE])
    extend_to_children(os.environ)


def _add_withdrawn_names_after_loading(spec: ModuleSpec) -> None:
    loader: Any = spec.loader
    execute = loader.exec_module

    def execute_and_add(module: ModuleType) -> None:
        execute(module)
        # The package object may have been replaced.
        add_withdrawn_names(sys.modules.get(PACKAGE, module))

    loader.exec_module = execute_and_add


def add_withdrawn_names(package: ModuleType) -> None:
    """Add the withdrawn names to the class of a package object, since transformers replaces the object.

    A module-level `__getattr__` would never be called after that of the class.
    """
    kind: Any = type(package)
    if kind is ModuleType or _HAS_WITHDRAWN_NAMES in vars(kind):
        return
    get_attribute, names = kind.__getattr__, kind.__dir__

    def look_up(self: ModuleType, name: str) -> Any:
        if name not in WITHDRAWN_FROM_PACKAGE or self.__name__ != PACKAGE:
            return get_attribute(self, name)
        from littrainer.redirection.shim import load_target

        return load_target(WITHDRAWN_FROM_PACKAGE[name])

    def list_names(self: ModuleType) -> list[str]:
        return [*names(self), *(WITHDRAWN_FROM_PACKAGE if self.__name__ == PACKAGE else ())]

    setattr(kind, _HAS_WITHDRAWN_NAMES, True)
    kind.__getattr__, kind.__dir__ = look_up, list_names


def restore_gc_threshold() -> None:
    """Restore the default, unless the script has set another."""
    if gc.get_threshold()[0] == STARTUP_GC_THRESHOLD:
        gc.set_threshold(_default_gc_threshold, *gc.get_threshold()[1:])


def extend_to_children(environment: MutableMapping[str, str]) -> None:
    """Set PYTHONPATH in `environment`, so that Python processes import this package's `sitecustomize`."""
    previous = environment.get("PYTHONPATH")
    folders = [folder for folder in previous.split(os.pathsep) if folder != STARTUP_FOLDER] if previous else []
    if PACKAGE_ROOT not in folders and os.path.basename(PACKAGE_ROOT) not in ("site-packages", "dist-packages"):
        folders.append(PACKAGE_ROOT)
    environment["PYTHONPATH"] = os.pathsep.join([STARTUP_FOLDER, *folders])
