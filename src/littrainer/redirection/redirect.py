"""Makes `transformers.Trainer` and all that belongs to it mean littrainer's, however a script reaches it.

A finder in front of `sys.meta_path` handles the import of the modules in `littrainer.redirection.names`. It sits in the
import system rather than on the transformers package object because transformers replaces that object while it is being
imported, and because all imports of these modules, by transformers' own code too, go through it.

Every Python process that a script starts imports this module first: nothing heavy is imported here.
"""

from __future__ import annotations

import gc
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from littrainer.redirection.names import DERIVED, REPLACED, WITHDRAWN, WITHDRAWN_FROM_PACKAGE

TYPE_CHECKING = False
"""True for type checkers, for which alone the names below are imported."""

if TYPE_CHECKING:
    from collections.abc import MutableMapping, Sequence
    from typing import Any

PACKAGE = "transformers"
# Set on the class of package objects that have the withdrawn names.
_HAS_WITHDRAWN_NAMES = "_has_withdrawn_names"

PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
STARTUP_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "startup")
# New objects after which Python looks for garbage until a Trainer is made. With its usual 700, a fifth of the time in
# which a script imports its libraries and prepares its data goes there.
STARTUP_THRESHOLD = 20_000
_usual_threshold = gc.get_threshold()[0]


class RedirectFinder:
    """The entry of `sys.meta_path` that loads shims for the modules in `REPLACED` and `WITHDRAWN`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the shim for `fullname`, None if it is not redirected or transformers does not have it."""
        if fullname == PACKAGE:
            spec = self._original_spec(fullname, path)
            if spec is not None and spec.loader is not None:
                _add_withdrawn_names_after_loading(spec)
            return spec
        if fullname not in REPLACED and fullname not in WITHDRAWN:
            return None
        original = self._original_spec(fullname, path)
        if original is None and fullname not in WITHDRAWN:
            return None
        from littrainer.redirection.shim import ShimLoader

        return ShimLoader(fullname, original).spec()

    def _original_spec(self, fullname: str, path: Sequence[str] | None) -> ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, None)
            if spec is not None:
                return spec
        return None


def is_installed() -> bool:
    """Whether this process is redirected."""
    return any(isinstance(finder, RedirectFinder) for finder in sys.meta_path)


def install() -> None:
    """Redirect transformers' Trainer API to littrainer in this process and in the Python processes it starts.

    Calling it again changes nothing. Names that a module took from transformers earlier cannot be changed any more; a
    `RuntimeWarning` lists them.
    """
    if not is_installed():
        sys.meta_path.insert(0, RedirectFinder())
        gc.set_threshold(STARTUP_THRESHOLD, *gc.get_threshold()[1:])
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
        # transformers replaces the package object while it is loaded.
        add_withdrawn_names(sys.modules.get(PACKAGE, module))

    loader.exec_module = execute_and_add


def add_withdrawn_names(package: ModuleType) -> None:
    """Add the withdrawn names to a package object, by its class: transformers replaces it by others of that class.

    A module's own `__getattr__` would be called last, and that class has one that raises.
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

    def all_names(self: ModuleType) -> list[str]:
        return [*names(self), *(WITHDRAWN_FROM_PACKAGE if self.__name__ == PACKAGE else ())]

    setattr(kind, _HAS_WITHDRAWN_NAMES, True)
    kind.__getattr__, kind.__dir__ = look_up, all_names


def restore_gc_threshold() -> None:
    """Look for garbage as often as before the redirection, unless the script has set how often since then."""
    if gc.get_threshold()[0] == STARTUP_THRESHOLD:
        gc.set_threshold(_usual_threshold, *gc.get_threshold()[1:])


def extend_to_children(environment: MutableMapping[str, str]) -> None:
    """Set PYTHONPATH in `environment` so that the Python processes it starts are redirected.

    The interpreter imports `sitecustomize` from the first folder of it.
    """
    before = environment.get("PYTHONPATH")
    folders = [folder for folder in before.split(os.pathsep) if folder != STARTUP_FOLDER] if before else []
    if PACKAGE_ROOT not in folders and os.path.basename(PACKAGE_ROOT) not in ("site-packages", "dist-packages"):
        folders.append(PACKAGE_ROOT)
    environment["PYTHONPATH"] = os.pathsep.join([STARTUP_FOLDER, *folders])
