"""What a Trainer's callbacks have to be, and what their events may return."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from littrainer.callbacks.base import EVENTS, TrainerCallback
from littrainer.callbacks.state import SWITCHES, TrainerControl, as_switch
from littrainer.errors.lazy_isinstance import known_classes
from littrainer.errors.notes import add_note, kind_of

# An object of no callback class is taken for a callback if it has these; of what else it lacks it is not told.
NEEDED_EVENTS = ("on_train_begin", "on_step_end")


def callbacks_in_list(callbacks: Any) -> list[Any]:
    """What a script gave as `callbacks`, as a list; None is none.

    Raises:
        TypeError: it is no list, but one callback perhaps.
    """
    if callbacks is None:
        return []
    if isinstance(callbacks, (str, bytes, type)) or not isinstance(callbacks, Iterable):
        given = f"the class {callbacks.__name__}" if isinstance(callbacks, type) else kind_of(callbacks)
        raise TypeError(f"callbacks takes a list of callbacks, and was given {given}: write callbacks=[...].")
    return list(callbacks)


def new_callback(callback: Any) -> Any:
    """A callback that was handed over as itself, or as a class to make one of.

    Raises:
        TypeError: it is no callback of a Trainer, or its class takes arguments.
    """
    is_class = isinstance(callback, type)
    kind: type = callback if is_class else type(callback)
    if issubclass(kind, known_classes("lightning callback")):
        raise TypeError(
            f"{kind.__name__} is a Lightning callback, which the Trainer's callback handler does not call: add it with "
            "trainer.add_callback(...), or give it in callbacks=[...]."
        )
    if not issubclass(kind, TrainerCallback) and not _has_events(callback):
        what = f"the class {kind.__name__}" if is_class else f"{callback!r} ({kind_of(callback)})"
        own = [name for name in EVENTS if callable(getattr(callback, name, None))]
        has = f" It has {', '.join(own)} only." if own else ""
        raise TypeError(
            f"A callback was given that is neither a TrainerCallback nor a Lightning callback: {what}.{has} Derive its "
            "class from TrainerCallback, and override the events of interest."
        )
    if not is_class:
        return callback
    try:
        return callback()
    except TypeError as error:
        add_note(error, f"Of the class {kind.__name__} a callback is made without arguments; give an instance instead.")
        raise


def _has_events(candidate: Any) -> bool:
    return all(callable(getattr(candidate, name, None)) for name in NEEDED_EVENTS)


def check_answer(answer: Any, callback: Any, event: str) -> None:
    """See that what an event returned is a control.

    Raises:
        TypeError: it is none, or one of its switches is neither on nor off.
    """
    # transformers' own control, and one that a library defines, have the same switches.
    if not isinstance(answer, TrainerControl) and not all(hasattr(answer, name) for name in SWITCHES):
        raise TypeError(
            f"{type(callback).__name__}.{event} returned {answer!r} ({kind_of(answer)}), which is no TrainerControl. "
            "An event changes the control it is given, and returns that control or nothing."
        )
    for name in SWITCHES:
        as_switch(name, getattr(answer, name))
