from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from littrainer.engine.bridge import TrainerEvents


class Run:
    """Notes which of its methods are called; its control says whether to stop."""

    def __init__(self, stop: bool) -> None:
        self.calls: list[Any] = []
        self.trainer = SimpleNamespace(control=SimpleNamespace(should_training_stop=stop))
        self.step = self

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.calls.append((name, *arguments))


def events_of(stop: bool = False) -> tuple[TrainerEvents, Run]:
    run: Any = Run(stop)
    return TrainerEvents(run), run


def test_hooks_reach_the_training_in_the_order_in_which_lightning_calls_them() -> None:
    events, run = events_of()
    lightning: Any = SimpleNamespace(current_epoch=2, should_stop=False)
    followed: list[Any] = []
    module: Any = SimpleNamespace(
        follow_window=followed.append, follow_replacements=lambda: followed.append("replacements")
    )
    batch: Any = object()
    events.on_train_start(lightning, module)
    events.on_train_epoch_start(lightning, module)
    events.on_train_batch_start(lightning, module, batch, 0)
    events.on_train_batch_end(lightning, module, None, batch, 0)
    events.on_train_epoch_end(lightning, module)
    assert run.calls == [
        ("restore",),
        ("begin",),
        ("begin_epoch", 2),
        ("take_micro_batches_behind",),
        ("begin_micro_batch", batch),
        ("end_micro_batch", batch),
        ("end_epoch",),
    ]
    assert followed == ["replacements", batch] and not lightning.should_stop


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end"])
def test_lightning_is_told_to_stop_once_the_control_says_so(hook: str) -> None:
    events, _ = events_of(stop=True)
    lightning: Any = SimpleNamespace(should_stop=False)
    getattr(events, hook)(lightning, None, *([None, None, 0] if hook == "on_train_batch_end" else []))
    assert lightning.should_stop
