"""One optimizer step, from the draw of its window to what is due when it is done.

Lightning's own loop and the fast one call these methods at the same moments, in the order in which they are written:

    draw                the micro-batches of a window, and the count of their label tokens, for data/windows.py
    begin_micro_batch   on_step_begin, at the first micro-batch of a window
    forward_micro_batch             forward pass of a micro-batch; `loss.scale_for_accumulation` divides the loss. The backward pass follows
                        (lightning_adapter/module.py), unless a subclass has its own `training_step`, which does it too
    update              at the last micro-batch: `clip` the gradients, on_pre_optimizer_step, then the optimizer steps
                        (from `clip` on Ctrl-C waits), `after_optimizer_step`, and the schedule steps
    end_micro_batch     gradients are cleared, the step is counted, on_step_end; the processes agree on the flags of the
                        control, then log, evaluate, save (`_maybe_log_save_evaluate`). After another micro-batch of
                        the window on_substep_end, no more

Policies (loop/step_policy.py) act at the moments that they override.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from littrainer.data.windows import MicroBatch, count_label_tokens
from littrainer.distributed.collectives import SynchronizedFlags
from littrainer.loop.batch_errors import note_batch
from littrainer.loop.clock import Clock
from littrainer.loop.health import LABELS, LOSS, MAX_UNREAD, NORM, RollbackRequested
from littrainer.loop.loss_normalization import detect_loss_reduction
from littrainer.loop.micro_batch_splitter import OomMicroBatchSplitter
from littrainer.loop.overrides import find_overrides
from littrainer.loop.step_policy import MOMENTS, StepPolicy
from littrainer.model.traversal import clear_gradients
from littrainer.runtime.weak_attributes import weak_property

if TYPE_CHECKING:
    from littrainer.loop.run import TrainingRun

STOPPING_FLAGS = ("should_training_stop", "should_epoch_stop")
CONTROL_FLAGS = (*STOPPING_FLAGS, "should_save", "should_evaluate", "should_log")


class TrainingStep:
    """The micro-batches and optimizer steps of a training.

    Parameters:
        run: the training.

    Attributes:
        grad_norm: norm of the gradients at the last optimizer step; None before the first one of an epoch.
        learning_rate: the rate of the last optimizer step; None before the first one of an epoch.
        health: reads losses and norms, and acts if they are not finite.
        clock: raises flags by the time; None in other processes than the first.
        speed: counts where the time goes, with `log_speed`.
        splitter: runs forward and backward passes in what fits into memory; None without `auto_micro_batch`.
        on_step_done: called once, when what is due at the optimizer step is done.
        is_step_skipped: whether a policy leaves the current optimizer step out.
    """

    run = weak_property("_run")
    trainer = weak_property("_trainer")

    def __init__(self, run: TrainingRun):
        trainer = run.trainer
        args, session = trainer.args, trainer.session
        self.run, self.trainer, self._device = run, trainer, args.device
        self.grad_norm: Any = None
        self.learning_rate: float | None = None
        self.on_step_done: Callable[[], None] | None = None
        self.is_step_skipped = False
        # Optimizer step, counted from 1, and of its first micro-batch the epoch and the number there, from 0.
        self._window = (1, 0, 0)
        self._labels_drawn: torch.Tensor | None = None
        self.health, self.speed = session.health, session.speed
        self.splitter = OomMicroBatchSplitter(trainer) if args.auto_micro_batch else None
        self._flags = SynchronizedFlags(CONTROL_FLAGS, args.world_size) if args.world_size > 1 else None
        is_first = args.process_index == 0
        self.clock = Clock(args, run.folder, session.began, session.run is None, self._flags) if is_first else None
        policies: list[StepPolicy] = [self.health]
        if trainer.preemption.signals:
            policies.append(trainer.preemption)
        actions: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
        for policy in policies:
            for moment, overrides in zip(MOMENTS, actions, strict=True):
                if getattr(type(policy), moment) is not getattr(StepPolicy, moment):
                    overrides.append(getattr(policy, moment))
        self._at_window_begin, self._at_gradients, self._at_step_end = actions

    def draw(self, batches: Iterator[Any], number: int) -> tuple[list[Any], Any]:
        """Draw the micro-batches of a window, by the Trainer's overridable `get_batch_samples`."""
        trainer, speed = self.trainer, self.speed
        speed.enter("data")
        drawn: tuple[list[Any], Any] = trainer.get_batch_samples(batches, number, self._device)
        speed.enter("other")
        speed.count(drawn[0])
        if not trainer.session.loss_reduction.is_known:
            trainer.session.loss_reduction = detect_loss_reduction(
                trainer, trainer.model_wrapped, drawn[0], self._device
            )
        window, number = drawn
        if number is None and window and hasattr(window[0], "get") and getattr(window[0].get("labels"), "ndim", 0) > 1:
            number = count_label_tokens(window, labels_are_shifted=False)
        self._labels_drawn = number.to(self._device) if isinstance(number, torch.Tensor) else None
        return drawn

    def should_end_epoch(self) -> bool:
        """Whether a callback has asked for the end of the epoch or the training; asked after each micro-batch."""
        control = self.trainer.control
        return bool(control.should_epoch_stop or control.should_training_stop)

    def begin_micro_batch(self, micro_batch: MicroBatch) -> None:
        """A micro-batch has been drawn, its forward pass comes next."""
        trainer = self.trainer
        trainer.session.micro_batches_in_window = micro_batch.window_size
        if micro_batch.opens_window:
            self._window = (trainer.state.global_step + 1, self.run.epoch, self.run.windows.micro_batches_read - 1)
            if self._labels_drawn is not None:
                self.health.unread.append((LABELS, self._window, self._labels_drawn))
            for act in self._at_window_begin:
                act()
            trainer.control = trainer.callback_handler.on_step_begin(trainer.args, trainer.state, trainer.control)

    def forward_micro_batch(self, micro_batch: MicroBatch, by_training_step: bool = False) -> torch.Tensor:
        """Forward pass: the loss as it goes into the backward pass, which with `auto_micro_batch` is done too.

        Parameters:
            by_training_step: a subclass, or a script, has its own `training_step`, which calls backward too.
        """
        trainer, inputs, speed = self.trainer, micro_batch.inputs, self.speed
        if by_training_step:
            speed.enter("forward")
        forward = trainer.training_step if by_training_step else trainer._forward_for_training
        try:
            if self.splitter is None:
                loss: torch.Tensor = forward(trainer.model_wrapped, inputs, micro_batch.num_items_in_window)
            else:
                loss = self.splitter.forward_micro_batch(micro_batch, forward)
            kept = trainer.session.loss.add(loss, trainer.state.global_step, trainer.args.logging_nan_inf_filter)
            trainer.session.flos += float(trainer.floating_point_ops(inputs))
            trainer._track_num_input_tokens(inputs)
        except Exception as error:
            note_batch(error, trainer, "with a batch", inputs)
            raise
        place = (*self._window[:2], self.run.windows.micro_batches_read - 1)
        self.health.unread.append((LOSS, place, kept))
        speed.enter("backward")
        steps = trainer.accelerator.gradient_state.plugin_kwargs.get("num_steps", 1)
        # A script may have told its accelerator to divide too.
        return loss if steps == 1 or by_training_step else loss / steps

    def update(self, step_optimizer: Callable[[], None], step_schedules: Callable[[], None]) -> None:
        """Clip, step the optimizer and then the schedules that the loop does not step."""
        self.clip()
        step_optimizer()
        self.after_optimizer_step()
        step_schedules()

    def clip(self) -> None:
        """Clip the gradients of the window and note their norm; policies may refuse the step."""
        self.speed.enter("step")
        trainer = self.trainer
        clipped = trainer._clip_grad_norm(trainer.model_wrapped) if trainer.args.max_grad_norm > 0 else None
        self.grad_norm = trainer._get_grad_norm(trainer.model_wrapped, grad_norm=clipped)
        self.health.unread.append((NORM, self._window, self.grad_norm))
        if self._at_gradients:
            try:
                self.is_step_skipped = any(act() for act in self._at_gradients)
            except RollbackRequested:
                trainer.session.lightning.end_without_callbacks()
                raise
        if len(self.health.unread) >= MAX_UNREAD:
            self.health.look()
        trainer.control = trainer.callback_handler.on_pre_optimizer_step(trainer.args, trainer.state, trainer.control)
        trainer.update_guard.hold()

    def after_optimizer_step(self) -> None:
        """The optimizer has stepped; the schedule steps next."""
        trainer = self.trainer
        trainer.control = trainer.callback_handler.on_optimizer_step(trainer.args, trainer.state, trainer.control)
        self.learning_rate = trainer._get_learning_rate()

    def end_micro_batch(self, micro_batch: MicroBatch) -> None:
        """A micro-batch is done, and with the last one of a window the optimizer step: log, evaluate and save."""
        trainer = self.trainer
        handler = trainer.callback_handler
        self.speed.enter("other")
        if not micro_batch.closes_window:
            trainer.control = handler.on_substep_end(trainer.args, trainer.state, trainer.control)
            self.sync_control_flags(STOPPING_FLAGS)
            return
        clear_gradients(trainer.model, trainer.session.clipped)
        trainer.session.clipped = None
        trainer.state.global_step += 1
        self.run.windows.count_optimizer_step()
        trainer.state.epoch = self.run.epoch + micro_batch.epoch_fraction
        trainer.update_guard.release()
        trainer.control = handler.on_step_end(trainer.args, trainer.state, trainer.control)
        # The clock acts once a second at most, and is not called in between.
        if self.clock is not None and time.monotonic() >= self.clock.next_call:
            self.clock.on_step_end(trainer.state, trainer.control, micro_batch.epoch_fraction >= 1)
        for act in self._at_step_end:
            act(trainer.state, trainer.control, micro_batch.epoch_fraction >= 1)
        self.sync_control_flags()
        self.log_evaluate_save()

    def sync_control_flags(self, flags: tuple[str, ...] = CONTROL_FLAGS) -> None:
        """Leave those flags of the control raised that all processes raise, and note background saves that have ended.

        Parameters:
            flags: the flags that count at this place.
        """
        pending = self.trainer.session.checkpoints.pending
        is_written = pending is not None and pending.writing.done()
        if self._flags is not None:
            is_written = self._flags.sync(self.trainer.control, flags, is_written)
        if is_written and pending is not None and flags is CONTROL_FLAGS:
            # In all processes at once. Callbacks that are notified of it may raise flags.
            self.trainer.session.checkpoints.wait()
            self.sync_control_flags(flags)

    def log_evaluate_save(self) -> None:
        """Do what the control asks for."""
        trainer, run, health = self.trainer, self.run, self.health
        control = trainer.control
        calls_events = control.should_log or control.should_evaluate or control.should_save
        is_due = calls_events or trainer.preemption.agreed is not None
        # Usually nothing is due and the hook is not overridden, so that its arguments are not made.
        if not (is_due or self._overrides_log_save_evaluate):
            return
        loss = trainer.session.loss
        if is_due:
            # Everything that follows reads these numbers.
            health.values.read([*[value for _, _, value in health.unread], *loss.unread(), self.grad_norm])
            health.look(comes_save=control.should_save)
        if control.should_save and health.policy == "rollback":
            health.note_losses(trainer.state.global_step, loss)
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
        if self.clock is not None and any(flags):
            self.clock.begin_intervals(*flags)
        self.speed.enter("other")
        if calls_events:
            # Callbacks may have raised flags to stop.
            self.sync_control_flags(STOPPING_FLAGS)
            self.run_step_done_callback()

    @functools.cached_property
    def _overrides_log_save_evaluate(self) -> bool:
        return bool(find_overrides(self.trainer, ["_maybe_log_save_evaluate"]))

    def run_step_done_callback(self) -> None:
        """Call `on_step_done`, once."""
        if self.on_step_done is not None:
            callback, self.on_step_done = self.on_step_done, None
            callback()

    def drain_flag_sync(self) -> None:
        """Wait, after the last step, for the flags that the processes exchange in the background."""
        if self._flags is not None:
            self._flags.finish()
