"""The protected names of Lightning that this package touches, each with its reason.

Tests in tests/test_lightning_internals.py fail by name when a Lightning release changes one of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.trainer.states import RunningStage, TrainerFn


def evaluate_inside_fit(lightning_trainer: pl.Trainer, batches: Iterable[Any]) -> None:
    """Run Lightning's evaluation loop from within a hook of fit.

    Parameters:
        batches: handed to the module's `validation_step` one by one.

    Lightning can only validate inside fit at intervals counted in micro-batches, over loaders known beforehand; a
    Trainer evaluates at optimizer steps, at epoch ends and when a callback asks, over whatever dataset is named. So a
    fresh loop takes the place of fit's own for one run.
    """
    epoch_loop = lightning_trainer.fit_loop.epoch_loop
    loop = _EvaluationLoop(
        lightning_trainer, TrainerFn.FITTING, RunningStage.VALIDATING, verbose=False, inference_mode=False
    )
    # Where a loader is looked for when the loop sets up its data.
    loop._data_source.instance = batches
    # Lightning asserts that the first micro-batch after a validation is the first of its logging round.
    connector = lightning_trainer._logger_connector
    first_loop_iteration = connector._first_loop_iter
    own_loop, epoch_loop.val_loop = epoch_loop.val_loop, loop
    lightning_trainer.validating = True
    try:
        loop.run()
    finally:
        epoch_loop.val_loop = own_loop
        lightning_trainer.training = True
        connector._first_loop_iter = first_loop_iteration


def leave_signals_alone(lightning_trainer: pl.Trainer) -> None:
    """Keep Lightning from taking over signals.

    On SIGTERM it would finish the micro-batch and exit with status 0. On a cluster it would, at the signal that
    announces the end of a job, write a checkpoint of its own format, which the next run then loads unasked.
    """
    connector: Any = lightning_trainer._signal_connector
    connector.register_signal_handlers = lambda: None
