"""Weak references to owners, so that owner and part are freed without the garbage collector."""

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
        # A dead reference is copied as a reference to a temporary set.
        return _Reference, (set() if self() is None else self(),)


def weak_property(name: str) -> Any:
    """Return a property that refers weakly to its value; None once the value is freed.

    Reading it calls no Python function, since each step reads it often.
    """
    return property(methodcaller(name), lambda holder, value: setattr(holder, name, _Reference(value)))


class WeaklyBound:
    """A weakly bound method for an attribute of its object; like `MethodType` in signature, copies and pickles."""

    __signature__ = property(lambda self: inspect.signature(MethodType(self.__func__, self.__self__)))

    def __init__(self, function: Callable[..., Any], instance: Any):
        # torch.compile supports no subclass of weakref.ref.
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
    """Call an importing function in a thread, so that cycles of caught exceptions do not hold the caller's frames."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(load, *arguments).result()
