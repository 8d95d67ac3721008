"""DeepSpeed's engine around the Trainer's model: how it is made, and what of it a Trainer and its subclasses see.

The engine steps the optimizer within the backward pass of a window's last micro-batch, clips gradients by itself and
scales the losses of fp16. Where its configuration says so it makes optimizer and schedule too, and steps the latter.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

from littrainer.compilation import compile_keywords
from littrainer.optim.closures import updates_during_backward
from littrainer.optim.optimizer_around import OptimizerAround
from littrainer.processes import deepspeed_communication
from littrainer.strategies.deepspeed_checks import warn_of_what_has_no_effect

if TYPE_CHECKING:
    from littrainer.arguments.deepspeed import DeepSpeedConfig
    from littrainer.trainer import Trainer


class EngineOptimizer(OptimizerAround):
    """The optimizer of an engine as a Trainer holds it: to be looked at, since the engine steps it by itself.

    Parameters:
        optimizer: DeepSpeed's.
        made_by_user: whether it was made of one that was given to the Trainer.
    """

    def __init__(self, optimizer: Any, made_by_user: bool = False):
        super().__init__(optimizer)
        self.made_by_user = made_by_user

    @property
    def step_was_skipped(self) -> bool:
        """Whether the engine left the last step out, since gradients of fp16 were not finite."""
        return bool(getattr(self.optimizer, "overflow", False))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing: the engine has stepped."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the engine clears gradients when it has stepped."""


class EngineSchedule:
    """A schedule that the engine steps.

    Parameters:
        scheduler: the one that does the work; everything else is asked of it.
    """

    # Its state is in the engine's part of a checkpoint.
    is_kept_by_engine = True

    def __init__(self, scheduler: Any):
        self.scheduler = scheduler

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def get_last_lr(self) -> list[float]:
        """The rates of the last step; 0 where the engine has skipped all steps so far, as fp16 begins."""
        try:
            return self.scheduler.get_last_lr()
        except AssertionError:
            # DeepSpeed's schedules have none before their first step.
            return [0.0]

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the engine has stepped it."""


# ---- Making the engine -----------------------------------------------------------------------------------------------


def optimizer_and_schedule(trainer: Trainer, max_steps: int) -> tuple[Any, Any]:
    """Make the engine for a training, with optimizer and schedule, and hand these to the Trainer.

    Parameters:
        max_steps: optimizer steps of the training.

    Raises:
        ValueError: the configuration contradicts the arguments, or what was given to the Trainer.
    """
    config = resolved_config(trainer, max_steps)
    deepspeed_communication.start(trainer.args)
    _refuse_two_of_a_kind(trainer, config)
    warn_of_what_has_no_effect(trainer)
    _end_earlier_engine(trainer)
    settings = config.config
    keywords: dict[str, Any] = {}
    made_by_user = trainer.optimizer is not None
    if "optimizer" not in settings:
        trainer.create_optimizer()
        _refuse_updates_during_backward(trainer.optimizer)
        keywords["optimizer"] = _for_engine(trainer.optimizer, config)
        settings["zero_allow_untested_optimizer"] = True
    elif "scheduler" not in settings:
        keywords["lr_scheduler"] = lambda optimizer: _schedule_for(trainer, optimizer, max_steps)
    parameters = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    engine, optimizer, schedule = _initialize(trainer, settings, model_parameters=parameters, **keywords)
    trainer.deepspeed = trainer.model_wrapped = engine
    trainer.optimizer = EngineOptimizer(optimizer, made_by_user and "optimizer" not in settings)
    if schedule is not None:
        trainer.lr_scheduler, trainer._created_lr_scheduler = EngineSchedule(schedule), True
    else:
        trainer.create_scheduler(num_training_steps=max_steps, optimizer=trainer.optimizer)
    trainer._model_is_prepared = True
    return trainer.optimizer, trainer.lr_scheduler


def start_for_evaluation(trainer: Trainer) -> None:
    """Make an engine without optimizer around a model whose parameters are sharded, unless there is one."""
    if trainer.deepspeed is not None:
        return
    config = resolved_config(trainer, 0)
    if not config.is_zero3():
        return
    deepspeed_communication.start(trainer.args)
    without_training = {name: value for name, value in config.config.items() if name not in ("optimizer", "scheduler")}
    engine, _, _ = _initialize(trainer, without_training)
    trainer.deepspeed = trainer.model_wrapped = engine
    trainer._model_is_prepared = True


def resolved_config(trainer: Trainer, max_steps: int) -> DeepSpeedConfig:
    """The configuration with all its values, as arguments, model and length of the training are now.

    Raises:
        ValueError: it contradicts the arguments, or leaves a value open that nothing says.
    """
    args: Any = trainer.args
    config: DeepSpeedConfig = args.hf_deepspeed_config
    config.trainer_config_process(args, args.auto_find_batch_size, trainer._train_batch_size)
    config.trainer_config_finalize(args, trainer.model, max_steps)
    return config


def _initialize(trainer: Trainer, settings: dict[str, Any], **keywords: Any) -> tuple[Any, Any, Any]:
    args: Any = trainer.args
    deepspeed: Any = importlib.import_module("deepspeed")
    importlib.import_module("deepspeed.utils").logger.setLevel(args.get_process_log_level())
    args.deepspeed_plugin.set_moe_leaf_modules(trainer.model)
    engine, optimizer, _, schedule = deepspeed.initialize(
        model=trainer.model, config=settings, dist_init_required=False, **keywords
    )
    compilation = compile_keywords(args)
    if compilation is not None:
        backend = compilation.pop("backend")
        engine.compile(backend=backend, compile_kwargs=compilation)
    return engine, optimizer, schedule


def _refuse_two_of_a_kind(trainer: Trainer, config: DeepSpeedConfig) -> None:
    given = isinstance(trainer.optimizer, EngineOptimizer) and trainer.optimizer.made_by_user
    if given:
        raise ValueError(
            "DeepSpeed has taken the optimizer apart that was given as `optimizers`, so a second train() cannot go on "
            "with it: make a new Trainer, or let the arguments name the optimizer."
        )
    for section, attribute, method in (
        ("optimizer", "optimizer", "create_optimizer"),
        ("scheduler", "lr_scheduler", "create_scheduler"),
    ):
        if section not in config.config:
            continue
        own = getattr(trainer, attribute)
        made_before = isinstance(own, (EngineOptimizer, EngineSchedule)) or (
            attribute == "lr_scheduler" and trainer._created_lr_scheduler
        )
        overridden = trainer._own_methods(method)
        if (own is not None and not made_before) or overridden:
            there = f"{type(trainer).__name__}.{method}" if overridden else f"the one given as `optimizers` ({own})"
            raise ValueError(
                f'There are two: "{section}" of the DeepSpeed configuration, and {there}. Take one of them out.'
            )
    own_schedule = trainer.lr_scheduler is not None and not trainer._created_lr_scheduler
    if "optimizer" in config.config and own_schedule:
        raise ValueError(
            "The schedule given as `optimizers` drives another optimizer than the one that DeepSpeed makes by the "
            'section "optimizer" of its configuration. Take that section out, or leave the schedule to the arguments.'
        )


def _refuse_updates_during_backward(optimizer: Any) -> None:
    if updates_during_backward(optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} updates the weights during the backward pass, and DeepSpeed's engine steps "
            "after it: set `optim` to another one."
        )


def _end_earlier_engine(trainer: Trainer) -> None:
    if trainer.deepspeed is not None:
        trainer.deepspeed.destroy()
        trainer.deepspeed = None
        trainer.model_wrapped = trainer.model
    if isinstance(trainer.optimizer, EngineOptimizer):
        trainer.optimizer = None
    if trainer._created_lr_scheduler:
        trainer.lr_scheduler, trainer._created_lr_scheduler = None, False


def _schedule_for(trainer: Trainer, optimizer: Any, max_steps: int) -> Any:
    trainer.lr_scheduler = None
    trainer.create_scheduler(num_training_steps=max_steps, optimizer=optimizer)
    return trainer.lr_scheduler


def _for_engine(optimizer: Any, config: DeepSpeedConfig) -> Any:
    """An optimizer as the engine takes it; where its states lie on the host, DeepSpeed's own of that kind."""
    place = config.get_value("zero_optimization.offload_optimizer.device", "none")
    if place in (None, "none") or not config.get_value("zero_force_ds_cpu_optimizer", True):
        return optimizer
    settings = {name: value for name, value in optimizer.defaults.items() if name in ("lr", "weight_decay")}
    if isinstance(optimizer, torch.optim.Adagrad):
        return importlib.import_module("deepspeed.ops.adagrad").DeepSpeedCPUAdagrad(optimizer.param_groups, **settings)
    adam: Any = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
    return adam(optimizer.param_groups, adamw_mode=isinstance(optimizer, torch.optim.AdamW), **settings)


# ---- Steps -----------------------------------------------------------------------------------------------------------


def backward(trainer: Trainer, loss: torch.Tensor, **keywords: Any) -> None:
    """Backward pass by the engine, and with the last micro-batch of a window the optimizer step.

    Parameters:
        keywords: for the engine's own method.
    """
    engine: Any = trainer.deepspeed
    closes_window = trainer.accelerator.sync_gradients
    engine.set_gradient_accumulation_boundary(is_boundary=closes_window)
    engine.backward(loss, **keywords)
    if closes_window:
        engine.step()


def in_number_format(trainer: Trainer, data: torch.Tensor) -> torch.Tensor:
    """A model's input in the number format that the engine holds the model in; integers as they are."""
    config: Any = trainer.args.hf_deepspeed_config
    return data.to(config.dtype()) if data.is_floating_point() or data.is_complex() else data


def step_was_skipped(trainer: Trainer) -> bool:
    """Whether the engine left the last step out, since gradients of fp16 were not finite."""
    return isinstance(trainer.optimizer, EngineOptimizer) and trainer.optimizer.step_was_skipped
