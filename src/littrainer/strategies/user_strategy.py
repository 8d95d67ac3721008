"""Adaptation of strategies from `lightning={"strategy": ...}` to a Trainer."""

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

EXTERNAL_PROCESSES = "popen"


# Lightning's class -> the Trainer's subclass; the first match counts.
ADAPTED_CLASSES: tuple[tuple[type[Strategy], type[Strategy]], ...] = (
    (DDPStrategy, ResidentDDPStrategy),
    (SingleDeviceStrategy, ResidentSingleDeviceStrategy),
)


def adapt_strategy(strategy: Any, trained: TrainedModel) -> Any:
    """Adapt a copy of the user's strategy, or a name in Lightning's registry, for a new `lightning.Trainer`.

    Raises:
        ValueError: the strategy starts processes, or is a DeepSpeedStrategy.
    """
    adapted: Any = create_strategy(trained) if strategy == "auto" else _copy_adapted(strategy)
    if isinstance(adapted, ParallelStrategy):
        args = trained.args
        if adapted.cluster_environment is None and args.world_size > 1:
            adapted.cluster_environment = LaunchedProcesses(args)
        # Lightning indexes the devices by local rank, and a process may see a single GPU, number 0.
        adapted.parallel_devices = adapted.parallel_devices or [args.device] * args.local_world_size
    return adapted


def _copy_adapted(strategy: Any) -> Any:
    if isinstance(strategy, str) and strategy in StrategyRegistry:
        strategy = StrategyRegistry.get(strategy)
    if not isinstance(strategy, Strategy):
        # Lightning checks further names.
        return strategy
    if isinstance(strategy, DeepSpeedStrategy):
        raise ValueError(
            f"lightning={{'strategy': ...}} is a {type(strategy).__name__}, whose checkpoints from_pretrained does not "
            "load: pass its configuration as the argument `deepspeed`."
        )
    start_method = getattr(strategy, "_start_method", EXTERNAL_PROCESSES)
    if start_method != EXTERNAL_PROCESSES:
        raise ValueError(
            f"lightning={{'strategy': ...}} is a {type(strategy).__name__} that starts processes by itself "
            f"(start_method={start_method!r}), and a script of a Trainer is started in each process: use "
            "strategy='ddp', and start it with `littrainer run --devices N script.py` or torchrun."
        )
    base = next((base for kind, base in ADAPTED_CLASSES if isinstance(strategy, kind)), None)
    # Always copy: a strategy serves a single lightning.Trainer.
    if base is None or isinstance(strategy, base):
        return copy.copy(strategy)
    kind = _make_adapted_class(type(strategy), base)
    adapted = kind.__new__(kind)
    vars(adapted).update(vars(strategy))
    return adapted


@functools.cache
def _make_adapted_class(kind: type[Strategy], base: type[Strategy]) -> type[Strategy]:
    return type(kind.__name__, (base, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})
