"""Names that transformers has withdrawn and littrainer answers: as attributes of the package, and in their modules.

Every Python process that a script starts imports this module first: nothing heavy is imported here.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

TYPE_CHECKING = False
"""What type checkers take to be true, for which alone the names below are imported."""

if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from typing import Any

PACKAGE = "transformers"

WITHDRAWN: dict[str, dict[str, str]] = {
    "transformers.trainer_tf": {"TFTrainer": "littrainer.keras.trainer:TFTrainer"},
    "transformers.training_args_tf": {"TFTrainingArguments": "littrainer.keras.arguments:TFTrainingArguments"},
}
"""Module of an earlier transformers -> name in it, and in the package -> littrainer's, as "module:attribute"."""

_TARGETS = {name: target for names in WITHDRAWN.values() for name, target in names.items()}
# Set on the class of package objects that answer them.
_ANSWERS = "_answers_withdrawn_names"


def answer_when_loaded(spec: ModuleSpec) -> None:
    """Let the package object answer the names when it has been loaded by this spec of the package transformers."""
    loader: Any = spec.loader
    execute: Callable[[ModuleType], None] = loader.exec_module

    def execute_and_answer(module: ModuleType) -> None:
        execute(module)
        # transformers puts another object in its place while it is loaded.
        answer_in(sys.modules.get(PACKAGE, module))

    loader.exec_module = execute_and_answer


def answer_in(package: ModuleType) -> None:
    """Let a package object answer the names, by its class: transformers replaces the object by others of that class.

    A module's own `__getattr__` would be asked last, and that class has one that raises.
    """
    kind: Any = type(package)
    if kind is ModuleType or _ANSWERS in vars(kind):
        return
    get_attribute, names = kind.__getattr__, kind.__dir__

    def look_up(self: Any, name: str) -> Any:
        is_ours = name in _TARGETS and self.__name__ == PACKAGE
        return ours(_TARGETS[name]) if is_ours else get_attribute(self, name)

    def all_names(self: Any) -> list[str]:
        return [*names(self), *_TARGETS] if self.__name__ == PACKAGE else names(self)

    setattr(kind, _ANSWERS, True)
    kind.__getattr__, kind.__dir__ = look_up, all_names


def ours(target: str) -> Any:
    """Return what stands at "module:attribute".

    Raises:
        ImportError: a module is missing.
    """
    module, attribute = target.split(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        # transformers' package object would replace this error and its message by another.
        raise ImportError(f"littrainer cannot load its {attribute}: {error}", name=error.name) from error
