"""Replacement of transformers modules that were imported before the redirection."""

from __future__ import annotations

import gc
import importlib.util
import sys
import warnings
from types import ModuleType
from typing import Any

from littrainer.redirection.names import DERIVED, REPLACED
from littrainer.redirection.shim import ShimLoader


def replace_early_imports() -> None:
    """Replace imported modules by shims, and warn about names that other modules have imported from them.

    Cached attributes of transformers' package objects, and modules of derived classes, are deleted for a new import.
    """
    early = {name: sys.modules[name] for name in REPLACED if name in sys.modules}
    names = {fullname.rpartition(".")[0] for fullname in (*REPLACED, *DERIVED)}
    modules: list[Any] = [item for item in gc.get_objects() if issubclass(type(item), ModuleType)]
    # transformers replaces its package object while it loads; scripts may hold either object.
    packages = [module for module in modules if vars(module).get("__name__") in names]
    originals = {id(module): (fullname, module) for fullname, module in early.items()}
    for fullname, module in early.items():
        values = {name: vars(module).get(name) for name in REPLACED[fullname]}
        originals.update((id(value), (name, value)) for name, value in values.items() if callable(value))
    imported_names = _list_imported_names(originals)
    for fullname, module in early.items():
        _install_shim(fullname, module, packages)
    replaced = {*originals}
    derived = {name: sys.modules.pop(name) for name in DERIVED if name in sys.modules}
    for fullname, module in derived.items():
        definitions = [value for value in vars(module).values() if getattr(value, "__module__", None) == fullname]
        replaced |= {id(module), *map(id, definitions)}
    for package in packages:
        for name in [name for name, value in vars(package).items() if id(value) in replaced]:
            delattr(package, name)
    if imported_names:
        warnings.warn(
            "imported from transformers before littrainer took over, so still transformers' own: "
            f"{', '.join(imported_names)}. Put `import littrainer.auto` before every import of transformers, or use "
            "`littrainer run`.",
            RuntimeWarning,
            stacklevel=3,
        )


def _install_shim(fullname: str, module: ModuleType, packages: list[ModuleType]) -> None:
    if module.__spec__ is None:
        return
    loader = ShimLoader(fullname, module.__spec__)
    loader.original = module
    shim = importlib.util.module_from_spec(loader.spec())
    loader.exec_module(shim)
    sys.modules[fullname] = shim
    package_name, _, name = fullname.rpartition(".")
    for package in packages:
        if package.__name__ == package_name:
            setattr(package, name, shim)


def _list_imported_names(originals: dict[int, tuple[str, Any]]) -> list[str]:
    """Describe originals that modules outside transformers hold or derive classes from."""
    imported: set[str] = set()
    for holder, module in list(sys.modules.items()):
        if holder.partition(".")[0] != "transformers" and isinstance(module, ModuleType):
            values = (originals[id(value)] for value in vars(module).values() if id(value) in originals)
            imported.update(f"{name} (in {holder})" for name, _ in values)
    for name, original in originals.values():
        subclasses: list[type] = type.__subclasses__(original) if isinstance(original, type) else []
        outside = [cls for cls in subclasses if cls.__module__.partition(".")[0] != "transformers"]
        imported.update(f"{name} (base of {cls.__module__}.{cls.__qualname__})" for cls in outside)
    return sorted(imported)
