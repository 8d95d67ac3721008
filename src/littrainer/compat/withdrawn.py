"""Names that transformers has withdrawn and littrainer answers: as attributes of the package, and in their modules.

Every Python process that a script starts imports this module first: nothing heavy is imported here.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGE = "transformers"

WITHDRAWN: dict[str, dict[str, str]] = {
    "transformers.trainer_tf": {"TFTrainer": "littrainer.keras_models.tf_trainer:TFTrainer"},
    "transformers.training_args_tf": {
        "TFTrainingArguments": "littrainer.keras_models.training_arguments:TFTrainingArguments"
    },
}
"""Module of an earlier transformers -> name in it, and in the package -> where littrainer has it."""

_TARGETS = {name: target for names in WITHDRAWN.values() for name, target in names.items()}
# Set on the class of a package object that answers them: the class it had.
_CLASS_BEFORE = "_class_before_withdrawn_names"


class WithdrawnModuleLoader(Loader):
    """Loads a module that holds nothing but names of littrainer, each looked up when it is first used.

    Parameters:
        fullname: the module's name in an earlier transformers.
    """

    def __init__(self, fullname: str) -> None:
        self.fullname = fullname

    def spec(self) -> ModuleSpec:
        """What the import system needs."""
        return ModuleSpec(self.fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Leave the creation of an ordinary module to the import system."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its names."""
        names = WITHDRAWN[self.fullname]

        def look_up(name: str) -> Any:
            if name not in names:
                raise AttributeError(f"module {self.fullname!r} has no attribute {name!r}")
            return _ours(name)

        vars(module).update(__getattr__=look_up, __all__=sorted(names), __doc__=None)


def answer_when_loaded(spec: ModuleSpec) -> None:
    """Have the package object answer the names as soon as it has been loaded by this spec.

    Parameters:
        spec: of the package transformers; its loader serves this one import.
    """
    loader: Any = spec.loader
    execute: Callable[[ModuleType], None] = loader.exec_module

    def execute_and_answer(module: ModuleType) -> None:
        execute(module)
        # transformers puts another object in its place while it is loaded.
        answer_in(sys.modules.get(PACKAGE, module))

    loader.exec_module = execute_and_answer


def answer_in(package: ModuleType) -> None:
    """Have a package object answer the names, by a class of its own on top of the one that it has.

    A module's `__getattr__` would be asked last, and the package's own class has one that raises.
    """
    kind = type(package)
    if hasattr(kind, _CLASS_BEFORE):
        return

    def look_up(self: Any, name: str) -> Any:
        if name in _TARGETS:
            return _ours(name)
        return super(with_names, self).__getattr__(name)  # type: ignore[misc]

    def names(self: Any) -> list[str]:
        return sorted({*super(with_names, self).__dir__(), *_TARGETS})

    body = {"__getattr__": look_up, "__dir__": names, "__module__": kind.__module__, _CLASS_BEFORE: kind}
    with_names = type(kind.__name__, (kind,), body)
    package.__class__ = with_names


def forget_in(package: ModuleType) -> None:
    """Undo `answer_in`, and forget the modules."""
    before = getattr(type(package), _CLASS_BEFORE, None)
    if before is not None:
        package.__class__ = before
    for fullname in WITHDRAWN:
        module = sys.modules.get(fullname)
        if module is not None and isinstance(module.__loader__, WithdrawnModuleLoader):
            del sys.modules[fullname]
            vars(package).pop(fullname.rpartition(".")[2], None)


def _ours(name: str) -> Any:
    module, attribute = _TARGETS[name].split(":")
    return getattr(importlib.import_module(module), attribute)
