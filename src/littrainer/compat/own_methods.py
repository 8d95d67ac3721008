"""Which methods of a Trainer are not the package's: a subclass's, an instance's, or put in the place of ours later."""

from __future__ import annotations

from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from littrainer.trainer import Trainer

Class = TypeVar("Class", bound=type)

# Name -> what the package's classes have under it. Compared by identity: an override made with functools.wraps bears
# the name and the module of ours.
_OF_THE_PACKAGE: dict[str, list[Any]] = {}


def of_the_package(cls: Class) -> Class:
    """Decorate a Trainer class of the package: what it, and its bases, have when it is made is no override."""
    for base in cls.__mro__:
        for name, member in vars(base).items():
            _OF_THE_PACKAGE.setdefault(name, []).append(member)
    return cls


def own_methods(trainer: Trainer, names: tuple[str, ...]) -> list[str]:
    """Those of the named methods that this instance, its class or a class between that and ours has a version of."""
    return [name for name in names if name in vars(trainer) or not _is_of_the_package(type(trainer), name)]


def _is_of_the_package(cls: type, name: str) -> bool:
    ours = _OF_THE_PACKAGE.get(name, [])
    found = getattr(cls, name, None)
    # Python finds a function by itself faster than anything that goes through the classes.
    if type(found) is FunctionType and found in ours:
        return True
    # As inspect.getattr_static finds it, in a ninth of the calls; each Trainer and each train() ask for many names.
    member = next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)
    return member is None or any(member is one for one in ours)
