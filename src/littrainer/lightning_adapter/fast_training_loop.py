"""Lightning's loop over the micro-batches of an epoch, without calls of empty hooks.

Empty hooks take 830 of the 1450 Python calls of an optimizer step of a two-layer model. Lightning's own loop stays in
use with profilers, debug logs, FSDP 1, DeepSpeed and untested releases.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.combined_loader import _MaxSizeCycle

from littrainer.lightning_adapter.module import TrainerModule
from littrainer.lightning_adapter.precision import ForwardMixedPrecision
from littrainer.runtime.interruptions import UserStopIteration
from littrainer.strategies.data_parallel import ResidentDDPStrategy
from littrainer.strategies.single_device import ResidentSingleDeviceStrategy

# Releases of Lightning: the tests in tests/lightning_adapter compare the loop of each with this loop.
SUPPORTED_RELEASES = frozenset(
    {
        *("2.5.0", "2.5.0.post0", "2.5.1", "2.5.1.post0", "2.5.2", "2.5.3", "2.5.4", "2.5.5", "2.5.6"),
        *("2.6.0", "2.6.1", "2.6.4", "2.6.5", "2.6.6"),
    }
)
# Strategies and precision plugins that do nothing around a micro-batch.
PLAIN_STRATEGIES = (ResidentSingleDeviceStrategy, ResidentDDPStrategy)
PLAIN_PRECISIONS = (Precision, ForwardMixedPrecision)
# The Trainer's two callbacks have only the first and the last of the hooks, and ignore the outputs.
NUM_TRAINER_CALLBACKS = 2
HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)
# Methods that Lightning calls on the module; if a script sets any of them on the instance, Lightning's loop is used.
MODULE_HOOKS = (
    *HOOKS,
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
    "training_step",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
)


class FastEpochLoop(_TrainingEpochLoop):
    """A loop that decides for each epoch whether it can be fast.

    Changes of callbacks, `max_steps` and `should_stop` during an epoch take effect at once. Methods that a script sets
    on the module take effect at the next micro-batch.
    """

    _is_fast = False
    _has_stepped = False
    _has_listeners = False
    # Set only during an epoch, so that they keep no loader with worker processes alive.
    _module: Any = None
    _batches: Any = None
    _strategy: Any = None

    def run(self, data_fetcher: Any) -> None:
        try:
            super().run(data_fetcher)
        finally:
            self._module = self._batches = self._strategy = None

    def on_run_start(self, data_fetcher: Any) -> None:
        super().on_run_start(data_fetcher)
        self._is_fast = self._can_be_fast(data_fetcher)
        if self._is_fast:
            self._module = self.trainer.lightning_module
            self._batches = data_fetcher.combined_loader._iterator.iterators[0]
            self._strategy = self.trainer.strategy

    def _can_be_fast(self, fetcher: Any) -> bool:
        pl_trainer: Any = self.trainer
        plugin: Any = pl_trainer.precision_plugin
        iterator = fetcher.combined_loader._iterator
        return (
            type(pl_trainer.lightning_module) is TrainerModule
            and vars(pl_trainer.lightning_module).keys().isdisjoint(MODULE_HOOKS)
            and (
                type(pl_trainer.strategy) in PLAIN_STRATEGIES
                # Not by class, since importing the sharding strategies takes time.
                or getattr(pl_trainer.strategy, "has_only_post_backward_hooks", False)
            )
            and getattr(pl_trainer.strategy, "_model_averager", None) is None
            and type(plugin) in PLAIN_PRECISIONS
            and (getattr(plugin, "scaler", None) is None or type(plugin) is ForwardMixedPrecision)
            and type(pl_trainer.profiler) is PassThroughProfiler
            and not call.log.isEnabledFor(logging.DEBUG)
            and type(fetcher) is _PrefetchDataFetcher
            and fetcher.length is not None
            and type(iterator) is _MaxSizeCycle
            and len(iterator.iterators) == 1
            and self.max_steps == -1
            and not self.restarting
            and not self._should_check_val_epoch()
        )

    def _notify(self, hook: str, *args: Any) -> None:
        """Call a hook of the callbacks, and then of the module if set on its instance: Lightning's order."""
        pl_trainer, module, empty_hook = self.trainer, self._module, getattr(pl.Callback, hook)
        # The list is not copied, so that a callback that another callback adds is called too.
        for callback in pl_trainer.callbacks:  # type: ignore[attr-defined]
            method = getattr(callback, hook)
            # `overrides_hook`, inlined for speed.
            if getattr(method, "__func__", method) is not empty_hook and callable(method):
                # `self.log` reads the name.
                module.__dict__["_current_fx_name"] = hook
                method(pl_trainer, module, *args)
        if hook in module.__dict__:
            module.__dict__["_current_fx_name"] = hook
            getattr(module, hook)(*args)

    @property
    def done(self) -> bool:
        progress, pl_trainer = self.batch_progress, self.trainer
        if not self._is_fast or pl_trainer.should_stop or self.max_steps != -1:
            return super().done
        return progress.is_last_batch or progress.current.ready == pl_trainer.fit_loop.max_batches

    def on_iteration_done(self) -> None:
        is_resuming = getattr(self, "_resuming_from_checkpoint", False)
        if not self._is_fast or self._restarting or self._loaded_from_state_dict or is_resuming:
            super().on_iteration_done()

    def advance(self, data_fetcher: Any) -> None:
        if self._is_fast and not self._module.__dict__.keys().isdisjoint(MODULE_HOOKS):
            # Lightning's loop continues the epoch, since both loops use the same iterator and counters.
            self._is_fast = False
        if not self._is_fast:
            super().advance(data_fetcher)
            return
        pl_trainer, module, results = self.trainer, self._module, self._results
        try:
            batch = next(self._batches)
        except StopIteration:
            data_fetcher.done = True
            raise
        data_fetcher.fetched += 1
        progress = self.batch_progress
        progress.is_last_batch = data_fetcher.done = data_fetcher.fetched >= data_fetcher.length
        total: Any = progress.total
        current: Any = progress.current
        batch_idx = current.ready
        total.ready += 1
        current.ready += 1
        connector = pl_trainer._logger_connector
        connector._first_loop_iter = connector._first_loop_iter is None
        # `self.log` reads the batch size from the batch.
        results.batch, results.batch_size, results.dataloader_idx = batch, None, None
        self._notify("on_train_batch_start", batch, batch_idx)
        total.started += 1
        current.started += 1
        is_end_of_epoch = progress.is_last_batch or current.ready == pl_trainer.fit_loop.max_batches
        should_step = current.ready % pl_trainer.accumulate_grad_batches == 0 or is_end_of_epoch
        self._has_stepped = should_step
        outputs: Any
        try:
            if module.automatic_optimization:
                outputs = self._optimize(batch, batch_idx, should_step)
            else:
                outputs = self.manual_optimization.run(OrderedDict(batch=batch, batch_idx=batch_idx))
        except StopIteration as error:
            # Lightning would take a StopIteration of user code for the end of the data.
            raise UserStopIteration from error
        total.processed += 1
        current.processed += 1
        if should_step:
            self._step_schedulers()
        if is_end_of_epoch:
            self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        self._notify("on_train_batch_end", outputs, batch, batch_idx)
        module.__dict__["_current_fx_name"] = None
        if results:
            connector.on_batch_end()
        else:
            results.batch = results.batch_size = None
        total.completed += 1
        current.completed += 1
        if results:
            connector.update_train_step_metrics()

    def on_advance_end(self, data_fetcher: Any) -> None:
        if not self._is_fast:
            super().on_advance_end(data_fetcher)
            return
        pl_trainer = self.trainer
        if self._has_stepped:
            for config in self._strategy.lr_scheduler_configs:
                if config.reduce_on_plateau:
                    self.update_lr_schedulers("step", update_plateau_schedulers=True)
                    break
            self._batches_that_stepped += 1
        if pl_trainer.should_stop:
            self._save_loggers_on_train_batch_end()

    def _optimize(self, batch: Any, batch_idx: int, should_step: bool) -> dict[str, Any]:
        if not torch.is_grad_enabled():
            with torch.enable_grad():
                return self._optimize(batch, batch_idx, should_step)
        if not should_step:
            block: Any = getattr(self._strategy, "block_backward_sync", None)
            if block is None:
                return self._forward_and_backward(batch, batch_idx)
            with block():
                return self._forward_and_backward(batch, batch_idx)
        module = self._module
        progress: Any = self.automatic_optimization.optim_progress.optimizer.step
        progress.total.ready += 1
        progress.current.ready += 1
        outputs = self._forward_and_backward(batch, batch_idx)
        scaling, optimizer = module.scaling, self._strategy.optimizers[0]
        if scaling is not None:
            scaling.unscale(optimizer)
        if self._has_listeners:
            self._notify("on_before_optimizer_step", optimizer)
        module.__dict__["_current_fx_name"] = "optimizer_step"
        module.step.update(module.step_optimizer, module.step_custom_scheduler)
        progress.total.completed += 1
        progress.current.completed += 1
        return outputs

    def _forward_and_backward(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        module = self._module
        module.__dict__["_current_fx_name"] = "training_step"
        is_zeroed = batch_idx % self.trainer.accumulate_grad_batches == 0
        loss = module.step.forward_micro_batch(batch)
        has_user_callbacks = len(self.trainer.callbacks) > NUM_TRAINER_CALLBACKS  # type: ignore[attr-defined]
        has_listeners = self._has_listeners = has_user_callbacks or not module.__dict__.keys().isdisjoint(HOOKS)
        # Lightning clears gradients here, the Trainer after the optimizer step.
        if is_zeroed:
            self._count_zero_grad(has_listeners)
        scaled = loss if module.scaling is None else module.scaling.scaler.scale(loss)
        if has_listeners:
            self._notify("on_before_backward", scaled)
        module.__dict__["_current_fx_name"] = "backward"
        module.backward(scaled)
        if has_listeners:
            self._notify("on_after_backward")
        self._strategy.post_backward(scaled)
        return {"loss": loss.detach().clone()} if has_user_callbacks else {}

    def _count_zero_grad(self, has_listeners: bool) -> None:
        progress: Any = self.automatic_optimization.optim_progress.optimizer.zero_grad
        counts: Any
        for counts in (progress.total, progress.current):
            counts.ready += 1
        if has_listeners:
            self._notify("on_before_zero_grad", self._strategy.optimizers[0])
        for counts in (progress.total, progress.current):
            counts.started += 1
            counts.completed += 1

    def _step_schedulers(self) -> None:
        if not self._module.automatic_optimization:
            return
        progress: Any = self.scheduler_progress
        for config in self._strategy.lr_scheduler_configs:
            if config.reduce_on_plateau or config.interval != "step":
                continue
            if config.frequency == 1 or self.batch_progress.current.ready % config.frequency == 0:
                progress.total.ready += 1
                progress.current.ready += 1
                self._module.__dict__["_current_fx_name"] = "lr_scheduler_step"
                self._module.lr_scheduler_step(config.scheduler, None)
                progress.total.completed += 1
                progress.current.completed += 1


def overrides_hook(callback: Any, hook: str) -> bool:
    # Look the hook up on the instance, which may create it in `__getattr__`.
    method = getattr(callback, hook)
    return callable(method) and getattr(method, "__func__", method) is not getattr(pl.Callback, hook)


def use_fast_loop(lightning_trainer: pl.Trainer) -> None:
    fit_loop: Any = lightning_trainer.fit_loop
    if pl.__version__ in SUPPORTED_RELEASES and type(fit_loop.epoch_loop) is _TrainingEpochLoop:
        epoch_loop = fit_loop.epoch_loop
        fit_loop.epoch_loop = FastEpochLoop(lightning_trainer, epoch_loop.min_steps, epoch_loop.max_steps)
