"""What a trial's process and the search say to each other, errors above all."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import cloudpickle
import pytest

from littrainer.search.side_by_side.conversation import TraceInTrial, answer_with, value_of


class TakesTwo(ValueError):
    """An error whose constructor does not take what it leaves in `args`."""

    def __init__(self, name: str, number: int) -> None:
        super().__init__(f"{name} was {number}")
        self.number = number


class HoldsALock(ArithmeticError):
    def __init__(self) -> None:
        super().__init__("no number")
        self.lock = threading.Lock()


class OfALock(Exception):
    def __init__(self) -> None:
        super().__init__(threading.Lock())


def raised(error: BaseException) -> BaseException:
    """An error as it arrives on the other side."""
    try:
        raise error
    except BaseException as caught:
        answer = answer_with(caught)
    with pytest.raises(BaseException) as found:
        value_of(pickle.loads(cloudpickle.dumps(answer)))
    return found.value


@pytest.mark.parametrize(
    "error",
    [ValueError("no"), KeyError("name"), OSError(28, "no space", "file"), SystemExit(3), TakesTwo("rate", 7)],
    ids=lambda error: type(error).__name__,
)
def test_an_error_arrives_as_what_it_is(error: BaseException) -> None:
    found = raised(error)
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert vars(found) == vars(error)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (HoldsALock(), ArithmeticError, "HoldsALock: no number"),
        (OfALock(), Exception, "OfALock: <unlocked _thread.lock"),
    ],
)
def test_one_that_cannot_travel_arrives_as_the_nearest_known_kind(error: Exception, kind: type, text: str) -> None:
    found = raised(error)
    assert type(found) is kind
    assert str(found).startswith(text)


def test_its_cause_is_the_traceback_in_the_other_process() -> None:
    found = raised(ZeroDivisionError("there"))
    assert isinstance(found.__cause__, TraceInTrial)
    assert "in raised" in str(found.__cause__)
    assert "ZeroDivisionError: there" in str(found.__cause__)


def test_what_the_script_defines_is_sent_by_value() -> None:
    space: dict[str, Any] = {"__name__": "__main__"}
    exec("class Own(ValueError): pass", space)
    answer = pickle.loads(cloudpickle.dumps(answer_with(space["Own"]("x"))))
    with pytest.raises(space["Own"]):
        value_of(answer)
