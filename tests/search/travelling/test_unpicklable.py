"""Finding what cannot be pickled."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest

from littrainer.search.travelling.unpicklable import where_it_fails

LOCK = threading.Lock()


class Holder:
    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)

    def method(self) -> Any:
        return self


def by_value(value: Any) -> None:
    """Pickle as cloudpickle does what a script defines: functions and classes with all that they use."""
    import cloudpickle

    cloudpickle.register_pickle_by_value(__import__(__name__, fromlist=["LOCK"]))
    try:
        cloudpickle.dumps(value)
    finally:
        cloudpickle.unregister_pickle_by_value(__import__(__name__, fromlist=["LOCK"]))


def uses_global() -> Any:
    return LOCK


def with_default(lock: Any = LOCK) -> Any:
    return lock


def closing_over(value: Any) -> Any:
    return lambda: value


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (LOCK, "it.part"),
        ({"a": 1, "b": [0, LOCK]}, "it.part['b'][1]"),
        (Holder(inner=Holder(lock=LOCK)), "it.part.inner.lock"),
        (uses_global, "it.part, its global LOCK"),
        (closing_over(Holder(lock=LOCK)), "it.part, its variable value.lock"),
        (with_default, "it.part, its default 0"),
        (Holder(lock=LOCK).method, "it.part.__self__.lock"),
    ],
)
def test_the_innermost_culprit_is_found(value: Any, path: str) -> None:
    with pytest.raises(TypeError) as raised:
        by_value(value)
    found, culprit, error = where_it_fails("it", {"fine": 1, "part": value}, by_value, raised.value)
    assert (found, culprit) == (path, LOCK)
    assert "lock" in str(error)


def test_what_holds_itself_ends() -> None:
    ring = Holder(lock=LOCK)
    ring.ring = ring  # type: ignore[attr-defined]
    path, culprit, _ = where_it_fails("it", {"ring": ring}, pickle.dumps, TypeError())
    assert (path, culprit) == ("it.ring.lock", LOCK)


def test_where_each_part_pickles_the_whole_is_named() -> None:
    error = TypeError("together they do not")
    assert where_it_fails("it", {"fine": 1}, pickle.dumps, error) == ("it", {"fine": 1}, error)
