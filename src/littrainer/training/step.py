"""One optimizer step, from its first micro-batch to what is due when it is done.

Lightning's own loop and the fast one call these methods at the same moments, in the order in which they stand here:

    draw                the micro-batches of a window, and the count of their label tokens, for data/windows.py
    begin_micro_batch   on_step_begin, at the first micro-batch of a window
    loss_of             forward pass of a micro-batch; `loss.normalised` divides the loss. The backward pass follows
    clip                at the last micro-batch: gradients are clipped, on_pre_optimizer_step. From here Ctrl-C waits,
                        and the optimizer steps (engine/module.py), unless the health guard refuses the gradients
    note_update         on_optimizer_step; the schedule steps next
    end_micro_batch     gradients are cleared, the step is counted, what has waited is answered, on_step_end; the
                        processes agree on flags of the control and on signals, then log, evaluate, save
                        (`_maybe_log_save_evaluate`). After another micro-batch of the window on_substep_end, no more

A `training_step` of a subclass, which `loss_of` then calls, does the backward pass too.
`update` is `clip` to `note_update` for a loop that has all of it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from littrainer.data.windows import MicroBatch, count_label_tokens
from littrainer.distributed.agreement import FlagsRaisedTogether
from littrainer.model.traversal import clear_gradients
from littrainer.training.clock import Clock
from littrainer.training.fitting_micro_batches import FittingMicroBatches
from littrainer.training.health import LABELS, LOSS, MOST_UNREAD, NORM, GoingBack
from littrainer.training.loss import mean_over_processes
from littrainer.training.loss_normalization import find_loss_head
from littrainer.training.overrides import own_methods

if TYPE_CHECKING:
    from littrainer.training.run import TrainingRun

STOPPING_FLAGS = ("should_training_stop", "should_epoch_stop")
CONTROL_FLAGS = (*STOPPING_FLAGS, "should_save", "should_evaluate", "should_log")


class TrainingStep:
    """What is done at each micro-batch and optimizer step of a training.

    Parameters:
        run: the training.

    Attributes:
        grad_norm: norm of the gradients at the last optimizer step; None before the first one of an epoch.
        learning_rate: what the last optimizer step was taken with; None before the first one of an epoch.
        clock: raises flags by the time; None in other processes than the first.
        speed: counts where the time goes, with `log_speed`.
        fitting: runs forward and backward passes in what fits into memory; None without `auto_micro_batch`.
        when_done: called once, when what is due at the optimizer step is done.
        is_refused: whether the health guard leaves the current optimizer step out.
    """

    def __init__(self, run: TrainingRun):
        self.run = run
        self.trainer = run.trainer
        self.grad_norm: Any = None
        self.learning_rate: float | None = None
        self.when_done: Callable[[], None] | None = None
        self.is_refused = False
        # Optimizer step, counted from 1, and of its first micro-batch the epoch and the number there, from 0.
        self._window = (1, 0, 0)
        self._labels_drawn: torch.Tensor | None = None
        self.health = run.trainer.session.health
        self.speed = run.trainer.session.speed
        self.fitting = FittingMicroBatches(run.trainer) if run.trainer.args.auto_micro_batch else None
        self._device = run.trainer.args.device
        processes = run.trainer.args.world_size
        is_first = run.trainer.args.process_index == 0
        session = run.trainer.session
        self.clock = Clock(run.trainer.args, run.folder, session.began, session.run is None) if is_first else None
        self._flags = FlagsRaisedTogether(CONTROL_FLAGS, processes) if processes > 1 else None

    def draw(self, batches: Iterator[Any], number: int) -> tuple[list[Any], Any]:
        """Draw the micro-batches of a window, by the Trainer's overridable `get_batch_samples`."""
        trainer, speed = self.trainer, self.speed
        speed.enter("data")
        drawn: tuple[list[Any], Any] = trainer.get_batch_samples(batches, number, self._device)
        speed.enter("other")
        speed.count(drawn[0])
        if not trainer.session.loss_head.is_known:
            trainer.session.loss_head = find_loss_head(trainer, trainer.model_wrapped, drawn[0], self._device)
        window, number = drawn
        if number is None and window and hasattr(window[0], "get") and getattr(window[0].get("labels"), "ndim", 0) > 1:
            number = count_label_tokens(window, labels_are_shifted=False)
        self._labels_drawn = number.to(self._device) if isinstance(number, torch.Tensor) else None
        return drawn

    def ends_epoch(self) -> bool:
        """Whether a callback has asked for the end of the epoch or the training; asked after each micro-batch."""
        control = self.trainer.control
        return bool(control.should_epoch_stop or control.should_training_stop)

    def begin_micro_batch(self, micro_batch: MicroBatch) -> None:
        """A micro-batch has been drawn, its forward pass comes next."""
        trainer = self.trainer
        trainer.session.micro_batches_in_window = micro_batch.window_size
        if micro_batch.opens_window:
            self._window = (trainer.state.global_step + 1, self.run.epoch, self.run.windows.micro_batches_seen - 1)
            if self._labels_drawn is not None:
                self.health.unread.append((LABELS, self._window, self._labels_drawn))
            trainer.control = trainer.callback_handler.on_step_begin(trainer.args, trainer.state, trainer.control)

    def loss_of(self, micro_batch: MicroBatch, by_training_step: bool = False) -> torch.Tensor:
        """Forward pass: the loss as it goes into the backward pass, which with `auto_micro_batch` is done too.

        Parameters:
            by_training_step: a subclass, or a script, has its own `training_step`, which calls backward too.
        """
        trainer, inputs, speed = self.trainer, micro_batch.inputs, self.speed
        if by_training_step:
            speed.enter("forward")
        forward = trainer.training_step if by_training_step else trainer._forward_for_training
        if self.fitting is None:
            loss: torch.Tensor = forward(trainer.model_wrapped, inputs, micro_batch.num_items_in_window)
        else:
            loss = self.fitting.loss_of(micro_batch, forward)
        kept = trainer.session.loss.add(loss, trainer.state.global_step, trainer.args.logging_nan_inf_filter)
        place = (*self._window[:2], self.run.windows.micro_batches_seen - 1)
        self.health.unread.append((LOSS, place, kept))
        trainer.session.flos += float(trainer.floating_point_ops(inputs))
        trainer._track_num_input_tokens(inputs)
        speed.enter("backward")
        steps = trainer.accelerator.gradient_state.plugin_kwargs.get("num_steps", 1)
        # A script may have told its accelerator to divide too.
        return loss if steps == 1 or by_training_step else loss / steps

    def clip(self) -> None:
        """Gradients of the window are complete: clip them, note their norm."""
        self.speed.enter("step")
        trainer = self.trainer
        clipped = trainer._clip_grad_norm(trainer.model_wrapped) if trainer.args.max_grad_norm > 0 else None
        self.grad_norm = trainer._get_grad_norm(trainer.model_wrapped, grad_norm=clipped)
        self.health.unread.append((NORM, self._window, self.grad_norm))
        if self.health.way in ("skip", "rollback"):
            try:
                self.is_refused = self.health.refuses()
            except GoingBack:
                # Lightning ends its loop as after an error, of which its callbacks need not hear.
                trainer.session.lightning.trainer.callbacks = []
                raise
        if len(self.health.unread) >= MOST_UNREAD:
            self.health.look()
        trainer.control = trainer.callback_handler.on_pre_optimizer_step(trainer.args, trainer.state, trainer.control)
        trainer.update_guard.hold()

    def note_update(self) -> None:
        """The optimizer has stepped; the schedule steps next."""
        trainer = self.trainer
        trainer.control = trainer.callback_handler.on_optimizer_step(trainer.args, trainer.state, trainer.control)
        self.learning_rate = trainer._get_learning_rate()

    def update(self, step_optimizer: Callable[[], Any], step_schedules: Callable[[], None]) -> None:
        """Clip, step the optimizer and then the schedules that the loop does not step."""
        self.clip()
        step_optimizer()
        self.note_update()
        step_schedules()

    def end_micro_batch(self, micro_batch: MicroBatch) -> None:
        """A micro-batch is done, and with the last one of a window the optimizer step: log, evaluate and save."""
        trainer = self.trainer
        handler = trainer.callback_handler
        self.speed.enter("other")
        if not micro_batch.closes_window:
            trainer.control = handler.on_substep_end(trainer.args, trainer.state, trainer.control)
            self.agree_on_flags(STOPPING_FLAGS)
            return
        clear_gradients(trainer.model, trainer.session.clipped)
        trainer.session.clipped = None
        trainer.state.global_step += 1
        self.run.windows.count_optimizer_step()
        trainer.state.epoch = self.run.epoch + micro_batch.epoch_fraction
        trainer.update_guard.release()
        trainer.control = handler.on_step_end(trainer.args, trainer.state, trainer.control)
        if self.clock is not None and time.monotonic() >= self.clock.next_call:
            self.clock.raise_flags(trainer.control, trainer.state.global_step)
            if self._flags is not None:
                self._flags.decided_here.update(name for name in CONTROL_FLAGS if getattr(trainer.control, name))
        # What is due at the end of the epoch belongs to its last step too, and follows at once.
        if micro_batch.epoch_fraction < 1 and trainer.preemption.signals:
            trainer.preemption.agree()
        self.agree_on_flags()
        self.log_evaluate_save()

    def agree_on_flags(self, among: tuple[str, ...] = CONTROL_FLAGS) -> None:
        """Leave those flags of the control raised that all processes raise, and note background saves that have ended.

        Parameters:
            among: the flags that count at this place.
        """
        saves = self.trainer.background_saves
        is_written = saves is not None and saves.has_ended()
        if self._flags is not None:
            is_written = self._flags.settle(self.trainer.control, among, is_written)
        if is_written and saves is not None and among is CONTROL_FLAGS:
            # In all processes at once. Callbacks that hear of it may raise flags.
            saves.wait()
            self.agree_on_flags(among)

    def log_evaluate_save(self) -> None:
        """Do what the control asks for."""
        trainer, run = self.trainer, self.run
        control = trainer.control
        calls_events = control.should_log or control.should_evaluate or control.should_save
        # Nothing to do, and nobody to tell that; what is handed over below has to be put together first.
        if not (calls_events or trainer.preemption.agreed is not None or self._is_told_of_each_step):
            return
        if calls_events or trainer.preemption.agreed is not None:
            self.health.look(comes_save=control.should_save)
        if control.should_save and self.health.way == "rollback":
            loss = trainer.session.loss
            total = loss.before_last_log + mean_over_processes(loss.since_last_log)
            self.health.losses[trainer.state.global_step] = total
        done = {"should_save": control.should_save, "should_evaluate": control.should_evaluate}
        trainer._maybe_log_save_evaluate(
            trainer.session.loss.since_last_log,
            self.grad_norm,
            trainer.model_wrapped,
            run.trial,
            run.epoch,
            run.ignore_keys_for_eval,
            run.start_time,
            learning_rate=self.learning_rate,
        )
        if self.clock is not None:
            self.clock.begin_intervals(done)
        self.speed.enter("other")
        if calls_events:
            # Callbacks may have decided to stop by what they heard of.
            self.agree_on_flags(STOPPING_FLAGS)
            self.tell_that_it_is_done()

    @functools.cached_property
    def _is_told_of_each_step(self) -> bool:
        """Whether a subclass, or this Trainer, has its own `_maybe_log_save_evaluate`, called at each step."""
        return bool(own_methods(self.trainer, ["_maybe_log_save_evaluate"]))

    def tell_that_it_is_done(self) -> None:
        """Call `when_done`, once."""
        if self.when_done is not None:
            tell, self.when_done = self.when_done, None
            tell()

    def end_agreements(self) -> None:
        """The last step is done: nothing is left that the processes tell each other in the background."""
        if self._flags is not None:
            self._flags.finish()
