"""Methods of TrainingArguments that set all arguments of one topic at once and return the arguments."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from littrainer.arguments.choices import HubStrategy, IntervalStrategy, OptimizerNames, SaveStrategy, SchedulerType
from littrainer.arguments.fields import ArgumentFields
from littrainer.arguments.normalization import CHOICE_FIELDS
from littrainer.arguments.report_to import trackers_in
from littrainer.arguments.rules import STEP_INTERVALS, check_values

if TYPE_CHECKING:
    from typing_extensions import Self


class GroupedSetters(ArgumentFields):
    """The `set_*` methods. What a call leaves out goes back to the default in its signature.

    For a value that cannot be right each raises ValueError or TypeError, which names the argument, and changes nothing.
    """

    def set_training(
        self, learning_rate: float = 5e-5, batch_size: int = 8, weight_decay: float = 0.0,
        num_epochs: float = 3, max_steps: int = -1, gradient_accumulation_steps: int = 1, seed: int = 42,
        activation_checkpointing: bool = False, gradient_checkpointing: bool | None = None,
    ) -> Self:  # fmt: skip
        """Set the arguments that every training has, and `do_train`.

        Parameters:
            learning_rate: peak learning rate.
            batch_size: samples in a micro-batch on each device.
            weight_decay: decay of weights other than biases and norms.
            num_epochs: passes over the data, a fraction allowed.
            max_steps: optimizer steps; decides instead of `num_epochs` when positive.
            gradient_accumulation_steps: micro-batches per optimizer step.
            seed: random seed set before training.
            activation_checkpointing: recompute activations instead of storing them.
            gradient_checkpointing: other name of `activation_checkpointing`.
        """
        if gradient_checkpointing is not None:
            activation_checkpointing = gradient_checkpointing
        return self._set_together(
            do_train=True,
            learning_rate=learning_rate,
            per_device_train_batch_size=batch_size,
            weight_decay=weight_decay,
            num_train_epochs=num_epochs,
            max_steps=max_steps,
            gradient_accumulation_steps=gradient_accumulation_steps,
            seed=seed,
            activation_checkpointing=activation_checkpointing,
            gradient_checkpointing=activation_checkpointing,
        )

    def set_evaluate(
        self, strategy: str | IntervalStrategy = "no", steps: float = 500, batch_size: int = 8,
        accumulation_steps: int | None = None, delay: float | None = None, loss_only: bool = False,
        jit_mode: bool = False,
    ) -> Self:  # fmt: skip
        """Set when and how to evaluate during training, and `do_eval` to whether that happens.

        Parameters:
            strategy: `no`, `steps` or `epoch`.
            steps: optimizer steps between two evaluations.
            batch_size: samples in an evaluation batch on each device.
            accumulation_steps: batches after which predictions move to host memory; None: at the end.
            delay: epochs or steps before the first evaluation; None is no delay.
            loss_only: keep only the loss.
            jit_mode: accepted when false; evaluation is not traced any more.
        """
        _refuse_tracing(jit_mode)
        return self._set_together(
            eval_strategy=strategy,
            do_eval=strategy != IntervalStrategy.NO,
            eval_steps=steps,
            per_device_eval_batch_size=batch_size,
            eval_accumulation_steps=accumulation_steps,
            eval_delay=0 if delay is None else delay,
            prediction_loss_only=loss_only,
        )

    def set_testing(self, batch_size: int = 8, loss_only: bool = False, jit_mode: bool = False) -> Self:
        """Set how to predict test data, and `do_predict`.

        Parameters:
            batch_size: samples in a batch on each device.
            loss_only: keep only the loss.
            jit_mode: accepted when false; prediction is not traced any more.
        """
        _refuse_tracing(jit_mode)
        return self._set_together(
            do_predict=True, per_device_eval_batch_size=batch_size, prediction_loss_only=loss_only
        )

    def set_save(
        self, strategy: str | SaveStrategy | IntervalStrategy = "steps", steps: float = 500,
        total_limit: int | None = None, on_each_node: bool = False,
    ) -> Self:  # fmt: skip
        """Set when checkpoints are written and how many are kept.

        Parameters:
            strategy: `no`, `steps`, `epoch` or `best`.
            steps: optimizer steps between two checkpoints.
            total_limit: checkpoints to keep; None keeps all.
            on_each_node: write on every node.
        """
        return self._set_together(
            save_strategy=strategy, save_steps=steps, save_total_limit=total_limit, save_on_each_node=on_each_node
        )

    def set_logging(
        self, strategy: str | IntervalStrategy = "steps", steps: float = 500,
        report_to: str | list[str] | None = "none", level: str = "passive", first_step: bool = False,
        nan_inf_filter: bool = False, on_each_node: bool = False, replica_level: str = "passive",
    ) -> Self:  # fmt: skip
        """Set what is logged, when and to whom.

        Parameters:
            strategy: `no`, `steps` or `epoch`.
            steps: optimizer steps between two logs.
            report_to: experiment trackers by name; `none` reports to none.
            level: log level of the main process.
            first_step: log after the first step too.
            nan_inf_filter: leave nan and infinite losses out of the logged mean.
            on_each_node: the first process of each node logs.
            replica_level: log level of the other processes.
        """
        return self._set_together(
            logging_strategy=strategy,
            logging_steps=steps,
            report_to=trackers_in(report_to),
            log_level=level,
            logging_first_step=first_step,
            logging_nan_inf_filter=nan_inf_filter,
            log_on_each_node=on_each_node,
            log_level_replica=replica_level,
        )

    def set_push_to_hub(
        self, model_id: str, strategy: str | HubStrategy = "every_save", token: str | None = None,
        private_repo: bool | None = None, always_push: bool = False, revision: str | None = None,
    ) -> Self:  # fmt: skip
        """Set where the model is pushed, and `push_to_hub`.

        Parameters:
            model_id: Hub repository, `name` or `organisation/name`.
            strategy: `end`, `every_save`, `checkpoint` or `all_checkpoints`.
            token: token of the Hub; None takes the one that is logged in.
            private_repo: create it as private; None leaves that to the organisation.
            always_push: push even while the previous push is running.
            revision: branch to push to.
        """
        return self._set_together(
            push_to_hub=True,
            hub_model_id=model_id,
            hub_strategy=strategy,
            hub_token=token,
            hub_private_repo=private_repo,
            hub_always_push=always_push,
            hub_revision=revision,
        )

    def set_optimizer(
        self, name: str | OptimizerNames = "adamw_torch", learning_rate: float = 5e-5,
        weight_decay: float = 0.0, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8,
        args: str | None = None,
    ) -> Self:  # fmt: skip
        """Set the optimizer and what it is made with.

        Parameters:
            name: name of the optimizer.
            learning_rate: peak learning rate.
            weight_decay: decay of weights other than biases and norms.
            beta1, beta2, epsilon: settings of Adam and its relatives.
            args: further settings, written as `key=value,key=value`.
        """
        return self._set_together(
            optim=name,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            adam_beta1=beta1,
            adam_beta2=beta2,
            adam_epsilon=epsilon,
            optim_args=args,
        )

    def set_lr_scheduler(
        self, name: str | SchedulerType = "linear", num_epochs: float = 3.0, max_steps: int = -1,
        warmup_steps: float = 0, warmup_ratio: float | None = None,
    ) -> Self:  # fmt: skip
        """Set the learning-rate schedule and its length.

        Parameters:
            name: name of the schedule.
            num_epochs: passes over the data.
            max_steps: optimizer steps; decides instead of `num_epochs` when positive.
            warmup_steps: length of the warmup, from 1 up in optimizer steps, below 1 as a share of all steps.
            warmup_ratio: earlier spelling of a `warmup_steps` below 1; 0 leaves `warmup_steps` alone.
        """
        if warmup_ratio:
            warnings.warn(
                f"set_lr_scheduler(warmup_ratio={warmup_ratio}) is an earlier spelling: write "
                f"warmup_steps={warmup_ratio}.",
                FutureWarning,
                stacklevel=2,
            )
            warmup_steps = warmup_ratio
        return self._set_together(
            lr_scheduler_type=name,
            num_train_epochs=num_epochs,
            max_steps=max_steps,
            warmup_steps=warmup_steps,
        )

    def set_dataloader(
        self, train_batch_size: int = 8, eval_batch_size: int = 8, drop_last: bool = False,
        num_workers: int = 0, pin_memory: bool = True, persistent_workers: bool = False,
        prefetch_factor: int | None = None, multiprocessing_context: str | None = None, in_order: bool = True,
        auto_find_batch_size: bool = False, ignore_data_skip: bool = False, sampler_seed: int | None = None,
    ) -> Self:  # fmt: skip
        """Set how data is loaded.

        Parameters:
            train_batch_size, eval_batch_size: samples in a batch on each device.
            drop_last: leave out a last batch that is not full.
            num_workers: processes that load data; 0 loads in the training process.
            pin_memory: load into page-locked memory.
            persistent_workers: keep loader processes alive between epochs.
            prefetch_factor: batches each loader process prepares ahead.
            multiprocessing_context: how loader processes are started.
            in_order: hand out batches in the order they were asked for.
            auto_find_batch_size: start over with a smaller micro-batch when memory runs out.
            ignore_data_skip: on resume start with the first batch of the epoch again.
            sampler_seed: random seed of the training sampler; None takes `seed`.
        """
        return self._set_together(
            per_device_train_batch_size=train_batch_size,
            per_device_eval_batch_size=eval_batch_size,
            dataloader_drop_last=drop_last,
            dataloader_num_workers=num_workers,
            dataloader_pin_memory=pin_memory,
            dataloader_persistent_workers=persistent_workers,
            dataloader_prefetch_factor=prefetch_factor,
            dataloader_multiprocessing_context=multiprocessing_context,
            dataloader_in_order=in_order,
            auto_find_batch_size=auto_find_batch_size,
            ignore_data_skip=ignore_data_skip,
            data_seed=sampler_seed,
        )

    def _set_together(self, **values: Any) -> Self:
        for name in values.keys() & CHOICE_FIELDS.keys():
            values[name] = CHOICE_FIELDS[name](values[name])
        for name, strategy in STEP_INTERVALS.items():
            if values.get(strategy) == "steps" and values[name] == 0:
                raise ValueError(f'{strategy}="steps" needs {name} above 0; give a number, or "epoch" or "no".')
        before = {name: getattr(self, name) for name in values}
        vars(self).update(values)
        try:
            check_values(self)
        except (TypeError, ValueError):
            vars(self).update(before)
            raise
        return self


def _refuse_tracing(jit_mode: bool) -> None:
    if jit_mode:
        raise ValueError("jit_mode=True is no longer possible: evaluation is not traced any more, use torch_compile.")
