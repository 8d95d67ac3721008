"""DeepSpeed: optimizer states, gradients and parameters sharded over the processes (ZeRO), by its engine.

The engine is around the user's model. It steps the optimizer within the backward pass of a window's last micro-batch,
clips gradients by itself and scales the losses of fp16. If its configuration says so it makes optimizer and schedule
too, and steps the latter.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn

from littrainer.arguments.choices import SchedulerType
from littrainer.distributed.group import start_deepspeed_communication
from littrainer.distributed.layout import tensor_parallel_size
from littrainer.optim.stepping import OptimizerWrapper, has_fused_backward
from littrainer.runtime.lazy_isinstance import is_a
from littrainer.strategies.model_wrapping import get_compile_keywords
from littrainer.strategies.single_device import InPlaceStrategy, LaunchedProcesses

if TYPE_CHECKING:
    from littrainer.arguments.deepspeed import DeepSpeedConfig
    from littrainer.strategies.choice import TrainedModel

logger = logging.getLogger(__name__)


class TrainerDeepSpeedStrategy(InPlaceStrategy, DeepSpeedStrategy):
    """Lightning's strategy around an engine that holds the user's model, which stays on its device.

    Lightning's own would put its module into the engine, and give the weights of checkpoints other names than
    transformers does. It makes the windows of optimizer steps too; here they are the Trainer's.

    Parameters:
        trained: the model, and the arguments.
    """

    def __init__(self, trained: TrainedModel):
        args = trained.args
        super().__init__(
            config=args.hf_deepspeed_config.config,
            cluster_environment=LaunchedProcesses(args),
            process_group_backend=args.ddp_backend,
            timeout=args.ddp_timeout_delta,
            logging_level=args.get_process_log_level(),
            exclude_frozen_parameters=is_a(trained.model, "peft model"),
        )
        self._args = args
        # Lightning would fill in its own values; the Trainer's are in it when the engine is made.
        self._config_initialized = True

    @property
    def handles_gradient_accumulation(self) -> bool:
        """No: the windows are the Trainer's, and the last one of an epoch may be shorter."""
        return False

    @property
    def deepspeed_engine(self) -> Any:
        """The engine, around the user's model."""
        module: Any = self.lightning_module
        return module.owner.deepspeed

    def setup_environment(self) -> None:
        """Take the device, and bring communication up."""
        Strategy.setup_environment(self)
        self.setup_distributed()

    def setup_distributed(self) -> None:
        """Bring communication up, on whatever device DeepSpeed works on."""
        self.set_world_ranks()
        self._process_group_backend = self._get_process_group_backend()
        start_deepspeed_communication(self._args)

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Nothing to enter: the model is there, and sharded if `from_pretrained` made it."""
        yield

    def setup(self, trainer: pl.Trainer) -> None:
        """Let the module's `configure_optimizers` make the engine; without training only a sharded model needs one."""
        module: Any = self.lightning_module
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self.model = module
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            DDPStrategy.setup_optimizers(self, trainer)
        else:
            create_evaluation_engine(module.owner)
        self.barrier()


class EngineOptimizer(OptimizerWrapper):
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
    is_saved_by_engine = True

    def __init__(self, scheduler: Any):
        self.scheduler = scheduler

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def get_last_lr(self) -> list[float]:
        """The rates of the last step; 0 if the engine has skipped all steps so far, as fp16 begins."""
        try:
            return self.scheduler.get_last_lr()
        except AssertionError:
            # DeepSpeed's schedules have none before their first step.
            return [0.0]

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the engine has stepped it."""


# ---- Making the engine -----------------------------------------------------------------------------------------------


def create_engine(trainer: Any, max_steps: int, overridden: Collection[str]) -> tuple[Any, Any]:
    """Make the engine for a training, with optimizer and schedule, and hand these to the Trainer.

    Parameters:
        max_steps: optimizer steps of the training.
        overridden: `create_optimizer`, `create_scheduler` or both, as far as a subclass overrides them.

    Raises:
        ValueError: the configuration contradicts the arguments, or what was given to the Trainer.
    """
    session, made = trainer.session, trainer.session.optimization
    config = resolved_config(trainer.args, trainer.model, session.train_batch_size, max_steps)
    start_deepspeed_communication(trainer.args)
    if isinstance(trainer.optimizer, EngineOptimizer) and trainer.optimizer.made_by_user:
        raise ValueError(
            "DeepSpeed has taken the optimizer apart that was given as `optimizers`, so a second train() cannot go on "
            "with it: make a new Trainer, or let the arguments name the optimizer."
        )
    # What an earlier training has made.
    if isinstance(trainer.optimizer, EngineOptimizer):
        made.optimizer = None
    if made.is_default_schedule:
        made.schedule, made.is_default_schedule = None, False
    settings = config.config
    for section, method, given in (
        ("optimizer", "create_optimizer", trainer.optimizer),
        ("scheduler", "create_scheduler", trainer.lr_scheduler),
    ):
        is_overridden = method in overridden
        if section in settings and (is_overridden or given is not None):
            there = (
                f"{type(trainer).__name__}.{method}" if is_overridden else f"the one given as `optimizers` ({given})"
            )
            raise ValueError(
                f'There are two: "{section}" of the DeepSpeed configuration, and {there}. Take one of them out.'
            )
    if "optimizer" in settings and trainer.lr_scheduler is not None:
        raise ValueError(
            "The schedule given as `optimizers` drives another optimizer than the one that DeepSpeed makes by the "
            'section "optimizer" of its configuration. Take that section out, or leave the schedule to the arguments.'
        )
    _warn_of_what_has_no_effect(trainer.args)
    if trainer.deepspeed is not None:
        trainer.deepspeed.destroy()
        session.deepspeed, trainer.model_wrapped = None, trainer.model
    keywords: dict[str, Any] = {}
    made_by_user = trainer.optimizer is not None
    if "optimizer" not in settings:
        trainer.create_optimizer()
        if has_fused_backward(trainer.optimizer):
            raise ValueError(
                f"{type(trainer.optimizer).__name__} updates the weights during the backward pass, and DeepSpeed's "
                "engine steps after it: set `optim` to another one."
            )
        keywords["optimizer"] = _for_engine(trainer.optimizer, config)
        settings["zero_allow_untested_optimizer"] = True
    elif "scheduler" not in settings:

        def schedule_for(optimizer: Any) -> Any:
            made.schedule = None
            trainer.create_scheduler(num_training_steps=max_steps, optimizer=optimizer)
            return trainer.lr_scheduler

        keywords["lr_scheduler"] = schedule_for
    parameters = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    engine, optimizer, schedule = _initialize(
        trainer.args, trainer.model, settings, model_parameters=parameters, **keywords
    )
    session.deepspeed = trainer.model_wrapped = engine
    made.optimizer = EngineOptimizer(optimizer, made_by_user and "optimizer" not in settings)
    if schedule is not None:
        made.schedule, made.is_default_schedule = EngineSchedule(schedule), True
    else:
        trainer.create_scheduler(num_training_steps=max_steps, optimizer=trainer.optimizer)
    session.model_is_prepared = True
    return trainer.optimizer, trainer.lr_scheduler


def create_evaluation_engine(trainer: Any) -> None:
    """Make an engine without optimizer around a model whose parameters are sharded, unless there is one."""
    if trainer.deepspeed is not None:
        return
    session = trainer.session
    config = resolved_config(trainer.args, trainer.model, session.train_batch_size, 0)
    if not config.is_zero3():
        return
    start_deepspeed_communication(trainer.args)
    without_training = {name: value for name, value in config.config.items() if name not in ("optimizer", "scheduler")}
    engine, _, _ = _initialize(trainer.args, trainer.model, without_training)
    session.deepspeed = trainer.model_wrapped = engine
    session.model_is_prepared = True


def resolved_config(args: Any, model: Any, train_batch_size: int, max_steps: int) -> DeepSpeedConfig:
    """The configuration with all its values, as arguments, model and length of the training are now.

    Raises:
        ValueError: it contradicts the arguments, or leaves a value open that nothing says.
    """
    config: DeepSpeedConfig = args.hf_deepspeed_config
    config.trainer_config_process(args, args.auto_find_batch_size, train_batch_size)
    config.trainer_config_finalize(args, model, max_steps)
    return config


def _initialize(args: Any, model: Any, settings: dict[str, Any], **keywords: Any) -> tuple[Any, Any, Any]:
    deepspeed: Any = importlib.import_module("deepspeed")
    importlib.import_module("deepspeed.utils").logger.setLevel(args.get_process_log_level())
    args.deepspeed_plugin.set_moe_leaf_modules(model)
    engine, optimizer, _, schedule = deepspeed.initialize(
        model=model, config=settings, dist_init_required=False, **keywords
    )
    compilation = get_compile_keywords(args)
    if compilation is not None:
        backend = compilation.pop("backend")
        engine.compile(backend=backend, compile_kwargs=compilation)
    return engine, optimizer, schedule


def _for_engine(optimizer: Any, config: DeepSpeedConfig) -> Any:
    """An optimizer as the engine takes it: DeepSpeed's own of that kind if its states lie on the host."""
    place = config.get_value("zero_optimization.offload_optimizer.device", "none")
    if place in (None, "none") or not config.get_value("zero_force_ds_cpu_optimizer", True):
        return optimizer
    settings = {name: value for name, value in optimizer.defaults.items() if name in ("lr", "weight_decay")}
    if isinstance(optimizer, torch.optim.Adagrad):
        return importlib.import_module("deepspeed.ops.adagrad").DeepSpeedCPUAdagrad(optimizer.param_groups, **settings)
    adam: Any = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
    return adam(optimizer.param_groups, adamw_mode=isinstance(optimizer, torch.optim.AdamW), **settings)


def cast_to_engine_dtype(args: Any, data: torch.Tensor) -> torch.Tensor:
    """A model's input in the number format that the engine holds the model in; integers as they are."""
    return data.to(args.hf_deepspeed_config.dtype()) if data.is_floating_point() or data.is_complex() else data


# ---- Checks ----------------------------------------------------------------------------------------------------------


def check_deepspeed(args: Any, lightning_keywords: dict[str, Any]) -> None:
    """Refuse what DeepSpeed cannot do together.

    Parameters:
        lightning_keywords: what was given for the `lightning.Trainer`, from all places.

    Raises:
        ValueError: names the two things of which one has to go.
    """
    config: DeepSpeedConfig = args.hf_deepspeed_config
    refused = {
        "save_only_model=True together with load_best_model_at_end=True: the best model is loaded from the files of "
        "DeepSpeed's engine, which are left out": args.save_only_model and args.load_best_model_at_end,
        "auto_find_batch_size=True in stage 3: an engine that ran out of memory leaves parts of parameters behind. Use "
        "stage 1 or 2": args.auto_find_batch_size and config.is_zero3(),
        "async_save=True: its engine writes checkpoints itself, in all processes together": args.async_save,
        '"tensor_parallel" in its configuration: leave it out, or leave `deepspeed` out and set parallelism_config': (
            config.get_value("tensor_parallel.autotp_size", 1) not in (0, 1)
        ),
        "tensor parallelism (parallelism_config with a tp_size): set one of the two": tensor_parallel_size(args) > 1,
        "a strategy given as lightning={'strategy': ...}: set one of the two": ("strategy" in lightning_keywords),
    }
    for what, is_asked_for in refused.items():
        if is_asked_for:
            raise ValueError(f"`deepspeed` does not go with {what}.")


def _warn_of_what_has_no_effect(args: Any) -> None:
    """Say, in the process that logs, which arguments the configuration leaves without effect."""
    config: dict[str, Any] = args.hf_deepspeed_config.config
    # Argument -> whether it has none, and why.
    idle = {
        "max_grad_norm": (
            args.max_grad_norm and "gradient_clipping" not in config,
            'write "gradient_clipping": "auto" into the configuration',
        ),
        "optim": (
            "optimizer" in config and args.optim != type(args).default_optim,
            'the configuration has a section "optimizer"',
        ),
        "lr_scheduler_type": (
            "scheduler" in config and args.lr_scheduler_type != SchedulerType.LINEAR,
            'the configuration has a section "scheduler"',
        ),
    }
    for name, (has_none, why) in idle.items():
        if has_none and args.should_log:
            value = getattr(args, name)
            logger.warning("%s=%s has no effect under `deepspeed`: %s.", name, getattr(value, "value", value), why)
