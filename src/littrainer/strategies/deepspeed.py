"""DeepSpeed's engine (ZeRO).

The engine wraps the user's model. It steps the optimizer within the backward pass of a window's last micro-batch, clips
gradients and scales fp16 losses. Its configuration can define optimizer and schedule, which the engine then creates.
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
from littrainer.callbacks.trainer_context import TrainerContext
from littrainer.distributed.group import start_deepspeed_communication
from littrainer.distributed.layout import tensor_parallel_size
from littrainer.optim.stepping import OptimizerWrapper, has_fused_backward
from littrainer.runtime.lazy_isinstance import is_a
from littrainer.strategies.choice import TrainedModel
from littrainer.strategies.model_wrapping import get_compile_keywords
from littrainer.strategies.single_device import InPlaceStrategy, LaunchedProcesses

if TYPE_CHECKING:
    from littrainer.arguments.deepspeed import DeepSpeedConfig

logger = logging.getLogger(__name__)


class TrainerDeepSpeedStrategy(InPlaceStrategy, DeepSpeedStrategy):
    """DeepSpeedStrategy with an engine around the user's model, whose checkpoints keep transformers' names."""

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
        # Keep Lightning from filling in values; `create_engine` does.
        self._config_initialized = True

    @property
    def handles_gradient_accumulation(self) -> bool:
        """False: the Trainer accumulates."""
        return False

    @property
    def deepspeed_engine(self) -> Any:
        module: Any = self.lightning_module
        return module.owner.deepspeed

    def setup_environment(self) -> None:
        Strategy.setup_environment(self)
        self.setup_distributed()

    def setup_distributed(self) -> None:
        """Initialize communication, on CPUs too."""
        self.set_world_ranks()
        self._process_group_backend = self._get_process_group_backend()
        start_deepspeed_communication(self._args)

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Do nothing: the model exists, and `from_pretrained` shards it."""
        yield

    def setup(self, trainer: pl.Trainer) -> None:
        """Create the engine, in the module's `configure_optimizers`; evaluations need it in stage 3 only."""
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
    """The Trainer's view of an optimizer that the engine steps.

    Parameters:
        is_from_user: whether it wraps an optimizer that was passed to the Trainer.
    """

    def __init__(self, optimizer: Any, is_from_user: bool = False):
        super().__init__(optimizer)
        self.is_from_user = is_from_user

    @property
    def step_was_skipped(self) -> bool:
        """True if non-finite fp16 gradients prevented the last step."""
        return bool(getattr(self.optimizer, "overflow", False))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing: the engine steps."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the engine zeroes gradients after its step."""


class EngineSchedule:
    """Proxy of DeepSpeed's scheduler, which the engine steps."""

    # The engine's checkpoint files contain the state.
    is_saved_by_engine = True

    def __init__(self, scheduler: Any):
        self.scheduler = scheduler

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def get_last_lr(self) -> list[float]:
        """Return the rates of the last step; 0 before the first step, which fp16 may delay."""
        try:
            return self.scheduler.get_last_lr()
        except AssertionError:
            return [0.0]

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the engine steps it."""


# ---- Creation of the engine ------------------------------------------------------------------------------------------


def create_engine(trainer: TrainerContext, max_steps: int, overridden: Collection[str]) -> tuple[Any, Any]:
    """Create and store the engine, optimizer and schedule of a training.

    Parameters:
        overridden: names among `create_optimizer` and `create_scheduler` that a subclass overrides.

    Raises:
        ValueError: the configuration contradicts the arguments or the passed objects.
    """
    session, optimization = trainer.session, trainer.session.optimization
    config = resolve_config(trainer.args, trainer.model, session.train_batch_size, max_steps)
    start_deepspeed_communication(trainer.args)
    if isinstance(trainer.optimizer, EngineOptimizer) and trainer.optimizer.is_from_user:
        raise ValueError(
            "DeepSpeed has taken the optimizer apart that was given as `optimizers`, so a second train() cannot go on "
            "with it: make a new Trainer, or let the arguments name the optimizer."
        )
    # Drop the objects of an earlier training.
    if isinstance(trainer.optimizer, EngineOptimizer):
        optimization.optimizer = None
    if optimization.is_default_schedule:
        optimization.schedule = None
        optimization.is_default_schedule = False
    settings = config.config
    for section, method, current in (
        ("optimizer", "create_optimizer", trainer.optimizer),
        ("scheduler", "create_scheduler", trainer.lr_scheduler),
    ):
        is_overridden = method in overridden
        if section in settings and (is_overridden or current is not None):
            source = (
                f"{type(trainer).__name__}.{method}" if is_overridden else f"the one given as `optimizers` ({current})"
            )
            raise ValueError(
                f'There are two: "{section}" of the DeepSpeed configuration, and {source}. Take one of them out.'
            )
    if "optimizer" in settings and trainer.lr_scheduler is not None:
        raise ValueError(
            "The schedule given as `optimizers` drives another optimizer than the one that DeepSpeed makes by the "
            'section "optimizer" of its configuration. Take that section out, or leave the schedule to the arguments.'
        )
    _warn_of_ignored_arguments(trainer.args)
    if trainer.deepspeed is not None:
        trainer.deepspeed.destroy()
        session.deepspeed, trainer.model_wrapped = None, trainer.model
    keywords: dict[str, Any] = {}
    is_from_user = trainer.optimizer is not None
    if "optimizer" not in settings:
        trainer.create_optimizer()
        if has_fused_backward(trainer.optimizer):
            raise ValueError(
                f"{type(trainer.optimizer).__name__} updates the weights during the backward pass, and DeepSpeed's "
                "engine steps after it: set `optim` to another one."
            )
        keywords["optimizer"] = _adapt_to_offload(trainer.optimizer, config)
        settings["zero_allow_untested_optimizer"] = True
    elif "scheduler" not in settings:

        def create_schedule(optimizer: Any) -> Any:
            optimization.schedule = None
            trainer.create_scheduler(num_training_steps=max_steps, optimizer=optimizer)
            return trainer.lr_scheduler

        keywords["lr_scheduler"] = create_schedule
    parameters = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    engine, optimizer, schedule = _initialize(
        trainer.args, trainer.model, settings, model_parameters=parameters, **keywords
    )
    session.deepspeed = trainer.model_wrapped = engine
    optimization.optimizer = EngineOptimizer(optimizer, is_from_user and "optimizer" not in settings)
    if schedule is not None:
        optimization.schedule = EngineSchedule(schedule)
        optimization.is_default_schedule = True
    else:
        trainer.create_scheduler(num_training_steps=max_steps, optimizer=trainer.optimizer)
    session.model_is_prepared = True
    return trainer.optimizer, trainer.lr_scheduler


def create_evaluation_engine(trainer: TrainerContext) -> None:
    """Create an engine without optimizer in stage 3, unless the Trainer has an engine."""
    if trainer.deepspeed is not None:
        return
    session = trainer.session
    config = resolve_config(trainer.args, trainer.model, session.train_batch_size, 0)
    if not config.is_zero3():
        return
    start_deepspeed_communication(trainer.args)
    settings = {name: value for name, value in config.config.items() if name not in ("optimizer", "scheduler")}
    engine, _, _ = _initialize(trainer.args, trainer.model, settings)
    session.deepspeed = trainer.model_wrapped = engine
    session.model_is_prepared = True


def resolve_config(args: Any, model: Any, train_batch_size: int, max_steps: int) -> DeepSpeedConfig:
    """Return the configuration with values instead of `auto`.

    Raises:
        ValueError: the configuration contradicts the arguments, or nothing defines a value.
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


def _adapt_to_offload(optimizer: Any, config: DeepSpeedConfig) -> Any:
    """Return the optimizer, or DeepSpeed's CPU version if its states are offloaded to the host."""
    device = config.get_value("zero_optimization.offload_optimizer.device", "none")
    if device in (None, "none") or not config.get_value("zero_force_ds_cpu_optimizer", True):
        return optimizer
    settings = {name: value for name, value in optimizer.defaults.items() if name in ("lr", "weight_decay")}
    if isinstance(optimizer, torch.optim.Adagrad):
        return importlib.import_module("deepspeed.ops.adagrad").DeepSpeedCPUAdagrad(optimizer.param_groups, **settings)
    adam: Any = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
    return adam(optimizer.param_groups, adamw_mode=isinstance(optimizer, torch.optim.AdamW), **settings)


def cast_to_engine_dtype(args: Any, data: torch.Tensor) -> torch.Tensor:
    return data.to(args.hf_deepspeed_config.dtype()) if data.is_floating_point() or data.is_complex() else data


# ---- Checks ----------------------------------------------------------------------------------------------------------


def check_deepspeed(args: Any, lightning_keywords: dict[str, Any]) -> None:
    """Raise ValueError, with a remedy, for settings that DeepSpeed does not support."""
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
    for setting, is_used in refused.items():
        if is_used:
            raise ValueError(f"`deepspeed` does not go with {setting}.")


def _warn_of_ignored_arguments(args: Any) -> None:
    config: dict[str, Any] = args.hf_deepspeed_config.config
    # Argument -> whether it has no effect, and the reason.
    ignored = {
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
    for name, (is_ignored, reason) in ignored.items():
        if is_ignored and args.should_log:
            value = getattr(args, name)
            logger.warning("%s=%s has no effect under `deepspeed`: %s.", name, getattr(value, "value", value), reason)
