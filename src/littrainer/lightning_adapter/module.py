"""The LightningModule around a Trainer's model, and the callbacks before and after the user's callbacks.

If a script overrides `Trainer.training_step`, Lightning's manual optimization is used, since the method calls backward
itself.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import lightning.pytorch as pl
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from littrainer.callbacks.lightning_callbacks import find_backbone
from littrainer.callbacks.lightning_metrics import publish, set_batch_indices
from littrainer.data.windows import MicroBatch
from littrainer.lightning_adapter.lightning_internals import (
    record_optimizer_step,
    replace_optimizer,
    set_displayed_batch_count,
    set_optimizer_step_count,
    set_validation_enabled,
    sync_unstarted_average,
)
from littrainer.loop.batch_errors import note_batch
from littrainer.model.traversal import clear_gradients
from littrainer.optim.schedules import is_metric_driven
from littrainer.optim.stepping import ClosureFirstOptimizer, GradScalerMixin, has_fused_backward, mark_optimizer_stepped
from littrainer.runtime.interruptions import UserStopIteration
from littrainer.runtime.weak_attributes import weak_property
from littrainer.strategies.model_wrapping import rewrap_after_unfreezing

if TYPE_CHECKING:
    from littrainer.callbacks.trainer_context import TrainerContext
    from littrainer.evaluation.loop import EvaluationLoop
    from littrainer.loop.run import TrainingRun


# Values of `accumulate_grad_batches` at which Lightning steps the optimizer, or accumulates.
STEP_NOW = 1
DO_NOT_STEP = 2**62
Hook = TypeVar("Hook", bound=Callable[..., Any])


def convert_stop_iteration(hook: Hook) -> Hook:
    """Convert a StopIteration of user code, which Lightning would take for the end of the data."""

    @functools.wraps(hook)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return hook(*args, **kwargs)
        except StopIteration as error:
            raise UserStopIteration from error

    return wrapper  # type: ignore[return-value]


class ClosureFirstModule(pl.LightningModule):
    """A LightningModule that runs Lightning's closure (forward and backward) before the optimizer's step."""

    model: Any

    @property
    def step_was_skipped(self) -> bool:
        raise NotImplementedError

    def step_optimizer(self, optimizer: Any, closure: Callable[[], Any] | None = None, loss: Any = None) -> None:
        raise NotImplementedError

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        closure_first = ClosureFirstOptimizer(getattr(optimizer, "optimizer", optimizer), self.step_optimizer)
        self.trainer.strategy.optimizer_step(closure_first, optimizer_closure or (lambda: None))

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if metric is not None:
            scheduler.step(metric)
        elif not self.step_was_skipped and not is_metric_driven(scheduler):
            scheduler.step()


class TrainerModule(ClosureFirstModule):
    """A module that calls the overridable methods of a Trainer in each step.

    Parameters:
        run: None outside of fit.
    """

    owner = weak_property("_owner")

    def __init__(self, trainer: TrainerContext, run: TrainingRun | None = None):
        super().__init__()
        self.model = trainer.model
        self.owner = trainer
        self.run = run
        self.step: Any = None if run is None else run.step
        # Optimizer and schedule that Lightning has; a script may replace those of the Trainer.
        self._optimizer: Any = None
        self._updates_during_backward = False
        self._schedule: Any = None
        self._lightning_steps_scheduler = False
        self.scaling: GradScalerMixin | None = None
        self.micro_batch: MicroBatch | None = None
        self.automatic_optimization = not trainer.overrides_training_step()

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainerModule:
        # Callbacks that average weights deep-copy the module; its copy shares the training's objects.
        for shared in (self.run, self.step, self._optimizer, self._schedule, self.micro_batch, self.scaling):
            memo[id(shared)] = shared
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        return copied

    @property
    def backbone(self) -> nn.Module:
        """Return the model below its head, for Lightning's `BackboneFinetuning`.

        Raises:
            AttributeError: the model has no backbone.
        """
        backbone = find_backbone(self.model)
        if backbone is None:
            raise AttributeError(f"{type(self.model).__name__} has neither a `backbone` nor a head on a base model.")
        return backbone

    @property
    def flops_per_batch(self) -> float | None:
        """Floating-point operations of a micro-batch, for Lightning's `ThroughputMonitor`; None if unknown."""
        if self.micro_batch is None or not self.trainer.training:
            return None
        return float(self.owner.floating_point_ops(self.micro_batch.inputs)) or None

    def configure_model(self) -> None:
        parallelize = getattr(self.trainer.strategy, "parallelize", None)
        if parallelize is not None:
            parallelize(self.model)

    @convert_stop_iteration
    def configure_optimizers(self) -> Any:
        optimizer, schedule = self.step.run.optimizer_and_schedule()
        self._optimizer, self._schedule = optimizer, schedule
        self._updates_during_backward = has_fused_backward(optimizer)
        plugin = self.trainer.precision_plugin
        is_scaling = isinstance(plugin, GradScalerMixin) and plugin.scaler is not None
        self.scaling = plugin if is_scaling else None  # type: ignore[assignment]
        # Lightning steps torch's schedules, this module steps others, and the Trainer steps metric-driven schedules.
        self._lightning_steps_scheduler = isinstance(schedule, LRScheduler) and not is_metric_driven(schedule)
        if not self._lightning_steps_scheduler:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def sync_replaced_optimizer_and_scheduler(self) -> None:
        is_manual = self.owner.overrides_training_step()
        if is_manual is self.automatic_optimization:
            self.automatic_optimization = not is_manual
            set_optimizer_step_count(self.trainer, self.owner.state.global_step)
        self.sync_optimizer()
        self._sync_scheduler()
        rewrap_after_unfreezing(self.owner)

    def sync_optimizer(self) -> Any:
        if self.owner.optimizer is not self._optimizer:
            self._optimizer = self.owner.optimizer
            self._updates_during_backward = has_fused_backward(self._optimizer)
            replace_optimizer(self.trainer, self._optimizer)
        return self._optimizer

    def _sync_scheduler(self) -> None:
        schedule: Any = self.owner.lr_scheduler
        if schedule is not self._schedule:
            for config in self.trainer.lr_scheduler_configs:
                if config.scheduler is self._schedule:
                    config.scheduler = schedule
            self._schedule = schedule

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Do nothing: `_prepare_inputs` moves the batch."""
        return batch

    @convert_stop_iteration
    def training_step(self, micro_batch: MicroBatch, batch_idx: int) -> torch.Tensor:
        if not self.automatic_optimization:
            # Lightning enters this context only in automatic optimization.
            with getattr(self.trainer.strategy, "block_backward_sync", nullcontext)():
                loss = self.step.forward_micro_batch(micro_batch, by_training_step=True)
            if micro_batch.is_last_of_step:
                self.sync_optimizer()
                self.owner.accelerator.unscale_gradients()
                self.step.update(self._step_and_count, self._step_all_schedulers)
            return loss
        loss = self.step.forward_micro_batch(micro_batch)
        # Lightning divides the loss by this number; the Trainer has divided the loss already.
        self.trainer.accumulate_grad_batches = 1
        return loss

    @property
    def should_sync_gradients(self) -> bool:
        micro_batch = self.micro_batch
        if micro_batch is None or micro_batch.is_last_drawn:
            return True
        return bool(self.owner.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False))

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if self.step.policies["forward_and_backward"]:
            # Backward ran with the forward pass.
            return
        if not self.automatic_optimization:
            self.step.speed.enter("backward")
        optimizer = self.sync_optimizer()
        try:
            if self._updates_during_backward:
                optimizer.fused_backward(loss, self.owner._get_learning_rate())
            else:
                super().backward(loss, *args, **kwargs)
        except Exception as error:
            note_batch(error, self.owner, "in the backward pass of a batch", getattr(self.micro_batch, "inputs", None))
            raise

    def on_before_backward(self, loss: torch.Tensor) -> None:
        """Set `accumulate_grad_batches` again, now that Lightning has divided the loss."""
        if self.micro_batch is not None:
            self.set_micro_batch(self.micro_batch)

    def set_micro_batch(self, micro_batch: MicroBatch) -> None:
        # Faster than torch's `__setattr__`.
        self.__dict__["micro_batch"] = micro_batch
        self.trainer.accumulate_grad_batches = STEP_NOW if micro_batch.is_last_of_step else DO_NOT_STEP

    @convert_stop_iteration
    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        self.step.before_optimizer_step()

    @convert_stop_iteration
    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Any,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        self.sync_optimizer()
        super().optimizer_step(epoch, batch_idx, self.optimizers(), optimizer_closure)
        self.step.after_optimizer_step()
        self.step_custom_scheduler()

    def step_optimizer(self, *_: Any) -> None:
        """Step the optimizer after clipping; weights change only here, or in a fused backward pass."""
        optimizer = self.sync_optimizer()
        if self.step.is_step_skipped or self._updates_during_backward:
            mark_optimizer_stepped(optimizer)
            if self.scaling is not None:
                self.scaling.skip_step()
        elif self.scaling is not None:
            self.scaling.step_unless_nonfinite(optimizer)
        else:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        # Lightning also calls this before an evaluation outside of fit, which must not clear a script's gradients.
        if self.run is not None:
            clear_gradients(self.model)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Do nothing: the Trainer clears gradients after its callbacks."""

    lr_scheduler_step = convert_stop_iteration(ClosureFirstModule.lr_scheduler_step)

    @property
    def step_was_skipped(self) -> bool:
        return self.owner.accelerator.optimizer_step_was_skipped

    def _step_and_count(self) -> None:
        self.sync_optimizer()
        with record_optimizer_step(self.trainer) as optimizer:
            super().optimizer_step(0, 0, optimizer)

    def _step_all_schedulers(self) -> None:
        # Lightning steps no schedules in manual optimization, not even those of callbacks.
        self._sync_scheduler()
        ends_epoch = self.micro_batch is not None and self.micro_batch.epoch_fraction >= 1
        for interval in ("step", "epoch") if ends_epoch else ("step",):
            for config in self.trainer.lr_scheduler_configs:
                if config.interval == interval:
                    self.lr_scheduler_step(config.scheduler, None)
        self.step_custom_scheduler()

    def step_custom_scheduler(self) -> None:
        self._sync_scheduler()
        if not self._lightning_steps_scheduler:
            self.lr_scheduler_step(self._schedule, None)

    @property
    def _evaluation(self) -> EvaluationLoop:
        evaluation = self.owner.session.lightning.evaluation
        assert evaluation is not None
        return evaluation

    @convert_stop_iteration
    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        outputs = self._evaluation.step(batch)
        # `losses` repeats the batch's loss for each sample.
        loss = None if outputs.losses is None else outputs.losses[0]
        return {"loss": loss, "predictions": outputs.predictions, "labels": outputs.labels}

    @convert_stop_iteration
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self._evaluation.step(batch)
        set_batch_indices(self.trainer, self._evaluation.find_sample_indices(batch))
        return outputs.predictions

    def on_validation_start(self) -> None:
        if get_user_callbacks(self.trainer):
            set_displayed_batch_count(self.trainer, self._evaluation.num_batches)

    on_predict_start = on_validation_start

    @convert_stop_iteration
    def on_validation_epoch_end(self) -> None:
        """Publish metrics outside of fit; inside it the Trainer publishes its logs."""
        if self.run is None and get_user_callbacks(self.trainer):
            publish(self.trainer, self._evaluation.finish().metrics or {})

    on_predict_epoch_end = on_validation_epoch_end


class _Events(pl.Callback):
    def __init__(self, run: TrainingRun):
        self.run = run
        self._is_stop_requested = False


class BeforeUserCallbacks(_Events):
    """The first callback: it restores states, and begins epochs and micro-batches."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # Callbacks such as ThroughputMonitor read `enable_validation` in their `setup`, which follows. `on_fit_start`
        # sets it to False, since the Trainer evaluates during fit.
        set_validation_enabled(trainer, pl_module, has_validation=True)

    @convert_stop_iteration
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        set_validation_enabled(trainer, pl_module, has_validation=False)
        self.run.restore_lightning_callbacks()

    @convert_stop_iteration
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.run.load_optimizer_and_schedule()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Copy the model's weights into each weight average that no step has updated yet.

        Otherwise averaging callbacks, called next, would swap in an average that still has the initial weights.
        """
        sync_unstarted_average(trainer, pl_module)

    on_train_end = on_validation_start

    @convert_stop_iteration
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.run.begin_epoch(trainer.current_epoch)

    @convert_stop_iteration
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: MicroBatch, batch_idx: int) -> None:
        if batch_idx == 0:
            skipped = self.run.pop_skipped_micro_batches()
            if skipped:
                # Lightning's count includes the micro-batches that were trained before the resume.
                trainer.fit_loop.epoch_loop.batch_progress.increment_by(skipped)
        pl_module.set_micro_batch(batch)
        self.run.step.begin_micro_batch(batch)


class AfterUserCallbacks(_Events):
    """The last callback, so that checkpoints see all callbacks at the same step.

    It passes stop requests between `lightning.Trainer.should_stop` and the control.
    """

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take over a stop request that a checkpoint restored, with which Lightning would not begin to train."""
        self._note_stop(trainer, is_due=False)

    @convert_stop_iteration
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.run.begin()
        if self._is_stop_requested:
            self.run.step.trainer.control.should_training_stop = True
        # A Trainer callback's stop request takes effect after the first micro-batch, as in transformers.
        if self._is_stop_requested or self.run.evaluation_due is not None or self.run.epoch_end_is_due:
            self._stop_if_requested(trainer)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.sync_replaced_optimizer_and_scheduler()
        if get_user_callbacks(trainer):
            self.run.update_replaced_schedule([config.scheduler for config in trainer.lr_scheduler_configs])

    @convert_stop_iteration
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: MicroBatch, batch_idx: int
    ) -> None:
        if trainer.should_stop or self._is_stop_requested:
            self._note_stop(trainer, is_due=batch.is_last_of_step)
        self.run.step.end_micro_batch(batch)
        self._stop_if_requested(trainer)

    @convert_stop_iteration
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._note_stop(trainer)
        self.run.end_epoch()
        self._stop_if_requested(trainer)

    def _note_stop(self, pl_trainer: pl.Trainer, is_due: bool = True) -> None:
        # With `should_stop`, Lightning would stop after this micro-batch, even within a window.
        if pl_trainer.should_stop:
            self._is_stop_requested = True
            pl_trainer.should_stop = False
        if self._is_stop_requested and is_due:
            self.run.step.trainer.control.should_training_stop = True

    def _stop_if_requested(self, pl_trainer: pl.Trainer) -> None:
        if self.run.step.trainer.control.should_training_stop:
            pl_trainer.should_stop = True


def get_user_callbacks(pl_trainer: pl.Trainer) -> list[Any]:
    return [callback for callback in pl_trainer.callbacks if not isinstance(callback, _Events)]  # type: ignore[attr-defined]
