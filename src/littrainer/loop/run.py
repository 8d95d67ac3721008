"""The beginning and end of a training and its epochs; loop/step.py has its steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from littrainer.arguments.rules import check_nonfinite_arguments
from littrainer.callbacks.lightning_states import (
    collect_lightning_additions,
    collect_lightning_states,
    restore_lightning_callbacks,
)
from littrainer.callbacks.state import TrainerState, is_exportable
from littrainer.checkpoint.reader import read_state
from littrainer.data.resume.position import DataPosition
from littrainer.data.resume.rng import get_rng_states, set_rng_states
from littrainer.data.windows import WindowLoader
from littrainer.distributed.collectives import broadcast_object, raise_on_all_ranks
from littrainer.evaluation.results import TrainOutput, speed_metrics
from littrainer.loop.loss import RunningLoss
from littrainer.loop.packed_attention import check_packing
from littrainer.loop.plan import TrainingPlan
from littrainer.loop.preemption import pop_interrupted_evaluation
from littrainer.loop.resuming import (
    POSITION_FIELDS,
    RECORD_VERSION,
    TrainingSizes,
    find_position,
    get_compared_arguments,
    has_work_at_epoch_ends,
    read_resume_record,
    warn_of_differences,
)
from littrainer.loop.step import StepRunner
from littrainer.model.traversal import clear_gradients, list_parameters
from littrainer.optim.parameter_groups import RequestedHyperparameters, have_hyperparameters_changed
from littrainer.optim.schedules import cover_added_groups, set_schedule_step
from littrainer.runtime.weak_attributes import weak_property

logger = logging.getLogger(__name__)


class TrainingRun:
    """A training, from its plan to its result.

    session.py and Lightning's hooks (lightning_adapter/module.py) call its methods.

    Parameters:
        checkpoint: folder to resume from, or None.
    """

    trainer = weak_property("_trainer")

    def __init__(
        self,
        trainer: Any,
        loader: Any,
        plan: TrainingPlan,
        checkpoint: Path | None,
        trial: Any,
        ignore_keys_for_eval: Sequence[str] | None,
    ):
        self.trainer = trainer
        self.plan = plan
        self.checkpoint = checkpoint
        self._checkpoint_name = None if checkpoint is None else str(checkpoint)
        self.trial = trial
        self.ignore_keys_for_eval = ignore_keys_for_eval
        self.step = StepRunner(self)
        # A rollback keeps the original start time.
        self.start_time = trainer.session.run.start_time if self.step.health.rollback_counts else time.time()
        accumulation = trainer.args.gradient_accumulation_steps
        self.windows = WindowLoader(
            loader,
            accumulation=accumulation,
            micro_batches_per_epoch=plan.micro_batches_per_epoch,
            draw_window=self.step.draw,
            should_stop=self.step.should_end_epoch,
            skipped_windows=self.step.health.skipped_windows,
            has_unknown_epoch_length=plan.is_endless and plan.micro_batches_per_epoch >= plan.max_steps * accumulation,
        )
        self.windows.enter_section = self.step.speed.enter
        self.first_epoch = 0
        self.epoch = 0
        self.is_between_epochs = True
        self.loaded_record: dict[str, Any] | None = None
        self.resumed_at: DataPosition | None = None
        self.epoch_end_is_due = False
        self._restores_before_epoch = False
        self._micro_batches_to_skip = 0
        self.evaluation_due: dict[str, bool] | None = None
        # RNG states for the first step, if the resume first ran the checkpoint's pending evaluation or epoch end.
        self._random_states: dict[str, Any] | None = None
        trainer.callback_handler.train_dataloader = loader
        trainer.session.optimization.is_schedule_overridden = False
        self._rates_to_restore: list[float] | None = None
        self._hyperparameters_changed = False
        # Difference between the optimizer steps taken before the resume and those that the current batch sizes would
        # have taken for the same rows; negative if fewer were taken.
        self.surplus_steps = 0
        self._has_layout_changed = False

    def prepare_state(self) -> None:
        """Reset the Trainer's state or read the checkpoint's, by the overridable `_init_training_state`."""
        plan, checkpoint = self.plan, self._checkpoint_name
        start = self.trainer._init_training_state(
            plan.max_steps, plan.optimizer_steps_per_epoch, plan.num_train_epochs, checkpoint, self.trial
        )
        if tuple(start) != (self.first_epoch, self._micro_batches_to_skip):
            self._start_at(*start)

    def _start_at(self, epoch: int, micro_batches: int) -> None:
        """Start at the position that an override of `_init_training_state` returned."""
        self.first_epoch = self.epoch = epoch
        if self.checkpoint is not None:
            self.resumed_at = DataPosition(epoch, micro_batches)
            self.epoch_end_is_due = False
            self._skip(self.resumed_at)

    def reset_state(self) -> tuple[int, int]:
        """Make a new state or read the checkpoint's.

        Returns:
            complete epochs, and micro-batches done in the next epoch.
        """
        trainer, plan = self.trainer, self.plan
        if self.checkpoint is not None:
            self._resume_state(self.checkpoint)
        else:
            callbacks = [*trainer.callback_handler.callbacks, trainer.control]
            trainer.state = TrainerState(stateful_callbacks=list(filter(is_exportable, callbacks)))
            trainer.state.is_hyper_param_search = self.trial is not None
            trainer.state.train_batch_size = trainer.session.train_batch_size
            trainer.state.compute_steps(trainer.args, plan.max_steps)
        plan = self.plan = self.plan.skip_windows(len(self.step.health.skipped_windows), trainer.args)
        self.windows.set_epoch_length(plan.micro_batches_per_epoch)
        saved_params = trainer.state.trial_params
        trainer.state.init_training_references(trainer, plan.max_steps, plan.num_train_epochs, self.trial)
        if self.checkpoint is not None and self.trial is not None:
            self._hyperparameters_changed = have_hyperparameters_changed(saved_params, trainer.state.trial_params)
            if self._hyperparameters_changed:
                trainer.state.compute_steps(trainer.args, plan.max_steps)
        return self.first_epoch, self._micro_batches_to_skip

    def _resume_state(self, checkpoint: Path) -> None:
        trainer, plan = self.trainer, self.plan
        trainer.state = read_state(checkpoint)
        self.evaluation_due = pop_interrupted_evaluation(trainer.state)
        record = self.loaded_record = read_resume_record(checkpoint, trainer.args.process_index)
        training = TrainingSizes(trainer.args, trainer.state, plan, trainer.session.train_batch_size, record)
        loader = self.windows.loader
        position = self.resumed_at = find_position(training, loader)
        # A search changes arguments on purpose; a rollback would repeat the warning.
        if self.trial is None and not self.step.health.rollback_counts:
            warn_of_differences(checkpoint, training, position, loader)
        self.surplus_steps = position.surplus_steps
        self._has_layout_changed = position.description is not None
        self.plan = plan.add_surplus_steps(self.surplus_steps, trainer.args)
        if self.loaded_record is not None and self._has_layout_changed:
            self.loaded_record["data"] = position.data
        is_same_data = position.data is not None and not self._has_layout_changed
        for policy in self.step.policies["resume"]:
            policy.resume(self.loaded_record or {}, is_same_data)
        self.first_epoch = self.epoch = position.epoch
        if position.epoch_end_is_due:
            self.first_epoch += 1
            self.epoch_end_is_due = has_work_at_epoch_ends(trainer.args)
            position = replace(position, epoch=self.first_epoch, micro_batches=0)
        self._skip(position)

    def _skip(self, position: DataPosition) -> None:
        self._micro_batches_to_skip = position.micro_batches
        # A resume at an epoch's beginning restores the generators before they draw its order; a resume in mid-epoch
        # restores them after the skip, which draws the order again.
        is_at_beginning = not (position.micro_batches or position.layout_change)
        self._restores_before_epoch = position.data is not None and is_at_beginning
        restore = None if self._restores_before_epoch else self._restore_random_states
        self.windows.progress.resume_at(position, restore)

    @property
    def folder(self) -> str:
        """Folder of the checkpoints, by the overridable `_get_output_dir`."""
        return str(self.trainer._get_output_dir(trial=self.trial))

    @property
    def is_finished(self) -> bool:
        return self.checkpoint is not None and self.trainer.state.global_step >= self.plan.max_steps

    def resume_record(self) -> dict[str, Any]:
        """Return the content of `littrainer_resume.pt`."""
        position, trainer = self.position(), self.trainer
        training = TrainingSizes(trainer.args, trainer.state, self.plan, trainer.session.train_batch_size)
        if self.resumed_at is not None:
            # No epoch has begun since the resume.
            data = (self.loaded_record or {}).get("data")
        else:
            is_over = position.epoch_end_is_due or not position.micro_batches
            data = self.windows.progress.state(position.micro_batches, epoch_is_over=is_over)
        record = {
            "version": RECORD_VERSION,
            "position": position.dump_fields(*POSITION_FIELDS),
            "sizes": training.sizes,
            "arguments": get_compared_arguments(trainer.args),
            "rank": trainer.args.process_index,
            "data": data,
            "steps_ahead": self.surplus_steps,
            "lightning_callbacks": collect_lightning_states(trainer.lightning_module),
            "schedule_is_replaced": trainer.is_schedule_overridden,
            "lightning_additions": collect_lightning_additions(trainer.lightning_module, trainer.state.global_step),
        }
        for policy in self.step.policies["record"]:
            record.update(policy.record())
        return record

    def position(self) -> DataPosition:
        """Return the position from which a checkpoint at the current step resumes."""
        if self.resumed_at is not None:
            return self.resumed_at
        is_over = self.windows.is_epoch_complete or self.trainer.control.should_epoch_stop
        if self.is_between_epochs and is_over:
            return DataPosition(self.epoch + 1)
        return DataPosition(self.epoch, self.windows.micro_batches_done, epoch_end_is_due=is_over)

    def _restore_random_states(self) -> None:
        if self._random_states is not None:
            set_rng_states(self._random_states)
        elif self.loaded_record is None or self.loaded_record["sizes"]["world_size"] == self.trainer.args.world_size:
            self.trainer._load_rng_state(self._checkpoint_name)

    @property
    def remaining_epochs(self) -> int:
        return 0 if self.is_finished else self.plan.num_train_epochs - self.first_epoch

    def announce(self) -> None:
        """Log the length of the training, as transformers does."""
        trainer, args, plan = self.trainer, self.trainer.args, self.plan
        # Sharded parameters of DeepSpeed have their full size in `ds_numel`.
        sizes = [getattr(p, "ds_numel", p.numel()) for p in list_parameters(trainer.model) if p.requires_grad]
        logger.info("***** Running training *****")
        logger.info(f"  Num examples = {plan.num_examples:,}")
        logger.info(f"  Num Epochs = {plan.num_train_epochs:,}")
        logger.info(f"  Num update steps per epoch = {plan.optimizer_steps_per_epoch:,}")
        logger.info(f"  Instantaneous batch size per device = {args.per_device_train_batch_size:,}")
        batch_size = plan.total_train_batch_size
        logger.info(f"  Total train batch size (w. parallel, distributed & accumulation) = {batch_size:,}")
        logger.info(f"  Gradient Accumulation steps = {args.gradient_accumulation_steps}")
        logger.info(f"  Total optimization steps = {plan.max_steps:,}")
        logger.info(f"  Number of trainable parameters = {sum(sizes):,}")
        if self.checkpoint is not None:
            epochs, step = self.first_epoch, trainer.state.global_step
            logger.info(f"  Resuming training from checkpoint with epoch {epochs} and global step {step}")
            if not args.ignore_data_skip:
                logger.info(
                    f"  Fast-forwarding the dataloader past {epochs} epochs and {self._micro_batches_to_skip} batches "
                    "to resume from the exact training state."
                )

    def restore_lightning_callbacks(self) -> None:
        if self.checkpoint is not None:
            restore_lightning_callbacks(
                self.trainer.lightning_module, self.trainer.state.global_step, self.loaded_record
            )

    def load_optimizer_and_schedule(self) -> None:
        """Restore optimizer, schedule and scaler."""
        if self.checkpoint is None:
            return
        trainer = self.trainer
        with raise_on_all_ranks(f"loading optimizer and schedule in {self.checkpoint}"):
            has_changed = self._hyperparameters_changed
            requested = RequestedHyperparameters(trainer.optimizer, trainer.lr_scheduler) if has_changed else None
            trainer._load_optimizer_and_scheduler(self._checkpoint_name)
            trainer._load_scaler(self._checkpoint_name)
            if requested is not None:
                saved_rate = (self.loaded_record or {}).get("arguments", {}).get("learning_rate")
                requested.apply_to(trainer.optimizer, trainer.lr_scheduler, saved_rate, trainer.args.learning_rate)
        if self._has_layout_changed:
            set_schedule_step(trainer.lr_scheduler, trainer.state.global_step - self._schedule_offset)
        if (self.loaded_record or {}).get("schedule_is_replaced"):
            # Callbacks will replace the schedule again, which changes the rates; `update_replaced_schedule` then
            # restores the rates.
            self._rates_to_restore = [group["lr"] for group in trainer.optimizer.param_groups]

    def begin(self) -> None:
        trainer = self.trainer
        handler = trainer.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = trainer.model, trainer.optimizer, trainer.lr_scheduler
        session, state, health = trainer.session, trainer.state, self.step.health
        check_nonfinite_arguments(trainer.args, trainer.optimizer)
        session.loss = RunningLoss(trainer.args.device, state.global_step, health.values)
        if health.rollback_counts:
            # Metrics cover the whole call of `train()`, except the steps that were rolled back.
            session.loss.before_last_log = health.losses.get(state.global_step, 0.0)
        else:
            self.start_time = time.time()
            session.first_step, session.first_input_tokens = state.global_step, state.num_input_tokens_seen
        health.begin(self.windows, trainer.model, trainer.accelerator, self.folder, self.checkpoint)
        clear_gradients(trainer.model)
        if session.sequences is not None:
            session.sequences.check()
        check_packing(trainer.args, trainer.model, trainer.model_wrapped, self.windows.loader)
        session.speed.begin(state)
        trainer.control = handler.on_train_begin(trainer.args, trainer.state, trainer.control)
        if trainer.args.eval_on_start:
            trainer._evaluate(self.trial, self.ignore_keys_for_eval, skip_scheduler=True)
            if self.checkpoint is not None:
                # The callback reports to Ray, which has this report from the training that wrote the checkpoint.
                self.step.on_step_done = None
            self.step.run_step_done_callback()
        if self.evaluation_due is not None:
            self._rerun_evaluation(self.evaluation_due)
        if self.epoch_end_is_due:
            self._finish_interrupted_epoch()
        # A rollback needs a checkpoint to go back to.
        if trainer.args.on_nonfinite == "rollback" and self.checkpoint is None:
            trainer.control.should_save = True
            self.step.log_evaluate_save()
        # An attempt that ran out of memory (auto_find_batch_size) may still hold the guard.
        trainer.update_guard.release()
        trainer.preemption.start()

    def _rerun_evaluation(self, switches: dict[str, bool]) -> None:
        # As in an uninterrupted training, the evaluation starts from the RNG states of the save, before the next step.
        self._restore_random_states()
        for name, value in switches.items():
            setattr(self.trainer.control, name, value)
        self.step.log_evaluate_save()
        self._random_states = get_rng_states()

    def _finish_interrupted_epoch(self) -> None:
        # The checkpoint was written at an epoch's last step, before on_epoch_end.
        trainer = self.trainer
        self._restore_random_states()
        trainer.control.should_log = trainer.control.should_evaluate = trainer.control.should_save = False
        trainer.control = trainer.callback_handler.on_epoch_end(trainer.args, trainer.state, trainer.control)
        self.resumed_at = DataPosition(self.first_epoch)
        self.step.log_evaluate_save()
        self._random_states = get_rng_states()

    def optimizer_and_schedule(self) -> tuple[Any, Any]:
        optimizer_and_schedule: tuple[Any, Any] = self.trainer._create_optimizer_and_schedule(
            self.plan.max_steps - self._schedule_offset
        )
        return optimizer_and_schedule

    @property
    def _schedule_offset(self) -> int:
        # Without `max_steps`, the schedule's length and step exclude surplus steps, to follow the trained rows.
        return 0 if self.plan.is_endless or self.trainer.args.max_steps >= 0 else self.surplus_steps

    def begin_without_steps(self) -> None:
        """Begin a training without steps, such as the resume of a finished training."""
        self.optimizer_and_schedule()
        # A search may resume a trial that was paused at its last step.
        if self.is_finished and self.trial is None:
            step, last = self.trainer.state.global_step, self.plan.max_steps
            logger.warning(
                "No step is left: the checkpoint %s has %d optimizer steps, and this training takes %d. Raise "
                "num_train_epochs or max_steps to train on.",
                self.checkpoint,
                step,
                last,
            )
        self.load_optimizer_and_schedule()
        self.begin()

    def begin_epoch(self, epoch: int) -> None:
        trainer = self.trainer
        self.epoch = epoch
        self.is_between_epochs = False
        self.resumed_at = None
        if self._restores_before_epoch:
            self._restore_random_states()
            self._restores_before_epoch = False
        self.step.grad_norm = self.step.learning_rate = None
        self.windows.start_epoch(self.epoch)
        trainer.control = trainer.callback_handler.on_epoch_begin(trainer.args, trainer.state, trainer.control)
        self.windows.accumulation = trainer.args.gradient_accumulation_steps

    def update_replaced_schedule(self, schedules: list[Any]) -> None:
        """Extend the schedule to parameter groups that callbacks added, and note whether they replaced the schedule.

        The checkpoint's learning rates are set again, since the new schedule changed them.
        """
        schedule = self.trainer.lr_scheduler
        cover_added_groups(schedule)
        self.trainer.session.optimization.is_schedule_overridden = bool(schedules) and schedule not in schedules
        if self._rates_to_restore is not None:
            for group, rate in zip(self.trainer.optimizer.param_groups, self._rates_to_restore, strict=True):
                group["lr"] = rate
            self._rates_to_restore = None

    def pop_skipped_micro_batches(self) -> int:
        """Return the number of micro-batches that the resumed epoch skips; 0 at later calls."""
        skipped, self._micro_batches_to_skip = self._micro_batches_to_skip, 0
        return skipped

    def end_epoch(self) -> None:
        trainer, control = self.trainer, self.trainer.control
        micro_batches, accumulation = self.windows.micro_batches_read, self.windows.accumulation
        is_stopping = control.should_epoch_stop or control.should_training_stop
        if 0 < micro_batches < min(accumulation, self.plan.micro_batches_per_epoch) and not is_stopping:
            raise ValueError(
                f"The training data gives {micro_batches} micro-batches, and gradient_accumulation_steps="
                f"{accumulation} asks for more: no optimizer step would ever be complete. Lower "
                "gradient_accumulation_steps or per_device_train_batch_size, or repeat the data."
            )
        if micro_batches == 0:
            logger.warning(
                "The training data gave no batch in this epoch; training stops at optimizer step %d of %d. A stream "
                "may be shorter than max_steps asks for.",
                trainer.state.global_step,
                trainer.state.max_steps,
            )
            control.should_training_stop = True
        self.is_between_epochs = True
        # `pop_skipped_micro_batches` was not called if the resumed epoch had no batches left.
        self._micro_batches_to_skip = 0
        trainer.control = trainer.callback_handler.on_epoch_end(trainer.args, trainer.state, trainer.control)
        trainer.preemption.sync_signal()
        self.step.sync_control_flags()
        if trainer.control.should_training_stop or self.epoch + 1 >= self.plan.num_train_epochs:
            self.step.request_last_evaluation(is_epoch_end=True)
        self.step.log_evaluate_save()

    def finish(self, num_train_samples: float, start_time: float) -> TrainOutput:
        """Log and return the metrics of the training.

        Parameters:
            start_time: `time.time()` at the start of this call of `train()`.
        """
        trainer, state, session = self.trainer, self.trainer.state, self.trainer.session
        self.step.drain_flag_sync()
        self.step.health.check(is_end=True)
        logger.info("\n\nTraining completed. Do not forget to share your model on huggingface.co/models =)\n\n")
        loss = session.loss
        loss.before_last_log += loss.since_last_log.item()
        steps_done = state.global_step - session.first_step
        train_loss = loss.before_last_log / max(steps_done, 0.001)
        samples_done = num_train_samples * steps_done / max(state.max_steps, 1)
        metrics: dict[str, Any] = speed_metrics("train", start_time, num_samples=samples_done, num_steps=steps_done)
        trainer.store_flos()
        metrics["total_flos"] = state.total_flos
        metrics["train_loss"] = train_loss
        metrics.update(session.speed.summary(state))
        session.memory.stop("train", metrics)
        trainer.log(metrics)
        if trainer.args.max_minutes is not None:
            clock = self.step.clock
            if broadcast_object(clock is not None and clock.ended_training):
                metrics["ended_by"] = "max_minutes"
        return TrainOutput(state.global_step, train_loss, metrics)
