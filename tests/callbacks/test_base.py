from __future__ import annotations

from typing import Any

import transformers

from littrainer.callbacks.base import EVENTS, TrainerCallback
from littrainer.callbacks.handler import CallbackHandler


def test_the_events_are_those_of_transformers() -> None:
    theirs = {name for name in vars(transformers.TrainerCallback) if name.startswith("on_")}
    assert set(EVENTS) == theirs


def test_a_callback_listens_where_its_class_a_parent_or_the_object_itself_overrides() -> None:
    class Parent(TrainerCallback):
        def on_log(self, *_: Any, **__: Any) -> None:
            heard.append("on_log")

    class Child(Parent): ...

    heard: list[str] = []
    child: Any = Child()
    child.on_save = lambda *_, **__: heard.append("on_save")
    handler = CallbackHandler([child], None, None, None, None)
    for event in EVENTS:
        handler.call_event(event, None, None, None)
    assert heard == ["on_save", "on_log"]
