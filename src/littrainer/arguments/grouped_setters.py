"""Methods of TrainingArguments that set all arguments of a topic."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from littrainer.arguments.choices import HubStrategy, IntervalStrategy, OptimizerNames, SaveStrategy, SchedulerType
from littrainer.arguments.fields import ArgumentFields
from littrainer.arguments.normalization import CHOICE_FIELDS
from littrainer.arguments.report_to import list_trackers
from littrainer.arguments.rules import STEP_INTERVALS, check_values

if TYPE_CHECKING:
    from typing_extensions import Self


class GroupedSetters(ArgumentFields):
    """The `set_*` methods, which return the arguments; omitted parameters reset their arguments to the defaults.

    An invalid value raises ValueError or TypeError and changes nothing.
    """

    def set_training(
        self, learning_rate: float = 5e-5, batch_size: int = 8, weight_decay: float = 0.0,
        num_epochs: float = 3, max_steps: int = -1, gradient_accumulation_steps: int = 1, seed: int = 42,
        activation_checkpointing: bool = False, gradient_checkpointing: bool | None = None,
    ) -> Self:  # fmt: skip
        """Set the common arguments of a training, and `do_train`.

        Parameters:
            batch_size, num_epochs: `per_device_train_batch_size` and `num_train_epochs`.
            learning_rate, weight_decay, max_steps, gradient_accumulation_steps, seed: the arguments of these names.
            activation_checkpointing, gradient_checkpointing: the argument of both names; the latter has precedence.
        """
        if gradient_checkpointing is not None:
            activation_checkpointing = gradient_checkpointing
        return self._set_arguments(
            {**locals(), "gradient_checkpointing": activation_checkpointing, "do_train": True},
            batch_size="per_device_train_batch_size",
            num_epochs="num_train_epochs",
        )

    def set_evaluate(
        self, strategy: str | IntervalStrategy = "no", steps: float = 500, batch_size: int = 8,
        accumulation_steps: int | None = None, delay: float | None = None, loss_only: bool = False,
        jit_mode: bool = False,
    ) -> Self:  # fmt: skip
        """Set when and how to evaluate during training, and `do_eval`.

        Parameters:
            strategy, steps, accumulation_steps, delay: the arguments `eval_strategy` and so on.
            batch_size, loss_only: `per_device_eval_batch_size` and `prediction_loss_only`.
            jit_mode: accepted when false; evaluation is not traced any more.
        """
        return self._set_arguments(
            {**locals(), "delay": 0 if delay is None else delay, "do_eval": strategy != IntervalStrategy.NO},
            prefix="eval_",
            batch_size="per_device_eval_batch_size",
            loss_only="prediction_loss_only",
        )

    def set_testing(self, batch_size: int = 8, loss_only: bool = False, jit_mode: bool = False) -> Self:
        """Set how to predict test data, and `do_predict`.

        Parameters:
            batch_size, loss_only: `per_device_eval_batch_size` and `prediction_loss_only`.
            jit_mode: accepted when false; prediction is not traced any more.
        """
        return self._set_arguments(
            {**locals(), "do_predict": True}, batch_size="per_device_eval_batch_size", loss_only="prediction_loss_only"
        )

    def set_save(
        self, strategy: str | SaveStrategy | IntervalStrategy = "steps", steps: float = 500,
        total_limit: int | None = None, on_each_node: bool = False,
    ) -> Self:  # fmt: skip
        """Set when checkpoints are written and how many are kept.

        Parameters:
            strategy, steps, total_limit, on_each_node: the arguments `save_strategy` and so on.
        """
        return self._set_arguments(locals(), prefix="save_")

    def set_logging(
        self, strategy: str | IntervalStrategy = "steps", steps: float = 500,
        report_to: str | list[str] = "none", level: str = "passive", first_step: bool = False,
        nan_inf_filter: bool = False, on_each_node: bool = False, replica_level: str = "passive",
    ) -> Self:  # fmt: skip
        """Set logs, log levels and experiment trackers.

        Parameters:
            strategy, steps, first_step, nan_inf_filter: the arguments `logging_strategy` and so on.
            level, replica_level, on_each_node: `log_level`, `log_level_replica` and `log_on_each_node`.
            report_to: experiment trackers by name; `none` reports to none.
        """
        return self._set_arguments(
            {**locals(), "report_to": list_trackers(report_to)},
            prefix="logging_",
            level="log_level",
            replica_level="log_level_replica",
            on_each_node="log_on_each_node",
        )

    def set_push_to_hub(
        self, model_id: str, strategy: str | HubStrategy = "every_save", token: str | None = None,
        private_repo: bool | None = None, always_push: bool = False, revision: str | None = None,
    ) -> Self:  # fmt: skip
        """Set the Hub repository and the times of pushes, and `push_to_hub`.

        Parameters:
            model_id, strategy, token, private_repo, always_push, revision: the arguments `hub_model_id` and so on.
        """
        return self._set_arguments({**locals(), "push_to_hub": True}, prefix="hub_")

    def set_optimizer(
        self, name: str | OptimizerNames = "adamw_torch", learning_rate: float = 5e-5,
        weight_decay: float = 0.0, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8,
        args: str | None = None,
    ) -> Self:  # fmt: skip
        """Set the optimizer and its arguments.

        Parameters:
            name, args: `optim` and `optim_args`.
            learning_rate, weight_decay: the arguments of these names.
            beta1, beta2, epsilon: the arguments `adam_beta1` and so on.
        """
        return self._set_arguments(locals(), prefix="adam_", name="optim", args="optim_args")

    def set_lr_scheduler(
        self, name: str | SchedulerType = "linear", num_epochs: float = 3.0, max_steps: int = -1,
        warmup_steps: float = 0, warmup_ratio: float | None = None,
    ) -> Self:  # fmt: skip
        """Set the learning-rate schedule and its length.

        Parameters:
            name, num_epochs: `lr_scheduler_type` and `num_train_epochs`.
            max_steps, warmup_steps: the arguments of these names.
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
        return self._set_arguments(
            {**locals(), "warmup_ratio": None}, name="lr_scheduler_type", num_epochs="num_train_epochs"
        )

    def set_dataloader(
        self, train_batch_size: int = 8, eval_batch_size: int = 8, drop_last: bool = False,
        num_workers: int = 0, pin_memory: bool = True, persistent_workers: bool = False,
        prefetch_factor: int | None = None, multiprocessing_context: str | None = None, in_order: bool = True,
        auto_find_batch_size: bool = False, ignore_data_skip: bool = False, sampler_seed: int | None = None,
    ) -> Self:  # fmt: skip
        """Set how data is loaded.

        Parameters:
            train_batch_size, eval_batch_size: `per_device_train_batch_size` and `per_device_eval_batch_size`.
            drop_last, num_workers, pin_memory, persistent_workers: the arguments `dataloader_drop_last` and so on.
            prefetch_factor, multiprocessing_context, in_order: the arguments `dataloader_prefetch_factor` and so on.
            auto_find_batch_size, ignore_data_skip: the arguments of these names.
            sampler_seed: `data_seed`.
        """
        return self._set_arguments(
            locals(),
            prefix="dataloader_",
            train_batch_size="per_device_train_batch_size",
            eval_batch_size="per_device_eval_batch_size",
            sampler_seed="data_seed",
        )

    def _set_arguments(self, parameters: dict[str, Any], prefix: str = "", **argument_of: str) -> Self:
        """Set the arguments of a method's parameters, or none if a value is invalid.

        Parameters:
            parameters: values by name; names of no argument are skipped.
            prefix: prefix that parameters omit.
            argument_of: parameter -> argument with another name.
        """
        if parameters.get("jit_mode"):
            raise ValueError(
                "jit_mode=True is no longer possible: evaluation is not traced any more, use torch_compile."
            )
        # A subclass's field may have the name of a parameter.
        fields = ArgumentFields.__dataclass_fields__
        values = {}
        for name, value in parameters.items():
            argument = argument_of.get(name, prefix + name if prefix + name in fields else name)
            if argument in fields:
                values[argument] = CHOICE_FIELDS[argument](value) if argument in CHOICE_FIELDS else value
        for name, strategy in STEP_INTERVALS.items():
            if values.get(strategy) == "steps" and values[name] == 0:
                raise ValueError(f'{strategy}="steps" needs {name} above 0; give a number, or "epoch" or "no".')
        previous = {name: getattr(self, name) for name in values}
        vars(self).update(values)
        try:
            check_values(self)
        except (TypeError, ValueError):
            vars(self).update(previous)
            raise
        return self
