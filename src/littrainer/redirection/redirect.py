"""Makes `transformers.Trainer` and all that belongs to it mean littrainer's, however a script reaches it.

A finder in front of `sys.meta_path` answers the import of the modules in `littrainer.redirection.names`. It sits in the
import system rather than on the transformers package object because transformers replaces that object while it is being
imported, and because whatever then imports these modules, transformers' own code included, goes through it.

Every Python process that a script starts imports this module first: nothing heavy is imported here.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from littrainer.redirection.names import DERIVED, REPLACED
from littrainer.redirection.withdrawn import (
    PACKAGE,
    WITHDRAWN,
    WithdrawnModuleLoader,
    answer_in,
    answer_when_loaded,
)

TYPE_CHECKING = False
"""What type checkers take to be true; `typing` and `collections.abc` are imported for them alone."""

if TYPE_CHECKING:
    from collections.abc import MutableMapping, Sequence

PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
STARTUP_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "startup")


class RedirectFinder:
    """The entry of `sys.meta_path` that hands out shims for the modules in `REPLACED` and `WITHDRAWN`.

    Of other modules it knows the package transformers alone, which it has answer the names in `WITHDRAWN`.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the shim for `fullname`, or None where it is not redirected or transformers has no such
        module."""
        if fullname == PACKAGE:
            spec = self._original_spec(fullname, path)
            if spec is not None and spec.loader is not None:
                answer_when_loaded(spec)
            return spec
        if fullname not in REPLACED and fullname not in WITHDRAWN:
            return None
        original = self._original_spec(fullname, path)
        if original is None:
            return WithdrawnModuleLoader(fullname).spec() if fullname in WITHDRAWN else None
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
    """Say whether the redirection holds in this process."""
    return any(isinstance(finder, RedirectFinder) for finder in sys.meta_path)


def install() -> None:
    """Redirect transformers' Trainer API to littrainer in this process and in the Python processes it starts.

    Calling it again changes nothing. Names that a module took from transformers earlier cannot be changed any more; a
    `RuntimeWarning` lists them.
    """
    if not is_installed():
        sys.meta_path.insert(0, RedirectFinder())
        if any(name in sys.modules for name in (*REPLACED, *DERIVED)):
            from littrainer.redirection.already_imported import replace_early_imports

            replace_early_imports()
        if PACKAGE in sys.modules:
            answer_in(sys.modules[PACKAGE])
    extend_to_children(os.environ)


def extend_to_children(environment: MutableMapping[str, str]) -> None:
    """Set PYTHONPATH in `environment` so that a Python process started with it has the redirection from its start.

    The interpreter imports `sitecustomize` from the folder put first there.
    """
    folders = [folder for folder in _python_path(environment) if folder != STARTUP_FOLDER]
    if PACKAGE_ROOT not in folders and not _is_site_folder(PACKAGE_ROOT):
        folders.append(PACKAGE_ROOT)
    _set_python_path(environment, [STARTUP_FOLDER, *folders])


def _is_site_folder(folder: str) -> bool:
    return os.path.basename(folder) in ("site-packages", "dist-packages")


def _python_path(environment: MutableMapping[str, str]) -> list[str]:
    value = environment.get("PYTHONPATH", "")
    return value.split(os.pathsep) if value else []


def _set_python_path(environment: MutableMapping[str, str], folders: list[str]) -> None:
    if folders:
        environment["PYTHONPATH"] = os.pathsep.join(folders)
    else:
        environment.pop("PYTHONPATH", None)
