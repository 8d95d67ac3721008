from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import transformers
from transformers.trainer_utils import IntervalStrategy as TheirIntervals
from transformers.trainer_utils import SaveStrategy as TheirSaves

from littrainer.arguments.choices import IntervalStrategy, SaveStrategy
from littrainer.callbacks.flow import DefaultFlowCallback
from littrainer.callbacks.state import TrainerControl, TrainerState

OURS: dict[str, Any] = {
    "intervals": IntervalStrategy,
    "saves": SaveStrategy,
    "flow": DefaultFlowCallback,
    "state": TrainerState,
    "control": TrainerControl,
}
THEIRS: dict[str, Any] = {
    "intervals": TheirIntervals,
    "saves": TheirSaves,
    "flow": transformers.DefaultFlowCallback,
    "state": transformers.TrainerState,
    "control": transformers.TrainerControl,
}
STEPS = {"logging_steps": 3, "eval_steps": 4, "max_steps": 10}


class Arguments:
    def __init__(self, kinds: dict[str, Any], strategy: str, delay: float, first: bool) -> None:
        self.logging_strategy = self.eval_strategy = kinds["intervals"](strategy)
        self.save_strategy = kinds["saves"](strategy)
        self.eval_delay = delay
        self.logging_first_step = first


def asked(kinds: dict[str, Any], event: str, arguments: Arguments, save_steps: int) -> list[dict[str, bool]]:
    """What is asked for at each step of a run, the last one and one beyond it included."""
    wishes = []
    for step in range(1, 12):
        state = kinds["state"](global_step=step, epoch=step / 4, save_steps=save_steps, **STEPS)
        control = kinds["control"]()
        getattr(kinds["flow"](), event)(arguments, state, control)
        wishes.append(dataclasses.asdict(control))
    return wishes


@pytest.mark.parametrize("event", ["on_step_end", "on_epoch_end"])
@pytest.mark.parametrize("strategy", ["no", "steps", "epoch"])
def test_each_step_asks_for_what_it_asks_for_in_transformers(event: str, strategy: str) -> None:
    for delay, first, save_steps in itertools.product((0, 2, 5), (False, True), (0, 5)):
        ours, theirs = (
            asked(kinds, event, Arguments(kinds, strategy, delay, first), save_steps) for kinds in (OURS, THEIRS)
        )
        assert ours == theirs, (delay, first, save_steps)
