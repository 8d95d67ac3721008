"""An optimizer step, from drawing its window to log, evaluation and save.

A window holds the micro-batches of one optimizer step; `WindowLoader` calls `draw` for each window. For each
micro-batch, Lightning's loop or the fast loop calls `begin_micro_batch`, `forward_micro_batch`, the backward pass
(lightning_adapter/module.py, or an overridden `training_step`) and `end_micro_batch`. The weights are updated before
the last `end_micro_batch` of a window: the fast loop and manual optimization call `update`, while the hooks of
Lightning's own loop call `before_optimizer_step` and `after_optimizer_step` around the optimizer's step.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from littrainer.arguments.choices import IntervalStrategy
from littrainer.data.windows import MicroBatch, count_label_tokens
from littrainer.distributed.collectives import SynchronizedFlags
from littrainer.loop.batch_errors import note_batch
from littrainer.loop.clock import Clock
from littrainer.loop.health import LABELS, LOSS, MAX_UNREAD, NORM, UNREAD_FIELDS, RollbackRequested
from littrainer.loop.loss_normalization import detect_loss_reduction
from littrainer.loop.micro_batch_splitter import OomMicroBatchSplitter
from littrainer.loop.overrides import find_overrides
from littrainer.loop.step_policy import group_by_method
from littrainer.model.traversal import clear_gradients
from littrainer.runtime.weak_attributes import weak_property

if TYPE_CHECKING:
    from littrainer.data.windows import WindowLoader

STOPPING_FLAGS = ("should_training_stop", "should_epoch_stop")
CONTROL_FLAGS = (*STOPPING_FLAGS, "should_save", "should_evaluate", "should_log")


class RunContext(Protocol):
    """The training that a step belongs to."""

    trainer: Any
    windows: WindowLoader
    epoch: int
    trial: Any
    ignore_keys_for_eval: Sequence[str] | None
    start_time: float

    @property
    def folder(self) -> str: ...


class StepRunner:
    """Runner of all micro-batches and optimizer steps of a training.

    Attributes:
        grad_norm, learning_rate: values of the last optimizer step; None before the first step of an epoch.
        evaluated_step: the optimizer step of the last evaluation.
        clock: policy for save_minutes, eval_minutes, max_minutes, SAVE and STOP files; None except on rank 0.
        policies: for each method of `StepPolicy`, the policies that override it.
        on_step_done: callback to run once, at the end of the next step that logs, evaluates or saves.
    """

    run = weak_property("_run")
    trainer = weak_property("_trainer")

    def __init__(self, run: RunContext):
        trainer = run.trainer
        args, session = trainer.args, trainer.session
        self.run = run
        self.trainer = trainer
        self._device = args.device
        self.grad_norm: Any = None
        self.learning_rate: float | None = None
        self.evaluated_step: int | None = None
        self.on_step_done: Callable[[], None] | None = None
        self.is_step_skipped = False
        # Optimizer step (counted from 1), epoch and first micro-batch (both counted from 0) of the window.
        self._window_position = (1, 0, 0)
        self._labels_drawn: torch.Tensor | None = None
        self.health, self.speed = session.health, session.speed
        self._flags = SynchronizedFlags(CONTROL_FLAGS, args.world_size) if args.world_size > 1 else None
        is_first = args.process_index == 0
        self.clock = Clock(args, run.folder, session.began, session.run is None, self._flags) if is_first else None
        splitter = OomMicroBatchSplitter(trainer) if args.auto_micro_batch else None
        preemption = trainer.preemption if trainer.preemption.signals else None
        self.policies = group_by_method([self.health, splitter, self.clock, preemption])

    def draw(self, batches: Iterator[Any], number: int) -> tuple[list[Any], Any]:
        """Draw a window and count its label tokens, by the overridable `get_batch_samples`.

        Until the loss reduction (how the model averages or sums its loss) is known, detect it with the window.
        """
        trainer, speed, session = self.trainer, self.speed, self.trainer.session
        speed.enter("data")
        drawn: tuple[list[Any], Any] = trainer.get_batch_samples(batches, number, self._device)
        window, labels = drawn
        speed.enter("other")
        speed.count(window)
        if not session.loss_reduction.is_known:
            session.loss_reduction = detect_loss_reduction(trainer, trainer.model_wrapped, window, self._device)
        # The health guard needs the number of label tokens even if the loss is not divided by it.
        if labels is None and window and hasattr(window[0], "get") and getattr(window[0].get("labels"), "ndim", 0) > 1:
            labels = count_label_tokens(window, loss_shifts_labels=False)
        self._labels_drawn = labels.to(self._device) if isinstance(labels, torch.Tensor) else None
        return drawn

    def should_end_epoch(self) -> bool:
        control = self.trainer.control
        return bool(control.should_epoch_stop or control.should_training_stop)

    def begin_micro_batch(self, micro_batch: MicroBatch) -> None:
        trainer = self.trainer
        trainer.session.micro_batches_in_window = micro_batch.window_size
        if micro_batch.is_first_of_step:
            self._window_position = (
                trainer.state.global_step + 1,
                self.run.epoch,
                self.run.windows.micro_batches_read - 1,
            )
            if self._labels_drawn is not None:
                self.health.unread += (LABELS, *self._window_position, self._labels_drawn)
            for policy in self.policies["on_window_begin"]:
                policy.on_window_begin()
            trainer.control = trainer.callback_handler.on_step_begin(trainer.args, trainer.state, trainer.control)

    def forward_micro_batch(self, micro_batch: MicroBatch, by_training_step: bool = False) -> torch.Tensor:
        """Run the forward pass, and return the scaled loss.

        With `auto_micro_batch` or an overridden `training_step`, run the backward pass too.

        Parameters:
            by_training_step: call the overridden `training_step`.
        """
        trainer, inputs, speed = self.trainer, micro_batch.inputs, self.speed
        if by_training_step:
            speed.enter("forward")
        forward = trainer.training_step if by_training_step else trainer._forward_for_training
        try:
            if self.policies["forward_and_backward"]:
                loss: torch.Tensor = self.policies["forward_and_backward"][0].forward_and_backward(micro_batch, forward)
            else:
                loss = forward(trainer.model_wrapped, inputs, micro_batch.num_items_in_window)
            loss_copy = trainer.session.loss.add(loss, trainer.state.global_step, trainer.args.logging_nan_inf_filter)
            trainer.session.flos += float(trainer.floating_point_ops(inputs))
            trainer._track_num_input_tokens(inputs)
        except Exception as error:
            note_batch(error, trainer, "with a batch", inputs)
            raise
        if trainer.args.chunked_loss and not trainer.session.has_chunked_loss:
            method = "training_step" if by_training_step else "compute_loss"
            reason = f"a {method} that does not call the Trainer's compute_loss"
            raise ValueError(f"chunked_loss=True cannot be combined with {reason}: leave out one of them.")
        step, epoch, _ = self._window_position
        self.health.unread += (LOSS, step, epoch, self.run.windows.micro_batches_read - 1, loss_copy)
        speed.enter("backward")
        # As in accelerate, the loss is divided by the gradient_accumulation_steps that a script set on
        # `trainer.accelerator`. An overridden training_step calls `accelerator.backward`, which divides already.
        steps = trainer.accelerator.gradient_state.plugin_kwargs.get("num_steps", 1)
        return loss if steps == 1 or by_training_step else loss / steps

    def update(self, step_optimizer: Callable[[], None], step_schedules: Callable[[], None]) -> None:
        """Clip gradients, then step the optimizer and those schedules that Lightning does not step."""
        self.before_optimizer_step()
        step_optimizer()
        self.after_optimizer_step()
        step_schedules()

    def before_optimizer_step(self) -> None:
        """Clip the gradients, record their norm, let policies skip the step, and fire on_pre_optimizer_step.

        The update guard then delays Ctrl-C until `end_micro_batch`, so that weights and step count belong together.
        """
        self.speed.enter("step")
        trainer = self.trainer
        grad_norm = trainer._clip_grad_norm(trainer.model_wrapped) if trainer.args.max_grad_norm > 0 else None
        self.grad_norm = trainer._get_grad_norm(trainer.model_wrapped, grad_norm=grad_norm)
        self.health.unread += (NORM, *self._window_position, self.grad_norm)
        if self.policies["should_skip_step"]:
            try:
                self.is_step_skipped = any(policy.should_skip_step() for policy in self.policies["should_skip_step"])
            except RollbackRequested:
                trainer.session.lightning.end_without_callbacks()
                raise
        if len(self.health.unread) >= MAX_UNREAD * UNREAD_FIELDS:
            self.health.check()
        trainer.control = trainer.callback_handler.on_pre_optimizer_step(trainer.args, trainer.state, trainer.control)
        trainer.update_guard.hold()

    def after_optimizer_step(self) -> None:
        """Fire on_optimizer_step and record the learning rate, before the schedule steps."""
        trainer = self.trainer
        trainer.control = trainer.callback_handler.on_optimizer_step(trainer.args, trainer.state, trainer.control)
        self.learning_rate = trainer._get_learning_rate()

    def end_micro_batch(self, micro_batch: MicroBatch) -> None:
        """Finish a micro-batch; after the last of a window finish the optimizer step, log, evaluate and save."""
        trainer = self.trainer
        handler = trainer.callback_handler
        self.speed.enter("other")
        if not micro_batch.is_last_of_step:
            trainer.control = handler.on_substep_end(trainer.args, trainer.state, trainer.control)
            if self._flags is not None:
                self.sync_control_flags(STOPPING_FLAGS)
            return
        clear_gradients(trainer.model, trainer.session.clipped_parameters)
        trainer.session.clipped_parameters = None
        trainer.state.global_step += 1
        windows = self.run.windows
        windows.micro_batches_done = windows.micro_batches_read
        trainer.state.epoch = self.run.epoch + micro_batch.epoch_fraction
        trainer.update_guard.release()
        trainer.control = handler.on_step_end(trainer.args, trainer.state, trainer.control)
        for policy in self.policies["on_step_end"]:
            # Comparing here saves a call in each step.
            if time.monotonic() >= policy.next_step_end:
                policy.on_step_end(trainer.state, trainer.control, micro_batch.epoch_fraction >= 1)
        self.sync_control_flags()
        if trainer.control.should_training_stop:
            self.request_last_evaluation(is_epoch_end=False)
        self.log_evaluate_save()

    def request_last_evaluation(self, is_epoch_end: bool) -> None:
        """Set the flag of an evaluation for `eval_at_end`, unless the last step was evaluated."""
        args, is_evaluated = self.trainer.args, self.evaluated_step == self.trainer.state.global_step
        # If evaluations or saves go by epoch, the request waits for the end of the epoch.
        is_deferred = not is_epoch_end and IntervalStrategy.EPOCH in (args.eval_strategy, args.save_strategy)
        if args.eval_at_end and not is_evaluated and not is_deferred:
            self.trainer.control.should_evaluate = True

    def sync_control_flags(self, flags: tuple[str, ...] = CONTROL_FLAGS) -> None:
        """Synchronize flags over all processes, and complete a background save that all processes have written."""
        pending = self.trainer.session.checkpoints.pending
        is_written = pending is not None and pending.writing.done()
        if self._flags is not None:
            is_written = self._flags.sync(self.trainer.control, flags, is_written)
        if is_written and pending is not None and flags is CONTROL_FLAGS:
            self.trainer.session.checkpoints.wait()
            # Callbacks of the save may have set flags.
            self.sync_control_flags(flags)

    def log_evaluate_save(self) -> None:
        trainer, run, health = self.trainer, self.run, self.health
        control = trainer.control
        calls_events = control.should_log or control.should_evaluate or control.should_save
        is_due = calls_events or trainer.preemption.stop_signal is not None
        # Most steps end here. An overridden `_maybe_log_save_evaluate` is called at each step, as in transformers.
        if not (is_due or self._overrides_log_save_evaluate):
            return
        loss = trainer.session.loss
        if is_due:
            health.values.prefetch([*health.unread[UNREAD_FIELDS - 1 :: UNREAD_FIELDS], *loss.unread(), self.grad_norm])
            health.check(is_save_due=control.should_save)
        if control.should_save and health.on_nonfinite == "rollback":
            health.record_loss(trainer.state.global_step, loss)
        flags = control.should_save, control.should_evaluate
        trainer._maybe_log_save_evaluate(
            loss.since_last_log,
            self.grad_norm,
            trainer.model_wrapped,
            run.trial,
            run.epoch,
            run.ignore_keys_for_eval,
            run.start_time,
            learning_rate=self.learning_rate,
        )
        if flags[1]:
            self.evaluated_step = trainer.state.global_step
        if any(flags):
            for policy in self.policies["restart_intervals"]:
                policy.restart_intervals(*flags)
        self.speed.enter("other")
        if calls_events:
            self.sync_control_flags(STOPPING_FLAGS)
            self.run_step_done_callback()

    @functools.cached_property
    def _overrides_log_save_evaluate(self) -> bool:
        return bool(find_overrides(self.trainer, "_maybe_log_save_evaluate"))

    def run_step_done_callback(self) -> None:
        if self.on_step_done is not None:
            callback, self.on_step_done = self.on_step_done, None
            callback()

    def drain_flag_sync(self) -> None:
        """Finish the background exchange of flags, after the last step."""
        if self._flags is not None:
            self._flags.finish()
