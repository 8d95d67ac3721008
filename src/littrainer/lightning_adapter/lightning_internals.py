"""Uses of protected names of Lightning; tests/lightning_adapter fails if a release changes one of them.

Protected members of base classes, which subclasses of strategies and plugins use, are in a table of
tests/lightning_adapter/test_known_releases.py.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import registry
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.trainer.call import _call_callback_hooks
from lightning.pytorch.trainer.states import RunningStage, TrainerFn

from littrainer.callbacks.lightning_callbacks import is_lightning_class

# Calls `on_validation_end` of callbacks that monitor metrics (True), or of the others (False).
EndOfValidation = Callable[[bool], None]

# Above any user's limit_val_batches.
MAX_BATCH_LIMIT = 2**32

# Reading the entry points of packages takes 10,400 of the 12,000 Python calls of building a `lightning.Trainer`.
vars(registry)["entry_points"] = functools.cache(registry.entry_points)


class _ValidationInsideFit(_EvaluationLoop):
    """Lightning's evaluation loop, without its last hook."""

    is_open = False

    def on_run_start(self) -> None:
        self.is_open = True
        super().on_run_start()

    def _on_evaluation_epoch_end(self) -> None:
        super()._on_evaluation_epoch_end()
        self.is_open = False

    def _on_evaluation_end(self, *args: Any, **kwargs: Any) -> None:
        # No call of `on_validation_end`, in which callbacks read metrics: these are computed later.
        self.trainer._logger_connector.reset_results()


def evaluate_inside_fit(lightning_trainer: pl.Trainer, batches: Iterable[Any]) -> EndOfValidation:
    """Run Lightning's evaluation loop within a hook of fit.

    Lightning's fit validates only at intervals of micro-batches, so a new loop replaces its validation loop meanwhile.

    Returns:
        function that calls `on_validation_end`, to call when the metrics are computed.
    """
    loop = _ValidationInsideFit(
        lightning_trainer, TrainerFn.FITTING, RunningStage.VALIDATING, verbose=False, inference_mode=False
    )
    loop._data_source.instance = batches
    with _replace_val_loop(loop):
        try:
            loop.run()
        except BaseException:
            if loop.is_open:
                _restore_trained_weights(lightning_trainer)
            raise
        finally:
            # The fetcher would keep the `lightning.Trainer` alive.
            loop._data_fetcher = None

    def end(is_monitoring: bool) -> None:
        with _replace_val_loop(loop), torch.no_grad():
            _call_callback_hooks(lightning_trainer, "on_validation_end", monitoring_callbacks=is_monitoring)

    return end


def _restore_trained_weights(lightning_trainer: pl.Trainer) -> None:
    # Training may continue after a signal that ended the evaluation.
    for callback in lightning_trainer.callbacks:  # type: ignore[attr-defined]
        if is_lightning_class(callback, "WeightAveraging"):
            callback.on_validation_epoch_end(lightning_trainer, lightning_trainer.lightning_module)


@contextmanager
def _replace_val_loop(loop: _EvaluationLoop) -> Iterator[None]:
    pl_trainer = loop.trainer
    epoch_loop = pl_trainer.fit_loop.epoch_loop
    # Lightning asserts that a validation leaves the logging state unchanged.
    connector = pl_trainer._logger_connector
    first_loop_iteration, was_validating = connector._first_loop_iter, pl_trainer.validating
    fit_val_loop, epoch_loop.val_loop = epoch_loop.val_loop, loop
    pl_trainer.validating = True
    try:
        yield
    finally:
        epoch_loop.val_loop = fit_val_loop
        if not was_validating:
            pl_trainer.training = True
        connector._first_loop_iter = first_loop_iteration


def weaken_back_references(lightning_trainer: pl.Trainer) -> None:
    """Replace a finished `lightning.Trainer` in its parts by weak references, so that no cycle keeps it alive."""
    weak, visited = weakref.proxy(lightning_trainer), set()
    owned_parts = [lightning_trainer.strategy._lightning_module, lightning_trainer.progress_bar_callback]
    parts: list[Any] = [*vars(lightning_trainer).values(), *owned_parts]
    while parts:
        part = parts.pop()
        # `isinstance` would dereference a dead proxy.
        package = type(part).__module__.partition(".")[0]
        if id(part) in visited or package not in ("lightning", "littrainer") or not hasattr(part, "__dict__"):
            continue
        visited.add(id(part))
        for name, value in [*vars(part).items()]:
            if value is lightning_trainer:
                # Set again in `setup`; a proxy could not be pickled.
                setattr(part, name, None if isinstance(part, pl.Callback) else weak)
            elif isinstance(part, _Loop) and issubclass(type(value), _Loop):
                parts.append(value)


def sync_unstarted_average(lightning_trainer: pl.Trainer, module: pl.LightningModule) -> None:
    for callback in lightning_trainer.callbacks:  # type: ignore[attr-defined]
        average = getattr(callback, "_average_model", None)
        if average is not None and not getattr(average, "n_averaged", True):
            averaged, trained = ([*part.parameters(), *part.buffers()] for part in (average.module, module))
            for value, current in zip(averaged, trained, strict=True):
                value.data.copy_(current.data)


def set_validation_enabled(lightning_trainer: pl.Trainer, module: pl.LightningModule, has_validation: bool) -> None:
    """Set Lightning's `enable_validation`, which is true only during the setup of callbacks."""
    source = lightning_trainer.fit_loop.epoch_loop.val_loop._data_source
    source.instance = () if has_validation else module


def set_displayed_batch_count(lightning_trainer: pl.Trainer, number: float) -> None:
    """Set the number of batches that progress bars show, after the loop's data setup."""
    loop: Any = lightning_trainer._active_loop
    name = "max_batches" if lightning_trainer.predicting else "_max_batches"
    limits = getattr(loop, name)
    # The loop keeps the old list as its limit.
    setattr(loop, name, [number if limit > MAX_BATCH_LIMIT else min(limit, number) for limit in limits])


class RecordingBatchSampler(_IndexBatchSamplerWrapper):
    """A batch sampler that records indices for prediction writers."""

    def __getattr__(self, name: str) -> Any:
        if name == "_batch_sampler":
            raise AttributeError(name)
        return getattr(self._batch_sampler, name)


@contextmanager
def log_for_dataloader(lightning_trainer: pl.Trainer, index: int, position: int) -> Iterator[None]:
    """Attribute metrics that are logged in the block to a single loader.

    Parameters:
        position: position among the loaders with a batch, counted from -1 for the last.
    """
    loop: Any = lightning_trainer._evaluation_loop
    loop._results.dataloader_idx = index if loop.num_dataloaders > 1 else None
    try:
        yield
        loop._logged_outputs[position].update(lightning_trainer._logger_connector.update_eval_epoch_metrics())
    finally:
        loop._results.dataloader_idx = None


def restore_progress(lightning_trainer: pl.Trainer, *, epochs: int, optimizer_steps: int) -> None:
    lightning_trainer.fit_loop.epoch_progress.increment_by(epochs)
    set_optimizer_step_count(lightning_trainer, optimizer_steps)


def set_optimizer_step_count(lightning_trainer: pl.Trainer, optimizer_steps: int) -> None:
    epoch_loop = lightning_trainer.fit_loop.epoch_loop
    for steps in (
        epoch_loop.automatic_optimization.optim_progress.optimizer.step,
        epoch_loop.manual_optimization.optim_step_progress,
    ):
        steps.total.ready = steps.total.completed = optimizer_steps
    epoch_loop._batches_that_stepped = optimizer_steps


def skip_to_next_epoch(lightning_trainer: pl.Trainer) -> None:
    """Start the next epoch after a checkpoint from the end of an epoch.

    Lightning does not recognize that end if the loader's length is unknown or has changed.
    """
    fit_loop = lightning_trainer.fit_loop
    epochs, epoch_loop = fit_loop.epoch_progress, fit_loop.epoch_loop
    progress: Any = epochs.current
    if progress.started > progress.processed:
        epochs.increment_processed()
    if progress.processed > progress.completed:
        epochs.increment_completed()
    if not epoch_loop.restarted_on_last:
        epoch_loop._batches_that_stepped += 1
    epoch_loop.restarting = False
    fit_loop.reset_restart_stage()


def replace_optimizer(lightning_trainer: pl.Trainer, optimizer: torch.optim.Optimizer) -> None:
    """Replace the optimizer, but keep its functions that count steps in manual optimization."""
    strategy = lightning_trainer.strategy
    old_wrapper = strategy._lightning_optimizers[0]
    lightning_trainer.optimizers = [optimizer]
    wrapper = strategy._lightning_optimizers[0]
    wrapper._on_before_step = old_wrapper._on_before_step
    wrapper._on_after_step = old_wrapper._on_after_step


@contextmanager
def record_optimizer_step(lightning_trainer: pl.Trainer) -> Iterator[Any]:
    optimizer = lightning_trainer.strategy._lightning_optimizers[0]
    optimizer._on_before_step()
    yield optimizer
    optimizer._on_after_step()


def disable_auto_resume(lightning_trainer: pl.Trainer) -> None:
    """Prevent a resume of a checkpoint of OnExceptionCheckpoint or of a cluster's signal."""
    connector = lightning_trainer._checkpoint_connector
    # The setter accepts no None.
    connector._user_managed = True
    connector._ckpt_path = None


def has_registered_callbacks() -> bool:
    """Return whether an installed package adds callbacks to each `lightning.Trainer`."""
    return bool(registry.entry_points(group="lightning.pytorch.callbacks_factory"))


def disable_signal_handling(lightning_trainer: pl.Trainer) -> None:
    """Stop Lightning from handling signals.

    On SIGTERM it would exit with status 0; at a cluster's signal it would write a checkpoint.
    """
    connector: Any = lightning_trainer._signal_connector
    connector.register_signal_handlers = lambda: None
    # Saves a broadcast in each micro-batch.
    epoch_loop: Any = lightning_trainer.fit_loop.epoch_loop
    epoch_loop._broadcast_sigterm_tensor = lambda: None


def disable_prefetch(lightning_trainer: pl.Trainer) -> None:
    """Disable prefetching from a loader without length, when fit requests an iterator."""
    fetcher: Any = lightning_trainer.fit_loop._data_fetcher
    if fetcher is not None:
        fetcher.prefetch_batches = 0


def end_epoch_after_batch(lightning_trainer: pl.Trainer) -> None:
    fetcher: Any = lightning_trainer.fit_loop._data_fetcher
    fetcher.done = True


class _PeekableIterator(Iterator[Any]):
    def __init__(self, iterator: Iterator[Any]):
        self._iterator = iterator
        self._pending: list[Any] = []

    def __next__(self) -> Any:
        return self._pending.pop(0) if self._pending else next(self._iterator)

    def peek(self, number: int) -> list[Any]:
        # `iter` would restart Lightning's iterators.
        with suppress(StopIteration):
            while len(self._pending) < number:
                self._pending.append(next(self._iterator))
        return self._pending[:number]


def peek_batches(lightning_trainer: pl.Trainer, number: int) -> list[Any]:
    fit_loop, fetcher = lightning_trainer.fit_loop, lightning_trainer.fit_loop._data_fetcher
    remaining = fit_loop.max_batches - fit_loop.epoch_loop.batch_progress.current.ready
    prefetched: Any = getattr(fetcher, "batches", [])
    if fetcher is None or fetcher.iterator is None or remaining <= 0:
        return []
    if not isinstance(fetcher.iterator, _PeekableIterator):
        fetcher.iterator = _PeekableIterator(fetcher.iterator)
    number = int(min(number, remaining))
    items = [*prefetched, *fetcher.iterator.peek(number - len(prefetched))][:number]
    return [batch for batch, *_ in items]
