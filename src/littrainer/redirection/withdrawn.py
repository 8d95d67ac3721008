"""Names that transformers has withdrawn and littrainer answers: as attributes of the package, and in their modules.

Every Python process that a script starts imports this module first: nothing heavy is imported here.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

TYPE_CHECKING = False
"""What type checkers take to be true; `typing` and `collections.abc` are imported for them alone."""

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

PACKAGE = "transformers"

WITHDRAWN: dict[str, dict[str, str]] = {
    "transformers.trainer_tf": {"TFTrainer": "littrainer.keras.trainer:TFTrainer"},
    "transformers.training_args_tf": {"TFTrainingArguments": "littrainer.keras.arguments:TFTrainingArguments"},
}
"""Module of an earlier transformers -> name in it, and in the package -> where littrainer has it."""

_TARGETS = {name: target for names in WITHDRAWN.values() for name, target in names.items()}
# Set on the class of package objects that answer them.
_ANSWERS = "_answers_withdrawn_names"


class WithdrawnModuleLoader:
    """Loads a module that holds nothing but names of littrainer, where transformers has none, as each is first used.

    Parameters:
        fullname: the module's name in an earlier transformers.
    """

    def __init__(self, fullname: str) -> None:
        self.fullname = fullname

    def spec(self) -> ModuleSpec:
        """What the import system needs."""
        # Loading `importlib.abc` for a base class would take as long as all else that the redirection needs.
        return ModuleSpec(self.fullname, self)  # type: ignore[arg-type]

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
    """Have a package object answer the names, by its class: transformers puts others of that class in its place later.

    A module's own `__getattr__` would be asked last, and that class has one that raises.
    """
    kind: Any = type(package)
    if kind is ModuleType or _ANSWERS in vars(kind):
        return
    get_attribute, names = kind.__getattr__, kind.__dir__

    def look_up(self: Any, name: str) -> Any:
        return _ours(name) if name in _TARGETS and self.__name__ == PACKAGE else get_attribute(self, name)

    def all_names(self: Any) -> list[str]:
        return [*names(self), *_TARGETS] if self.__name__ == PACKAGE else names(self)

    setattr(kind, _ANSWERS, True)
    kind.__getattr__, kind.__dir__ = look_up, all_names


def _ours(name: str) -> Any:
    module, attribute = _TARGETS[name].split(":")
    return getattr(importlib.import_module(module), attribute)
