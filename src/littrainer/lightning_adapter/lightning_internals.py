"""The protected names of Lightning that this package touches, each with its reason.

test_lightning_internals.py and test_known_releases.py fail if a release of Lightning changes any of them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import registry
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.trainer.call import _call_callback_hooks
from lightning.pytorch.trainer.states import RunningStage, TrainerFn

# Calls `on_validation_end` of the callbacks that monitor metrics (True), or of all others (False).
EndOfValidation = Callable[[bool], None]

# A limit_val_batches that somebody has set is smaller.
MAX_BATCH_LIMIT = 2**32


class _ValidationInsideFit(_EvaluationLoop):
    """Lightning's evaluation loop, without its last hook."""

    # Whether the hooks of the beginning have been called, and those of the end not yet.
    is_open = False

    def on_run_start(self) -> None:
        self.is_open = True
        super().on_run_start()

    def _on_evaluation_epoch_end(self) -> None:
        super()._on_evaluation_epoch_end()
        self.is_open = False

    def _on_evaluation_end(self, *args: Any, **kwargs: Any) -> None:
        # The metrics are computed after the loop, and callbacks look at them in this hook.
        self.trainer._logger_connector.reset_results()


def evaluate_inside_fit(
    lightning_trainer: pl.Trainer, batches: Iterable[Any], on_interrupt: Callable[[], None] = lambda: None
) -> EndOfValidation:
    """Run Lightning's evaluation loop from within a hook of fit.

    Parameters:
        batches: handed to the module's `validation_step` one by one.
        on_interrupt: called where an error ends the loop between the first hooks and the last ones.

    Returns:
        What calls the last hook, `on_validation_end`, which is due when the metrics are known.

    Lightning can only validate inside fit at intervals counted in micro-batches, over loaders known beforehand; a
    Trainer evaluates at optimizer steps, at epoch ends and when a callback asks, over whatever dataset is named. So a
    fresh loop takes the place of fit's own for one run.
    """
    loop = _ValidationInsideFit(
        lightning_trainer, TrainerFn.FITTING, RunningStage.VALIDATING, verbose=False, inference_mode=False
    )
    # Where a loader is looked for when the loop sets up its data.
    loop._data_source.instance = batches
    with _replace_val_loop(loop):
        try:
            loop.run()
        except BaseException:
            if loop.is_open:
                on_interrupt()
            raise
        finally:
            # Its hooks are methods of the loop, which holds the `lightning.Trainer`.
            loop._data_fetcher = None

    def end(is_monitoring: bool) -> None:
        with _replace_val_loop(loop), torch.no_grad():
            _call_callback_hooks(lightning_trainer, "on_validation_end", monitoring_callbacks=is_monitoring)

    return end


@contextmanager
def _replace_val_loop(loop: _EvaluationLoop) -> Iterator[None]:
    pl_trainer = loop.trainer
    epoch_loop = pl_trainer.fit_loop.epoch_loop
    # Lightning asserts that the first micro-batch after a validation is the first of its logging round.
    connector = pl_trainer._logger_connector
    first_loop_iteration, was_validating = connector._first_loop_iter, pl_trainer.validating
    own_loop, epoch_loop.val_loop = epoch_loop.val_loop, loop
    pl_trainer.validating = True
    try:
        yield
    finally:
        epoch_loop.val_loop = own_loop
        if not was_validating:
            pl_trainer.training = True
        connector._first_loop_iter = first_loop_iteration


def weaken_back_references(lightning_trainer: pl.Trainer) -> None:
    """Let the parts of a `lightning.Trainer` that has run refer to it weakly.

    So it is freed, with the model and the optimizer that its parts hold, when nobody uses it any more. Lightning's own
    references are cycles, which stay until Python collects them. Callbacks of other packages keep what they hold.
    """
    weak, seen = weakref.proxy(lightning_trainer), set()
    # Other callbacks hold the `lightning.Trainer` where their user wants it, who may keep the callback alone.
    of_trainer = [lightning_trainer.strategy._lightning_module, lightning_trainer.progress_bar_callback]
    parts: list[Any] = [*vars(lightning_trainer).values(), *of_trainer]
    while parts:
        part = parts.pop()
        # By their types, since a part may be a reference to an earlier `lightning.Trainer` that is gone.
        package = type(part).__module__.partition(".")[0]
        if id(part) in seen or package not in ("lightning", "littrainer") or not hasattr(part, "__dict__"):
            continue
        seen.add(id(part))
        for name, value in [*vars(part).items()]:
            if value is lightning_trainer:
                # Callbacks are given their `lightning.Trainer` when they are set up, and may be pickled before.
                setattr(part, name, None if isinstance(part, pl.Callback) else weak)
            elif isinstance(part, _Loop) and issubclass(type(value), _Loop):
                parts.append(value)


def sync_unstarted_average(lightning_trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Let an average of the weights that has not begun yet be the weights that are trained."""
    for callback in lightning_trainer.callbacks:  # type: ignore[attr-defined]
        average = getattr(callback, "_average_model", None)
        if average is not None and not getattr(average, "n_averaged", True):
            averaged, trained = ([*part.parameters(), *part.buffers()] for part in (average.module, module))
            for value, current in zip(averaged, trained, strict=True):
                value.data.copy_(current.data)


def set_validation_enabled(lightning_trainer: pl.Trainer, module: pl.LightningModule, has_validation: bool) -> None:
    """Let `enable_validation` say whether there are evaluations, while callbacks are set up.

    Afterwards it has to say no, or Lightning would begin some by itself.
    """
    source = lightning_trainer.fit_loop.epoch_loop.val_loop._data_source
    source.instance = () if has_validation else module


def set_displayed_batch_count(lightning_trainer: pl.Trainer, number: float) -> None:
    """Let progress bars show how many batches the evaluation or prediction going on has.

    Parameters:
        number: batches; infinity where that is not known.

    To be called when the loop has set up its data: the number that Lightning was given before that is the one at which
    its loop stops, and a loader may give more batches than its length says.
    """
    loop: Any
    if lightning_trainer.predicting:
        loop, name = lightning_trainer.predict_loop, "max_batches"
    elif lightning_trainer.state.fn == TrainerFn.FITTING:
        loop, name = lightning_trainer.fit_loop.epoch_loop.val_loop, "_max_batches"
    else:
        loop, name = lightning_trainer.validate_loop, "_max_batches"
    limits = getattr(loop, name)
    # A new list, since the loop goes by the one that it has.
    setattr(loop, name, [number if limit > MAX_BATCH_LIMIT else min(limit, number) for limit in limits])


class RecordingBatchSampler(_IndexBatchSamplerWrapper):
    """A batch sampler that notes the samples of each batch, where Lightning's prediction writers look for them."""

    def __getattr__(self, name: str) -> Any:
        if name == "_batch_sampler":
            raise AttributeError(name)
        return getattr(self._batch_sampler, name)


@contextmanager
def log_for_dataloader(lightning_trainer: pl.Trainer, index: int, place: int) -> Iterator[None]:
    """Within this at the end of a validation or a test, logged metrics belong to a single loader of several.

    Parameters:
        index: the number of the loader; by default Lightning hands such metrics to all loaders.
        place: its place among the loaders that had a batch, counted from the last, which is -1.
    """
    loop: Any = lightning_trainer._evaluation_loop
    loop._results.dataloader_idx = index if loop.num_dataloaders > 1 else None
    try:
        yield
        loop._logged_outputs[place].update(lightning_trainer._logger_connector.update_eval_epoch_metrics())
    finally:
        loop._results.dataloader_idx = None


def restore_progress(lightning_trainer: pl.Trainer, *, epochs: int, optimizer_steps: int) -> None:
    """Let Lightning count on from where a resumed training stands, before it is fitted.

    Parameters:
        epochs: complete epochs.
        optimizer_steps: optimizer steps that have been taken.
    """
    fit_loop = lightning_trainer.fit_loop
    for progress in (fit_loop.epoch_progress.total, fit_loop.epoch_progress.current):
        progress.ready = progress.completed = epochs
        progress.started = progress.processed = epochs  # type: ignore[attr-defined]
    set_optimizer_step_count(lightning_trainer, optimizer_steps)


def set_optimizer_step_count(lightning_trainer: pl.Trainer, optimizer_steps: int) -> None:
    """Let both of Lightning's ways of optimization, each of which has a counter, count on from a number of steps."""
    epoch_loop = lightning_trainer.fit_loop.epoch_loop
    for steps in (
        epoch_loop.automatic_optimization.optim_progress.optimizer.step,
        epoch_loop.manual_optimization.optim_step_progress,
    ):
        steps.total.ready = steps.total.completed = optimizer_steps
    # The step under which Lightning and its callbacks log.
    epoch_loop._batches_that_stepped = optimizer_steps


def skip_to_next_epoch(lightning_trainer: pl.Trainer) -> None:
    """Let a fit whose checkpoint stands at the end of an epoch begin the next one, where it would read on in that one.

    It would where a loader has no length, or another one than when the checkpoint was written: it cannot see that the
    data had ended. To be called when Lightning tells the loader that an epoch begins.
    """
    fit_loop = lightning_trainer.fit_loop
    epochs, epoch_loop = fit_loop.epoch_progress, fit_loop.epoch_loop
    counted: Any = epochs.current
    if counted.started > counted.processed:
        epochs.increment_processed()
    if counted.processed > counted.completed:
        epochs.increment_completed()
    if not epoch_loop.restarted_on_last:
        # The step under which loggers are told of the next one.
        epoch_loop._batches_that_stepped += 1
    # So it counts its micro-batches from 0.
    epoch_loop.restarting = False
    fit_loop.reset_restart_stage()


def replace_optimizer(lightning_trainer: pl.Trainer, optimizer: torch.optim.Optimizer) -> None:
    """Let another optimizer step from here on, also within a micro-batch of manual optimization.

    There Lightning counts the steps by what it has set on its wrapper of the optimizer when the micro-batch began.
    """
    before = lightning_trainer.strategy._lightning_optimizers[0]
    lightning_trainer.optimizers = [optimizer]
    after = lightning_trainer.strategy._lightning_optimizers[0]
    after._on_before_step, after._on_after_step = before._on_before_step, before._on_after_step


@contextmanager
def record_optimizer_step(lightning_trainer: pl.Trainer) -> Iterator[Any]:
    """Give Lightning's wrapper of the optimizer, and count one step of it if the block ends without an error."""
    optimizer = lightning_trainer.strategy._lightning_optimizers[0]
    optimizer._on_before_step()
    yield optimizer
    optimizer._on_after_step()


def disable_auto_resume(lightning_trainer: pl.Trainer) -> None:
    """Keep Lightning from looking for a checkpoint to begin with: which one a training resumes is the Trainer's to say.

    It would take one that OnExceptionCheckpoint, or a cluster's signal, has left.
    """
    connector = lightning_trainer._checkpoint_connector
    # As if a user had set `lightning_trainer.ckpt_path`, which takes no None.
    connector._user_managed, connector._ckpt_path = True, None


@functools.cache
def _cached_entry_points(group: str) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=group))


@contextmanager
def cached_entry_points() -> Iterator[None]:
    """Let a `lightning.Trainer` that is built in the block read the entry points of all packages once in a process.

    Lightning reads the metadata of every installed package for each Trainer, which is 10,400 of the 12,000 Python calls
    of building a Trainer where 175 packages are installed. The callbacks found there are loaded and built as before.
    """
    own = registry.entry_points
    registry.entry_points = _cached_entry_points  # type: ignore[assignment]
    try:
        yield
    finally:
        # Another thread may have entered first, and restores the function when it leaves.
        if own is not _cached_entry_points:
            registry.entry_points = own


def disable_signal_handling(lightning_trainer: pl.Trainer) -> None:
    """Keep Lightning from taking over signals.

    On SIGTERM it would finish the micro-batch and exit with status 0. On a cluster it would, at the signal that
    announces the end of a job, write a checkpoint in its format, which the next run then loads unasked.
    """
    connector: Any = lightning_trainer._signal_connector
    connector.register_signal_handlers = lambda: None
    # With several processes it would ask the first one at each micro-batch whether it got one, and wait for the answer.
    epoch_loop: Any = lightning_trainer.fit_loop.epoch_loop
    epoch_loop._broadcast_sigterm_tensor = lambda: None


def disable_prefetch(lightning_trainer: pl.Trainer) -> None:
    """Keep fit from reading a batch ahead of a loader that has no length; to be called when it asks for an iterator."""
    fetcher: Any = lightning_trainer.fit_loop._data_fetcher
    # It first asks for one to see whether there is any.
    if fetcher is not None:
        fetcher.prefetch_batches = 0


def end_epoch_after_batch(lightning_trainer: pl.Trainer) -> None:
    """Let fit step, validate and end the epoch with the batch that it is handed, of a loader that has no length."""
    fetcher: Any = lightning_trainer.fit_loop._data_fetcher
    fetcher.done = True


class _PeekableIterator(Iterator[Any]):
    """An iterator that can be looked at ahead.

    Parameters:
        iterator: what it hands on.
    """

    def __init__(self, iterator: Iterator[Any]):
        self._iterator = iterator
        self._waiting: list[Any] = []

    def __next__(self) -> Any:
        return self._waiting.pop(0) if self._waiting else next(self._iterator)

    def ahead(self, number: int) -> list[Any]:
        """Up to so many of those that come next."""
        # Not by what asks for an iterator of it once more, which would begin at the beginning.
        with suppress(StopIteration):
            while len(self._waiting) < number:
                self._waiting.append(next(self._iterator))
        return self._waiting[:number]


def peek_batches(lightning_trainer: pl.Trainer, number: int) -> list[Any]:
    """Up to so many of the training batches that fit will go on with in this epoch, as their loader made them."""
    fit_loop, fetcher = lightning_trainer.fit_loop, lightning_trainer.fit_loop._data_fetcher
    left = fit_loop.max_batches - fit_loop.epoch_loop.batch_progress.current.ready
    fetched: Any = getattr(fetcher, "batches", [])
    if fetcher is None or fetcher.iterator is None or left <= 0:
        return []
    if not isinstance(fetcher.iterator, _PeekableIterator):
        fetcher.iterator = _PeekableIterator(fetcher.iterator)
    number = int(min(number, left))
    found = [*fetched, *fetcher.iterator.ahead(number - len(fetched))][:number]
    return [batch for batch, *_ in found]
