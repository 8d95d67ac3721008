"""What to do with transformers modules that were imported before the redirection."""

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
    """Replace the modules that are imported already with shims, and warn about names that were taken from them.

    transformers' package objects keep what they were once asked for; those copies are dropped, so that the next access
    finds littrainer's. Modules whose classes derive from the replaced ones are imported again when next asked for.
    """
    early = {name: sys.modules[name] for name in REPLACED if name in sys.modules}
    packages = _package_objects()
    originals = {
        id(value): (name, value)
        for fullname, module in early.items()
        for name in REPLACED[fullname]
        if callable(value := vars(module).get(name))
    }
    originals.update((id(module), (fullname, module)) for fullname, module in early.items())
    taken = _taken_names(originals)
    for fullname, module in early.items():
        _put_shim(fullname, module, packages)
    _forget_derived_modules(packages)
    for package in packages:
        for name in [name for name, value in vars(package).items() if id(value) in originals]:
            delattr(package, name)
    if taken:
        warnings.warn(
            f"imported from transformers before littrainer took over, so still transformers' own: {', '.join(taken)}. "
            "Put `import littrainer.auto` before every import of transformers, or use `littrainer run`.",
            RuntimeWarning,
            stacklevel=3,
        )


def _put_shim(fullname: str, module: ModuleType, packages: list[ModuleType]) -> None:
    if module.__spec__ is None:
        return
    loader = ShimLoader(fullname, module.__spec__)
    loader.original = module
    shim = importlib.util.module_from_spec(loader.spec())
    loader.exec_module(shim)
    sys.modules[fullname] = shim
    for package in packages:
        if package.__name__ == fullname.rpartition(".")[0]:
            setattr(package, fullname.rpartition(".")[2], shim)


def _forget_derived_modules(packages: list[ModuleType]) -> None:
    for fullname in DERIVED:
        module = sys.modules.pop(fullname, None)
        if module is None:
            continue
        defined = {id(value) for value in vars(module).values() if getattr(value, "__module__", None) == fullname}
        for package in packages:
            for name in [name for name, value in vars(package).items() if value is module or id(value) in defined]:
                delattr(package, name)


def _package_objects() -> list[ModuleType]:
    """Return all objects that are or were the packages of the names: transformers replaces its own while it loads."""
    names = {fullname.rpartition(".")[0] for fullname in (*REPLACED, *DERIVED)}
    modules: list[Any] = [found for found in gc.get_objects() if issubclass(type(found), ModuleType)]
    return [module for module in modules if vars(module).get("__name__") in names]


def _taken_names(originals: dict[int, tuple[str, Any]]) -> list[str]:
    taken: set[str] = set()
    for holder, module in list(sys.modules.items()):
        if not _is_of_transformers(holder) and isinstance(module, ModuleType):
            held = (originals[id(value)] for value in vars(module).values() if id(value) in originals)
            taken.update(f"{name} (in {holder})" for name, _ in held)
    for name, original in originals.values():
        heirs: list[type] = type.__subclasses__(original) if isinstance(original, type) else []
        taken.update(
            f"{name} (base of {heir.__module__}.{heir.__qualname__})"
            for heir in heirs
            if not _is_of_transformers(heir.__module__)
        )
    return sorted(taken)


def _is_of_transformers(module_name: str) -> bool:
    return module_name.partition(".")[0] == "transformers"
