"""Strategies that a user hands over as `lightning={"strategy": ...}`, made to fit a Trainer."""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import (
    DDPStrategy,
    ParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
    StrategyRegistry,
)

from littrainer.strategies.choice import strategy_for, strategy_name
from littrainer.strategies.data_parallel import ModelInDDP
from littrainer.strategies.launched import LaunchedProcesses
from littrainer.strategies.resident import release_plugins

if TYPE_CHECKING:
    from littrainer.trainer import Trainer

STARTS_NO_PROCESSES = "popen"


class StaysOnDevice:
    """A strategy of one device that leaves the model there."""

    def teardown(self) -> None:
        """Release what the plugins hold, and leave the model where it is."""
        release_plugins(self)


# Kind of strategy -> what it does differently for a Trainer; the first that fits is taken.
FITTED: tuple[tuple[type[Strategy], type], ...] = (
    (DDPStrategy, ModelInDDP),
    (SingleDeviceStrategy, StaysOnDevice),
)


def fitted_strategy(given: Any, trainer: Trainer) -> Any:
    """A strategy of the user's, for one `lightning.Trainer` of the processes that are running already.

    Parameters:
        given: a strategy, which is left as it is, or a name that Lightning knows.

    Raises:
        ValueError: it starts processes of its own.
    """
    if given == "auto":
        return strategy_for(trainer)
    if isinstance(given, str) and given in StrategyRegistry:
        given = StrategyRegistry.get(given)
    if not isinstance(given, Strategy):
        # Lightning knows more names, and tells which.
        return given
    start_method = getattr(given, "_start_method", STARTS_NO_PROCESSES)
    if start_method != STARTS_NO_PROCESSES:
        raise ValueError(
            f"lightning={{'strategy': ...}} is a {type(given).__name__} that starts processes by itself "
            f"(start_method={start_method!r}), and a script of a Trainer is started in each process: use "
            "strategy='ddp', and start it with `littrainer run --devices N script.py` or torchrun."
        )
    behaviour = next((one for kind, one in FITTED if isinstance(given, kind)), None)
    if behaviour is None or isinstance(given, behaviour):
        fitted: Any = copy.copy(given)
    else:
        # A strategy serves one lightning.Trainer only, and each training has one of its own.
        kind = _fitted_class(type(given), behaviour)
        fitted = kind.__new__(kind)
        vars(fitted).update(vars(given))
    if isinstance(fitted, ParallelStrategy) and fitted.cluster_environment is None and trainer.args.world_size > 1:
        fitted.cluster_environment = LaunchedProcesses(trainer.args)
    return fitted


def name_of_strategy(given: Any, trainer: Trainer) -> str:
    """What a strategy of the user's, or that of the arguments where this is "auto", is called in errors."""
    if given == "auto":
        return strategy_name(trainer.args)
    return given if isinstance(given, str) else type(given).__name__


@functools.cache
def _fitted_class(kind: type[Strategy], behaviour: type) -> type[Strategy]:
    return type(kind.__name__, (behaviour, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})
