"""References that do not keep an object alive: what holds its own user is freed without the garbage collector."""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from operator import methodcaller
from types import MethodType
from typing import Any


class _Reference(weakref.ref[Any]):
    """A weak reference that is copied and pickled with its object."""

    def __reduce__(self) -> Any:
        # A set that nobody else holds is gone at once.
        return _Reference, (set() if self() is None else self(),)


def weak_property(name: str) -> Any:
    """Return a property for an object's owner, which then is freed with its last user, not by the garbage collector.

    The value is None once the owner is gone. Reading it calls no Python function, since each step reads it often.

    Parameters:
        name: of the attribute that holds the reference.
    """
    return property(methodcaller(name), lambda holder, value: setattr(holder, name, _Reference(value)))


class WeaklyBound:
    """A method that an object holds itself: bound to it like `MethodType`, in signature, copies and pickles too.

    Parameters:
        function: takes the object first.
        instance: the object.
    """

    __signature__ = property(lambda self: inspect.signature(MethodType(self.__func__, self.__self__)))

    def __init__(self, function: Callable[..., Any], instance: Any):
        # torch.compile follows a reference of weakref's own class only.
        self.__func__, self._instance = function, weakref.ref(instance)

    @property
    def __self__(self) -> Any:
        instance = self._instance()
        if instance is None:
            raise ReferenceError(f"{self.__name__} is a method of a model that is gone: keep the model too.")
        return instance

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["__func__"], name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return type(self)(self.__func__, copy.deepcopy(self.__self__, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.__self__, self.__name__)


def load_in_thread(load: Callable[..., Any], *arguments: Any) -> Any:
    """Import in a thread: exceptions that libraries catch meanwhile may stay in cycles with all frames below them."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(load, *arguments).result()
