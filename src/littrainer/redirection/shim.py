"""Shim modules that replace transformers' modules of the Trainer API in sys.modules.

Names are resolved on access: littrainer's from `littrainer.redirection.names`, imported names by the import statements
in the source of transformers' module. Only a name defined there runs that module, outside sys.modules.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from littrainer.redirection.names import EARLIER, REPLACED, WITHDRAWN

FOR_TYPE_CHECKERS = ("TYPE_CHECKING", "typing.TYPE_CHECKING")


@dataclass(frozen=True)
class Binding:
    """Binding of a name in the source of a module.

    Parameters:
        module: module that the name is imported from; None for a definition.
        attribute: attribute of that module; None for the module itself.
        constant: 1-tuple of a constant.
        conditional: inside a block, such as `if` or `try`.
    """

    module: str | None = None
    attribute: str | None = None
    constant: tuple[Any] | None = None
    conditional: bool = False


class ShimLoader(Loader):
    """Loader of the shim of a transformers module, whose names it resolves."""

    def __init__(self, fullname: str, original_spec: ModuleSpec | None) -> None:
        self.fullname = fullname
        self.original_spec = original_spec
        self.targets = REPLACED.get(fullname) or WITHDRAWN[fullname]
        self.original: ModuleType | None = None
        self.earlier = {
            name: Binding(home, name, conditional=True)
            for home, names in EARLIER.get(fullname, {}).items()
            for name in names.split()
        }
        self._bindings: dict[str, Binding] | None = None
        self._shim: ModuleType | None = None
        self._lock = threading.RLock()

    def spec(self) -> ModuleSpec:
        """Return the spec of the shim, with the location of transformers' file."""
        spec = ModuleSpec(self.fullname, self)
        if self.original_spec is not None:
            spec.origin, spec.has_location = self.original_spec.origin, self.original_spec.has_location
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        self._shim = module
        vars(module).update(__getattr__=self.look_up, __dir__=self.names, __doc__=None)

    def get_source(self, fullname: str) -> str | None:
        """Return the source of transformers' module, for tracebacks and `inspect`."""
        get_source = getattr(getattr(self.original_spec, "loader", None), "get_source", None)
        return get_source(fullname) if get_source is not None else None

    def look_up(self, name: str) -> Any:
        if name == "__all__":
            return self.public_names()
        value = self._resolve(name)
        vars(self._shim)[name] = value
        return value

    def names(self) -> list[str]:
        """Return the names of the module for `dir`, without loading them."""
        return sorted({*vars(self._shim), *self.targets, *self.bindings})

    def public_names(self) -> list[str]:
        """Return the names of `from module import *`."""
        if "__all__" in self.bindings:
            return sorted({*self.targets, *self.run_original().__all__})
        earlier = {name for name in self.earlier if hasattr(self._shim, name)}
        certain = (name for name, binding in self.bindings.items() if not binding.conditional or name in earlier)
        return sorted({*self.targets, *(name for name in certain if not name.startswith("_"))})

    @property
    def bindings(self) -> dict[str, Binding]:
        if self._bindings is None:
            source = self.get_source(self.fullname)
            self._bindings = {**self.earlier, **parse_bindings(source, self.fullname)} if source else {}
        return self._bindings

    def _resolve(self, name: str) -> Any:
        if name in self.targets:
            return load_target(self.targets[name])
        missing = AttributeError(f"module {self.fullname!r} has no attribute {name!r}")
        if self.original_spec is None or (name.startswith("__") and name != "__version__"):
            # Do not parse the source for probes of the import system.
            raise missing
        binding = self.bindings.get(name, Binding())
        if self.bindings and name not in self.bindings and "__getattr__" not in self.bindings:
            raise missing
        if binding.constant is not None:
            return binding.constant[0]
        if binding.module is not None:
            try:
                return _import_attribute(binding.module, binding.attribute)
            except (ImportError, AttributeError) as error:
                if not binding.conditional:
                    raise
                raise missing from error
        if name == "logger":
            # transformers names its loggers after the modules.
            return logging.getLogger(self.fullname)
        try:
            return getattr(self.run_original(), name)
        except AttributeError:
            raise missing from None

    def run_original(self) -> ModuleType:
        """Run transformers' module once."""
        with self._lock:
            if self.original is None:
                assert self.original_spec is not None and self.original_spec.loader is not None
                # Set first, so that a circular import sees the partial module, as in Python.
                self.original = importlib.util.module_from_spec(self.original_spec)
                try:
                    self.original_spec.loader.exec_module(self.original)
                except BaseException:
                    self.original = None
                    raise
                self._copy_globals(self.original)
            return self.original

    def _copy_globals(self, original: ModuleType) -> None:
        # typing.get_type_hints and dataclasses resolve annotations in vars(sys.modules[cls.__module__]).
        for name, value in vars(original).items():
            if name not in self.targets and not name.startswith("__"):
                vars(self._shim).setdefault(name, value)


def load_target(target: str) -> Any:
    """Return the object at "module:attribute"."""
    module, attribute = target.split(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        # transformers' package object would replace a ModuleNotFoundError.
        raise ImportError(f"littrainer cannot load its {attribute}: {error}", name=error.name) from error


def import_original(fullname: str) -> ModuleType:
    """Return transformers' module, also if the redirection has replaced it."""
    module = importlib.import_module(fullname)
    loader = getattr(module.__spec__, "loader", None)
    return loader.run_original() if isinstance(loader, ShimLoader) else module


def parse_bindings(source: str, fullname: str) -> dict[str, Binding]:
    """Return the bindings in a source; a name with several bindings counts as defined in the module."""
    package = fullname.rpartition(".")[0]
    bindings: dict[str, Binding] = {}
    for name, binding in _iterate_bindings(ast.parse(source).body, package, conditional=False):
        previous = bindings.get(name)
        if previous is None or previous == binding:
            bindings[name] = binding
        else:
            bindings[name] = Binding(conditional=previous.conditional and binding.conditional)
    return bindings


def _iterate_bindings(statements: list[ast.stmt], package: str, conditional: bool) -> Iterator[tuple[str, Binding]]:
    for statement in statements:
        if isinstance(statement, ast.ImportFrom):
            module = importlib.util.resolve_name("." * statement.level + (statement.module or ""), package)
            for alias in statement.names:
                yield alias.asname or alias.name, Binding(module, alias.name, conditional=conditional)
        elif isinstance(statement, ast.Import):
            for alias in statement.names:
                module = alias.name if alias.asname else alias.name.partition(".")[0]
                yield alias.asname or module, Binding(module, conditional=conditional)
        elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield statement.name, Binding(conditional=conditional)
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            value = statement.value
            constant = (value.value,) if isinstance(value, ast.Constant) and not conditional else None
            for target in targets:
                if isinstance(target, ast.Name):
                    yield target.id, Binding(constant=constant, conditional=conditional)
        elif not (isinstance(statement, ast.If) and ast.unparse(statement.test) in FOR_TYPE_CHECKERS):
            for field in ("body", "orelse", "finalbody"):
                yield from _iterate_bindings(getattr(statement, field, []), package, conditional=True)
            for handler in getattr(statement, "handlers", []):
                yield from _iterate_bindings(handler.body, package, conditional=True)


def _import_attribute(module: str, attribute: str | None) -> Any:
    source = importlib.import_module(module)
    if attribute is None:
        return source
    try:
        return getattr(source, attribute)
    except AttributeError:
        try:
            return importlib.import_module(f"{module}.{attribute}")
        except ModuleNotFoundError:
            raise AttributeError(f"module {module!r} has no attribute {attribute!r}") from None
