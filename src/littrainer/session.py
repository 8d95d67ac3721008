"""All that belongs to one training, and to no setting of the Trainer."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from littrainer.training.loss import RunningLoss


@dataclass
class TrainingSession:
    """The state of one training; the first is made with the Trainer, so that scripts find it before `train()`.

    Attributes:
        loss: the sum of the losses.
        first_step: the optimizer step at which this call of `train()` began.
        first_input_tokens: input tokens seen when it began.
        flos: floating-point operations that are not in the state yet.
        micro_batches_in_window: micro-batches of the optimizer step at hand.
    """

    loss: RunningLoss = field(default_factory=RunningLoss)
    first_step: int = 0
    first_input_tokens: int = 0
    flos: float = 0
    micro_batches_in_window: int = 1


def of_session(path: str) -> Any:
    """Return a property of the Trainer that stands for an attribute of its session.

    Parameters:
        path: names from the session to the attribute, with dots between.
    """
    *parts, name = path.split(".")
    holder = attrgetter(".".join(["session", *parts]))
    return property(attrgetter(f"session.{path}"), lambda trainer, value: setattr(holder(trainer), name, value))


class SessionAttributes:
    """Attributes of the Trainer that its session holds, under the names of transformers; libraries set some of them."""

    session: TrainingSession

    _tr_loss = of_session("loss.since_last_log")
    _total_loss_scalar = of_session("loss.before_last_log")
    _globalstep_last_logged = of_session("loss.step_of_last_log")
    _initial_global_step = of_session("first_step")
    _initial_num_input_tokens_seen = of_session("first_input_tokens")
    current_flos = of_session("flos")
    current_gradient_accumulation_steps = of_session("micro_batches_in_window")

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a session before any `__init__`, where a subclass may set attributes of it first."""
        made = super().__new__(cls)
        made.session = TrainingSession()
        return made
