"""What an evaluation or prediction outside of training leaves as it found it: modes, device and random generators.

In transformers it leaves the model in evaluation mode and the generators where its draws brought them, and the training
that follows draws from there. Here the generators are given back as they were, and where the evaluation had brought
them is remembered: the next work of a Trainer takes up from there, so that a script has the numbers that it had.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from littrainer import seeds
from littrainer.checkpoint.random_state import (
    capture_random_states,
    random_states_are_equal,
    set_random_states,
)
from littrainer.checkpoint.shards import is_sharded
from littrainer.model_walk import modules_of, parameters_of, put_back_modes

if TYPE_CHECKING:
    from littrainer.trainer import Trainer


class _Draws(NamedTuple):
    """The generators' states where an evaluation ended, and those that it gave back."""

    ended_at: dict[str, Any]
    given_back: dict[str, Any]
    seedings: int


# The generators belong to the process, and so does this: what one Trainer has drawn another one takes up.
_last_draws: _Draws | None = None


def continue_random_draws(current: dict[str, Any] | None = None) -> None:
    """Take up where the last evaluation's draws ended, unless something was drawn or seeded since.

    Parameters:
        current: where the generators stand, if that has been looked at: it takes as long as a small model's batch.
    """
    global _last_draws
    draws, _last_draws = _last_draws, None
    if draws is None or draws.seedings != seeds.seedings():
        return
    if current is None or current.keys() != draws.given_back.keys():
        current = capture_random_states(gpu="cuda" in draws.given_back)
    if random_states_are_equal(current, draws.given_back):
        set_random_states(draws.ended_at, current)


@contextmanager
def left_as_found(trainer: Trainer) -> Iterator[None]:
    """A context for an evaluation or prediction: outside of training it leaves no trace but its results.

    Inside a training nothing is restored: its numbers go on from the evaluation's draws. After a training the model
    keeps evaluation mode (and an optimizer that has modes too), because scripts go on to infer with it. Of contexts
    within each other the outermost restores, so that callbacks find the model in evaluation mode.
    """
    global _last_draws
    if trainer.is_in_train or trainer._is_left_as_found:
        yield
        return
    # Asking for a GPU's generator would start CUDA in a process that does not use it.
    has_gpu = trainer.args.device.type == "cuda" or (torch.cuda.is_available() and torch.cuda.is_initialized())
    found = capture_random_states(gpu=has_gpu, known=None if _last_draws is None else _last_draws.given_back)
    continue_random_draws(found)
    keeps_modes, trainer._has_modes_of_training = trainer._has_modes_of_training, False
    modes = [] if keeps_modes else [(module, module.training) for module in modules_of(trainer.model)]
    optimizer_trains = not keeps_modes and _is_in_train_mode(trainer.optimizer)
    device = model_device(trainer.model)
    seedings = seeds.seedings()
    trainer._is_left_as_found = True
    try:
        yield
    finally:
        trainer._is_left_as_found = False
        # Another Trainer's evaluations inside this one have given back theirs.
        continue_random_draws()
        if seeds.seedings() == seedings:
            ended_at = capture_random_states(gpu=has_gpu, known=found)
            _last_draws = _Draws(ended_at, found, seedings)
            set_random_states(found, ended_at)
        put_back_modes(modes)
        if optimizer_trains:
            trainer.optimizer.train()
        if device is not None and model_device(trainer.model) != device and not is_sharded(trainer.model):
            trainer.model.to(device)


def model_device(model: nn.Module) -> torch.device | None:
    """The device of a model's parameters; None where it has none, or has them on several."""
    devices = {parameter.device for parameter in parameters_of(model)}
    return devices.pop() if len(devices) == 1 else None


def _is_in_train_mode(optimizer: Any) -> bool:
    # Optimizers with modes, as schedule-free ones, note theirs in each group.
    return callable(getattr(optimizer, "train", None)) and any(
        group.get("train_mode", False) for group in optimizer.param_groups
    )
