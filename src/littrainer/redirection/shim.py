"""The module that takes the place of a transformers module of the Trainer API in sys.modules.

Its names are looked up when they are used. littrainer's come from `littrainer.redirection.names`. For any other name
the source of transformers' own module is read, not run: what it imports is fetched from there, so that asking
`transformers.trainer` for a function of `transformers.utils` does not load the Trainer. Only a name that is defined
there makes it run, once, as a module of the transformers package that is not entered in sys.modules.
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
    """How the source of a module gives a meaning to one name.

    `module` is the module that the name is imported from, None if it is defined here; `attribute` is what is taken
    from it, None for the module itself; `constant` is a 1-tuple of a plain constant.
    """

    module: str | None = None
    attribute: str | None = None
    constant: tuple[Any] | None = None
    conditional: bool = False


class ShimLoader(Loader):
    """Loads the shim for a transformers module and looks its names up, by the spec of the original if there is one."""

    def __init__(self, fullname: str, original_spec: ModuleSpec | None) -> None:
        self.fullname = fullname
        self.original_spec = original_spec
        self.own = REPLACED.get(fullname) or WITHDRAWN[fullname]
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
        """Return the spec that the import system needs; its location is that of transformers' own file."""
        spec = ModuleSpec(self.fullname, self)
        if self.original_spec is not None:
            spec.origin, spec.has_location = self.original_spec.origin, self.original_spec.has_location
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Leave the creation of an ordinary module to the import system."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Fill the shim with two module-level hooks; names are added when they are first read."""
        self._shim = module
        vars(module).update(__getattr__=self.look_up, __dir__=self.names, __doc__=None)

    def get_source(self, fullname: str) -> str | None:
        """Return the source of transformers' own module, for tracebacks and `inspect`."""
        read = getattr(getattr(self.original_spec, "loader", None), "get_source", None)
        return read(fullname) if read is not None else None

    def look_up(self, name: str) -> Any:
        """Return what `name` means in this module, and keep it there."""
        if name == "__all__":
            return self.public_names()
        value = self._resolve(name)
        vars(self._shim)[name] = value
        return value

    def names(self) -> list[str]:
        """Return the names that the module offers, for `dir`; none of them is loaded."""
        return sorted({*vars(self._shim), *self.own, *self.bindings})

    def public_names(self) -> list[str]:
        """Return the names that `from module import *` takes."""
        own = self.own
        declared = self.bindings.get("__all__")
        if declared is not None:
            return sorted({*own, *self.run_original().__all__})
        earlier = {name for name in self.earlier if hasattr(self._shim, name)}
        sure = (name for name, binding in self.bindings.items() if not binding.conditional or name in earlier)
        return sorted({*own, *(name for name in sure if not name.startswith("_"))})

    @property
    def bindings(self) -> dict[str, Binding]:
        """The names that transformers' module binds or did in transformers 4; empty without a source."""
        if self._bindings is None:
            source = self.get_source(self.fullname)
            self._bindings = {**self.earlier, **bindings_in(source, self.fullname)} if source else {}
        return self._bindings

    def _resolve(self, name: str) -> Any:
        if name in self.own:
            return load_target(self.own[name])
        missing = AttributeError(f"module {self.fullname!r} has no attribute {name!r}")
        if self.original_spec is None or (name.startswith("__") and name != "__version__"):
            # The import system and scans of sys.modules probe for such names; none is worth reading the source.
            raise missing
        binding = self.bindings.get(name, Binding())
        if self.bindings and name not in self.bindings and "__getattr__" not in self.bindings:
            raise missing
        if binding.constant is not None:
            return binding.constant[0]
        if binding.module is not None:
            try:
                return _imported(binding.module, binding.attribute)
            except (ImportError, AttributeError) as error:
                if not binding.conditional:
                    raise
                raise missing from error
        if name == "logger":
            # Every logger of transformers is the standard one of its module's name.
            return logging.getLogger(self.fullname)
        try:
            return getattr(self.run_original(), name)
        except AttributeError:
            raise missing from None

    def run_original(self) -> ModuleType:
        """Return transformers' own module, which runs with the first call."""
        with self._lock:
            if self.original is None:
                assert self.original_spec is not None and self.original_spec.loader is not None
                # Kept while it runs, so that a circular import sees it half done, as in Python.
                self.original = importlib.util.module_from_spec(self.original_spec)
                try:
                    self.original_spec.loader.exec_module(self.original)
                except BaseException:
                    self.original = None
                    raise
                self._show_globals_of(self.original)
            return self.original

    def _show_globals_of(self, original: ModuleType) -> None:
        # typing.get_type_hints and dataclasses look annotations up in vars(sys.modules[cls.__module__]).
        for name, value in vars(original).items():
            if name not in self.own and not name.startswith("__"):
                vars(self._shim).setdefault(name, value)


def load_target(target: str) -> Any:
    """Return the object at "module:attribute"; an ImportError if a module is missing."""
    module, attribute = target.split(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        # transformers' package object would replace this error and its message by another.
        raise ImportError(f"littrainer cannot load its {attribute}: {error}", name=error.name) from error


def import_original(fullname: str) -> ModuleType:
    """Return transformers' own module, also where the redirection has put littrainer's names in its place."""
    module = importlib.import_module(fullname)
    loader = getattr(module.__spec__, "loader", None)
    return loader.run_original() if isinstance(loader, ShimLoader) else module


def bindings_in(source: str, fullname: str) -> dict[str, Binding]:
    """Read from a module's source which names it binds and how, without running it.

    A name that is bound in several ways counts as defined in the module, which has to run to show the binding.

    Args:
        source: the text of the module.
        fullname: its name, against which relative imports are resolved.
    """
    package = fullname.rpartition(".")[0]
    found: dict[str, Binding] = {}
    for name, binding in _walk(ast.parse(source).body, package, conditional=False):
        earlier = found.get(name)
        if earlier is None or earlier == binding:
            found[name] = binding
        else:
            found[name] = Binding(conditional=earlier.conditional and binding.conditional)
    return found


def _walk(statements: list[ast.stmt], package: str, conditional: bool) -> Iterator[tuple[str, Binding]]:
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
                yield from _walk(getattr(statement, field, []), package, conditional=True)
            for handler in getattr(statement, "handlers", []):
                yield from _walk(handler.body, package, conditional=True)


def _imported(module: str, attribute: str | None) -> Any:
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
