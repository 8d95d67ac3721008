"""Lightning's loop over the batches of an evaluation, without what nobody listens to.

An evaluation of a single batch takes 1900 Python calls in Lightning's own loop, of which 280 belong to the batch.
`pass_over` hands the batches to the module through the strategy, within what the running fit, or the first evaluation
of this kind, has set up. Lightning's own loop remains in use if a callback, a profiler or a debug log may listen, with
other strategies than `PLAIN_STRATEGIES`, and in releases that tests/engine/ has not compared (`KNOWN_RELEASES`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus

from littrainer.engine.fast_training_loop import KNOWN_RELEASES, PLAIN_PRECISIONS, PLAIN_STRATEGIES, listens_to
from littrainer.engine.module import TrainerModule, users_callbacks

# What callbacks may hear of during an evaluation or a prediction.
HOOKS = tuple(
    f"on_{stage}_{moment}"
    for stage in ("validation", "predict")
    for moment in ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end")
)
# A script that sets one of these on the module gets Lightning's loop too.
OF_THE_MODULE = frozenset(HOOKS) | {"on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"}


def may_be_fast(pl_trainer: Any) -> bool:
    """Whether an evaluation of a `lightning.Trainer` that fits, or has evaluated, can do without Lightning's loop."""
    return (
        pl.__version__ in KNOWN_RELEASES
        and type(pl_trainer.lightning_module) is TrainerModule
        and OF_THE_MODULE.isdisjoint(vars(pl_trainer.lightning_module))
        and type(pl_trainer.strategy) in PLAIN_STRATEGIES
        and type(pl_trainer.precision_plugin) in PLAIN_PRECISIONS
        and type(pl_trainer.profiler) is PassThroughProfiler
        and not call.log.isEnabledFor(logging.DEBUG)
        and _nobody_listens(pl_trainer)
    )


def _nobody_listens(pl_trainer: Any) -> bool:
    callbacks = users_callbacks(pl_trainer)
    # Outside of fit Lightning calls `setup`, `teardown` and `on_exception` around each evaluation too.
    return not callbacks or (
        _is_inside_fit(pl_trainer) and not any(listens_to(callback, hook) for callback in callbacks for hook in HOOKS)
    )


def _is_inside_fit(pl_trainer: Any) -> bool:
    return bool(pl_trainer.state.fn == TrainerFn.FITTING and pl_trainer.state.status == TrainerStatus.RUNNING)


def pass_over(pl_trainer: Any, batches: Iterable[Any], is_prediction: bool = False) -> None:
    """Hand the batches to the module.

    Parameters:
        pl_trainer: one that fits, where this is an evaluation within; else one that has evaluated this module.
        is_prediction: they go to `predict_step`; else to `validation_step`.
    """
    state, module, connector = pl_trainer.state, pl_trainer.lightning_module, pl_trainer._logger_connector
    is_inside_fit = _is_inside_fit(pl_trainer)
    loop = pl_trainer.fit_loop.epoch_loop.val_loop if is_inside_fit else pl_trainer.validate_loop
    if is_prediction and not is_inside_fit:
        fn, stage = TrainerFn.PREDICTING, RunningStage.PREDICTING
        step, name = pl_trainer.strategy.predict_step, "predict_step"
    else:
        fn, stage = TrainerFn.VALIDATING, RunningStage.VALIDATING
        step, name = pl_trainer.strategy.validation_step, "validation_step"
    outer_hook, outer_results = module._current_fx_name, loop._results
    outer_stage, outer_status, outer_iteration = state.stage, state.status, connector._first_loop_iter
    # Of a validation that this one is nested in, which goes on collecting what is logged under this hook.
    outer_collecting = connector._current_fx if outer_stage == RunningStage.VALIDATING else None
    if not is_inside_fit:
        state.fn = fn
        connector.reset_metrics()
    state.stage, state.status = stage, TrainerStatus.RUNNING
    connector._first_loop_iter = None
    # Nothing of another pass is averaged with what is logged in this one.
    results = loop._results = type(outer_results)(training=False)
    # `self.log` goes by it.
    module.__dict__["_current_fx_name"] = name
    try:
        with torch.no_grad():
            for number, batch in enumerate(batches):
                connector._first_loop_iter = connector._first_loop_iter is None
                step(batch, number)
                if results:
                    connector.on_batch_end()
                    connector.update_eval_step_metrics(number)
            if results:
                connector.epoch_end_reached()
                connector.log_eval_end_metrics(connector.update_eval_epoch_metrics())
    finally:
        if results:
            # Metrics that were logged are the script's own objects.
            connector.reset_results()
        loop._results, connector._current_fx = outer_results, outer_collecting
        module.__dict__["_current_fx_name"] = outer_hook
        state.stage, state.status, connector._first_loop_iter = outer_stage, outer_status, outer_iteration
