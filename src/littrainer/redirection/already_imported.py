"""The modules of transformers that were imported before the redirection."""

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

    transformers' package objects keep the attributes that were once read; those copies are deleted, so that the next
    access finds littrainer's. Modules whose classes derive from the replaced ones are imported again when next read.
    """
    early = {name: sys.modules[name] for name in REPLACED if name in sys.modules}
    names = {fullname.rpartition(".")[0] for fullname in (*REPLACED, *DERIVED)}
    modules: list[Any] = [found for found in gc.get_objects() if issubclass(type(found), ModuleType)]
    # transformers replaces its own package object while it loads, and scripts may hold either.
    packages = [module for module in modules if vars(module).get("__name__") in names]
    originals = {id(module): (fullname, module) for fullname, module in early.items()}
    for fullname, module in early.items():
        found = {name: vars(module).get(name) for name in REPLACED[fullname]}
        originals.update((id(value), (name, value)) for name, value in found.items() if callable(value))
    taken = _taken_names(originals)
    for fullname, module in early.items():
        _put_shim(fullname, module, packages)
    replaced = {*originals}
    derived = {name: sys.modules.pop(name) for name in DERIVED if name in sys.modules}
    for fullname, module in derived.items():
        own = [value for value in vars(module).values() if getattr(value, "__module__", None) == fullname]
        replaced |= {id(module), *map(id, own)}
    for package in packages:
        for name in [name for name, value in vars(package).items() if id(value) in replaced]:
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
    package_name, _, name = fullname.rpartition(".")
    for package in packages:
        if package.__name__ == package_name:
            setattr(package, name, shim)


def _taken_names(originals: dict[int, tuple[str, Any]]) -> list[str]:
    """Return the originals that modules and classes outside of transformers hold, in words."""
    taken: set[str] = set()
    for holder, module in list(sys.modules.items()):
        if holder.partition(".")[0] != "transformers" and isinstance(module, ModuleType):
            held = (originals[id(value)] for value in vars(module).values() if id(value) in originals)
            taken.update(f"{name} (in {holder})" for name, _ in held)
    for name, original in originals.values():
        heirs: list[type] = type.__subclasses__(original) if isinstance(original, type) else []
        outside = [heir for heir in heirs if heir.__module__.partition(".")[0] != "transformers"]
        taken.update(f"{name} (base of {heir.__module__}.{heir.__qualname__})" for heir in outside)
    return sorted(taken)
