"""What the process of a trial and the search that has started it say to each other."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

CLOSED = (EOFError, OSError)
"""What is raised where the other side has gone."""


@dataclass
class Setting:
    """Said first, before anything of the script's is read.

    Parameters:
        surroundings: of the process that searches (surroundings.py), plain values only.
        trainer_file: descriptor of the file with the packed Trainer, which has no name. Each process inherits a
            descriptor of its own, and all of these share one position in the file.
        threads: CPU threads that the process may use.
    """

    surroundings: dict[str, Any]
    trainer_file: int
    threads: int


@dataclass
class Task:
    """A trial to carry out."""

    number: int


@dataclass
class Question:
    """What the trial, or its study, is asked.

    Parameters:
        of_study: whether the study is asked, and not the trial.
        name: of the attribute.
        is_call: whether it is called.
    """

    of_study: bool
    name: str
    is_call: bool
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class Answer:
    """To a question, or to a task: a value, or the error that came up, with where it did."""

    value: Any = None
    error: BaseException | None = None
    where: str = ""


class TraceInTrial(Exception):
    """The cause of an error from a trial's process: its traceback there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Channel:
    """One end of the connection.

    Parameters:
        connection: the end of a pipe that goes both ways.
    """

    def __init__(self, connection: Connection):
        self._connection = connection

    def send(self, message: Any) -> None:
        """Send a message; what the script defines travels by value."""
        import cloudpickle

        self._connection.send_bytes(cloudpickle.dumps(message))

    def receive(self) -> Any:
        """The next message.

        Raises:
            EOFError, OSError: the other side has gone.
        """
        return pickle.loads(self._connection.recv_bytes())

    def has_message(self, seconds: float) -> bool:
        """Wait this long for a message; whether there is one, or the other side has gone."""
        return self._connection.poll(seconds)

    def close(self) -> None:
        """Close this end."""
        self._connection.close()


def answer_with(error: BaseException) -> Answer:
    """An answer that tells of an error, in a form that reaches the other process."""
    where = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return Answer(error=_sendable(error), where=where)


def value_of(answer: Answer) -> Any:
    """What an answer says.

    Raises:
        BaseException: what came up on the other side, with the traceback there as its cause.
    """
    if answer.error is not None:
        error = answer.error.error if isinstance(answer.error, _InParts) else answer.error
        raise error from TraceInTrial(answer.where)
    return answer.value


class _InParts(Exception):
    """An error whose class has a constructor that pickle cannot call: it is put together without it."""

    def __init__(self, cls: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]):
        super().__init__(cls, args, state)

    @property
    def error(self) -> BaseException:
        cls, args, state = self.args
        error: BaseException = cls.__new__(cls, *args)
        error.__dict__.update(state)
        return error


def _sendable(error: BaseException) -> BaseException:
    if _arrives(error):
        return error
    in_parts = _InParts(type(error), error.args, dict(error.__dict__))
    if _arrives(in_parts):
        return in_parts
    # The nearest kind that every process knows; which kind it is decides whether the search goes on.
    kind = next(known for known in type(error).__mro__ if known.__module__ == "builtins")
    in_words = _InParts(kind, (f"{type(error).__name__}: {error}",), {})
    return in_words if _arrives(in_words) else RuntimeError(*in_words.args[1])


def _arrives(error: BaseException) -> bool:
    import cloudpickle

    try:
        read = pickle.loads(cloudpickle.dumps(error))
        str(read.error if isinstance(read, _InParts) else read)
    except Exception:
        return False
    return type(read) is type(error)
