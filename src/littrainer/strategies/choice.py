"""Which of Lightning's strategies the arguments ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import Strategy

from littrainer.strategies.data_parallel import data_parallel_strategy
from littrainer.strategies.single_device import ResidentSingleDeviceStrategy

if TYPE_CHECKING:
    from littrainer.trainer import Trainer


def _single_device(trainer: Trainer) -> Strategy:
    return ResidentSingleDeviceStrategy(device=trainer.args.device)


def _data_parallel(trainer: Trainer) -> Strategy:
    return data_parallel_strategy(trainer)


def _alone(args: Any) -> bool:
    return args.world_size == 1


def _always(args: Any) -> bool:
    return True


# Name -> whether arguments ask for it, and what makes it. The first that is asked for is taken.
STRATEGIES: dict[str, tuple[Callable[[Any], bool], Callable[[Trainer], Strategy]]] = {
    "single device": (_alone, _single_device),
    "DDP": (_always, _data_parallel),
}


def strategy_name(args: Any) -> str:
    """The name, among `STRATEGIES`, of the strategy that arguments ask for."""
    return next(name for name, (is_asked_for, _) in STRATEGIES.items() if is_asked_for(args))


def strategy_for(trainer: Trainer) -> Strategy:
    """A new strategy for a `lightning.Trainer` that carries out what a Trainer asks for."""
    _, make = STRATEGIES[strategy_name(trainer.args)]
    return make(trainer)
