"""Strategies that a user hands over as `lightning={"strategy": ...}`, made to fit a Trainer."""

from __future__ import annotations

import copy
import functools
from typing import Any

from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    ParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
    StrategyRegistry,
)

from littrainer.strategies.choice import TrainedModel, create_strategy
from littrainer.strategies.data_parallel import ResidentDDPStrategy
from littrainer.strategies.single_device import LaunchedProcesses, ResidentSingleDeviceStrategy

STARTS_NO_PROCESSES = "popen"


# Kind of strategy -> the Trainer's own of that kind; the first that fits is taken.
FITTED: tuple[tuple[type[Strategy], type[Strategy]], ...] = (
    (DDPStrategy, ResidentDDPStrategy),
    (SingleDeviceStrategy, ResidentSingleDeviceStrategy),
)


def adapt_strategy(given: Any, trained: TrainedModel) -> Any:
    """A strategy of the user's, for one `lightning.Trainer` of the processes that are running already.

    Parameters:
        given: a strategy, which is left as it is, or a name that Lightning knows.

    Raises:
        ValueError: it starts processes itself, or is one of DeepSpeed's.
    """
    fitted: Any = create_strategy(trained) if given == "auto" else _made_to_fit(given)
    if isinstance(fitted, ParallelStrategy):
        args = trained.args
        if fitted.cluster_environment is None and args.world_size > 1:
            fitted.cluster_environment = LaunchedProcesses(args)
        # Lightning takes the device with the number of the process, and a process may see one GPU only, number 0.
        fitted.parallel_devices = fitted.parallel_devices or [args.device] * args.local_world_size
    return fitted


def _made_to_fit(given: Any) -> Any:
    if isinstance(given, str) and given in StrategyRegistry:
        given = StrategyRegistry.get(given)
    if not isinstance(given, Strategy):
        # Lightning knows more names, and tells which.
        return given
    if isinstance(given, DeepSpeedStrategy):
        raise ValueError(
            f"lightning={{'strategy': ...}} is a {type(given).__name__}, whose checkpoints from_pretrained does not "
            "load: pass its configuration as the argument `deepspeed`."
        )
    start_method = getattr(given, "_start_method", STARTS_NO_PROCESSES)
    if start_method != STARTS_NO_PROCESSES:
        raise ValueError(
            f"lightning={{'strategy': ...}} is a {type(given).__name__} that starts processes by itself "
            f"(start_method={start_method!r}), and a script of a Trainer is started in each process: use "
            "strategy='ddp', and start it with `littrainer run --devices N script.py` or torchrun."
        )
    own = next((own for kind, own in FITTED if isinstance(given, kind)), None)
    if own is None or isinstance(given, own):
        return copy.copy(given)
    # A strategy serves one lightning.Trainer only, and each training has another.
    kind = _fitted_class(type(given), own)
    fitted = kind.__new__(kind)
    vars(fitted).update(vars(given))
    return fitted


@functools.cache
def _fitted_class(kind: type[Strategy], own: type[Strategy]) -> type[Strategy]:
    return type(kind.__name__, (own, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})
