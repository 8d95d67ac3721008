"""Class of `trainer.accelerator`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from littrainer.arguments.accelerator_config import AcceleratorConfig
from littrainer.arguments.deepspeed import has_deepspeed
from littrainer.arguments.process import distributed_type
from littrainer.arguments.sharding import get_sharding_plan
from littrainer.compat.accelerator.prepared import PreparedOptimizer, PreparedScheduler
from littrainer.compat.accelerator.states import (
    DelegatedAttribute,
    GradientView,
    build_parallelism_config,
    shared_accelerator_state,
)
from littrainer.data.loaders import PrefetchLoader, prepare_loader
from littrainer.distributed import collectives
from littrainer.distributed.layout import get_process_layout, model_parallel_size
from littrainer.loop.out_of_memory import free_memory
from littrainer.model.facts import WRAPPERS
from littrainer.model.traversal import has_method, move_model
from littrainer.optim.stepping import clip_gradient_norm
from littrainer.runtime.lazy_isinstance import is_a
from littrainer.runtime.nested_values import truncate_nested
from littrainer.strategies.full_state import get_full_state_dict, is_sharded
from littrainer.strategies.model_wrapping import (
    autocast_forward,
    get_autocast_dtype,
    get_compile_keywords,
    is_compiled,
    restore_forward,
)

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments


logger = logging.getLogger(__name__)

# Defaults of accelerate's GradientAccumulationPlugin.
ACCUMULATION_DEFAULTS = {"adjust_scheduler": True, "sync_with_dataloader": True, "sync_each_batch": False}
# Read from accelerate's PartialState.
PARTIAL_STATE_MEMBERS = frozenset(
    (
        *("is_last_process", "use_distributed", "main_process_first", "local_main_process_first"),
        *("on_main_process", "on_local_main_process", "on_last_process", "on_process", "on_local_process"),
        "split_between_processes",
    )
)
# Method without effect -> warning.
WITHOUT_EFFECT: dict[str, str] = {
    "init_trackers": "The accelerator of a Trainer has no trackers to set up; choose them with report_to=[...].",
    "log": "accelerator.log() reaches no tracker of a Trainer; call trainer.log() instead.",
    "register_for_checkpointing": "A Trainer's checkpoints do not hold objects registered with the accelerator, here "
    "or in transformers: save them in an on_save callback, or in a callback with a state() (ExportableState).",
}


class AcceleratorFacade:
    """Substitute for accelerate's Accelerator; docs/api/compatibility.md lists its members."""

    split_batches = DelegatedAttribute("dataloader_config")
    dispatch_batches = DelegatedAttribute("dataloader_config")
    even_batches = DelegatedAttribute("dataloader_config")
    use_seedable_sampler = DelegatedAttribute("dataloader_config")
    non_blocking = DelegatedAttribute("dataloader_config")
    step_scheduler_with_optimizer = True
    # True in the last micro-batch of an optimizer step.
    sync_gradients = DelegatedAttribute("gradient_state")
    # LightningModule of the training; None outside training.
    module = property(attrgetter("_running.module"), lambda self, module: setattr(self._running, "module", module))
    evaluated_loader = DelegatedAttribute("_running")

    def __init__(self, args: TrainingArguments):
        self._args = args
        config: Any = AcceleratorConfig.from_argument(args.accelerator_config)
        # A copy, since libraries write to it.
        self.dataloader_config: Any = SimpleNamespace(**vars(config), data_seed=args.data_seed)
        self._running = SimpleNamespace(module=None, evaluated_loader=None)
        self.step = 0
        self._optimizers: list[PreparedOptimizer] = []
        self._scaler: torch.amp.GradScaler | None = None
        # Set by evaluations.
        self.samples_in_last_batch: int | None = None
        kwargs = getattr(args.accelerator_config, "gradient_accumulation_kwargs", None) or {}
        # `num_steps` is 1, since the Trainer accumulates.
        settings = {name: value for name, value in kwargs.items() if ACCUMULATION_DEFAULTS.get(name) is not value}
        self.gradient_state = GradientView(self._running, {**settings, "num_steps": 1})
        # Libraries expect accelerate's state.
        shared_accelerator_state(args)

    # ---- Processes ---------------------------------------------------------------------------------------------------

    device = DelegatedAttribute("_args")
    process_index = DelegatedAttribute("_args")
    local_process_index = DelegatedAttribute("_args")
    num_processes = property(lambda self: self._args.world_size)
    is_main_process = property(lambda self: self.process_index == 0)
    is_local_main_process = property(lambda self: self.local_process_index == 0)
    # accelerate's member if accelerate is loaded.
    distributed_type = property(lambda self: distributed_type(self._args))

    def wait_for_everyone(self) -> None:
        if self._args.world_size > 1:
            self._args._barrier("wait_for_everyone")()

    def print(self, *values: Any, **kwargs: Any) -> None:
        if self.is_local_main_process:
            print(*values, **kwargs)

    def end_training(self) -> None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    # ---- Collectives -------------------------------------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        return collectives.gather_across_processes(tensor)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        return collectives.pad_across_processes(tensor, dim, pad_index, pad_first)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce by `sum`, `mean` or `max`; `scale` is for TPUs."""
        return collectives.reduce_across_processes(tensor, reduction)

    @contextmanager
    def evaluating(self, loader: Any) -> Iterator[None]:
        outer = self.evaluated_loader
        self.evaluated_loader = loader
        try:
            yield
        finally:
            self.evaluated_loader = outer

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather without the samples that pad the last batch."""
        rows = self._count_rows()
        if rows is None and collectives.get_world_size() == 1:
            return input_data
        copies = model_parallel_size(self._args)
        if not use_gather_object and collectives.has_only_tensors(input_data):
            data = collectives.gather_across_processes(input_data, copies)
        else:
            data = collectives.gather_objects_across_processes(input_data, copies)
            if rows is not None and type(data) is list:
                return data[:rows]
        return data if rows is None else truncate_nested(data, rows)

    def gather_each_sample(self, tensor: Any) -> Any:
        """Gather each sample once if several processes predict it together."""
        return collectives.gather_across_processes(tensor, model_parallel_size(self._args))

    def _count_rows(self) -> int | None:
        if self.evaluated_loader is not None or self.samples_in_last_batch is not None:
            return self.samples_in_last_batch
        # As in transformers, for all micro-batches of the last window.
        state = self.gradient_state
        return state.remainder if state.end_of_dataloader and state.remainder > 0 else None

    # ---- Steps -------------------------------------------------------------------------------------------------------

    @property
    def gradient_accumulation_steps(self) -> int:
        """Return the divisor of `backward`, 1 unless a script sets it."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        self.gradient_state.plugin_kwargs["num_steps"] = value

    mixed_precision = DelegatedAttribute("_args")

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        # A training sets its scaler before the first step.
        if self._scaler is None and self.module is None and get_autocast_dtype(self._args) is torch.float16:
            self._scaler = _create_scaler(self._args)
        return self._scaler

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Return whether fp16 gradients of the last step were non-finite."""
        plugin = None if self.module is None else self.module.trainer.precision_plugin
        if getattr(plugin, "step_was_skipped", False):
            return True
        return bool(self._optimizers) and any(optimizer.step_was_skipped for optimizer in self._optimizers)

    def autocast(self, autocast_handler: Any = None) -> AbstractContextManager[Any]:
        """Return the autocast context of the model's forward; AutocastKwargs may disable it."""
        dtype = get_autocast_dtype(self._args)
        if dtype is None:
            return nullcontext()
        settings = {} if autocast_handler is None else autocast_handler.to_kwargs()
        return torch.autocast(self._args.device.type, dtype=dtype, **settings)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute gradients, in a training through Lightning."""
        kwargs.pop("learning_rate", None)
        if self.gradient_accumulation_steps != 1:
            loss = loss / self.gradient_accumulation_steps
        if self.module is not None and not self.module.automatic_optimization:
            self.module.manual_backward(loss, **kwargs)
        else:
            (loss if self.scaler is None else self.scaler.scale(loss)).backward(**kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale the fp16 gradients, by default of all optimizers."""
        if self.scaler is None:
            return
        main = None if self.module is None else self.module.trainer.optimizers[0]
        if optimizer is None:
            optimizer = [*([] if main is None else [main]), *self._optimizers]
        for scaled in optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]:
            if isinstance(scaled, PreparedOptimizer):
                scaled.unscale(scaled.optimizer)
            elif scaled is main:
                self.module.trainer.precision_plugin.unscale(scaled)
            else:
                self.scaler.unscale_(scaled)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Clip gradients and return their norm; DeepSpeed has clipped them already."""
        strategy: Any = None if self.module is None else self.module.trainer.strategy
        engine = getattr(strategy, "deepspeed_engine", None)
        if engine is not None:
            return engine.get_global_grad_norm()
        self.unscale_gradients()
        tensors: list[Any] = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        # The wrapper of FSDP version 1 reduces the norm over the processes.
        for wrapper in () if strategy is None else (strategy.model, self.module.owner.model_wrapped):
            clips = wrapper is not self.module and has_method(wrapper, "clip_grad_norm_")
            if clips and {*map(id, wrapper.parameters())} == {*map(id, tensors)}:
                return wrapper.clip_grad_norm_(max_norm, norm_type)
        return clip_gradient_norm(tensors, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        self.unscale_gradients()
        nn.utils.clip_grad_value_(parameters, clip_value)

    def no_sync(self, model: Any) -> AbstractContextManager[Any]:
        # Imports Lightning, which a Trainer needs only to train.
        from littrainer.strategies.single_device import disable_gradient_sync

        plugin = self._args.deepspeed_plugin
        # From stage 2 DeepSpeed shards gradients during backward.
        return nullcontext() if plugin is not None and plugin.zero_stage >= 2 else disable_gradient_sync(model)

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Run a micro-batch of a script's accumulation."""
        state = self.gradient_state
        if state.sync_with_dataloader and state.end_of_dataloader:
            self.step = 0
            state.sync_gradients = True
        else:
            self.step += 1
            state.sync_gradients = self.step % state.num_steps == 0
        with ExitStack() as stack:
            if not (state.sync_gradients or state.plugin_kwargs.get("sync_each_batch", False)):
                for model in models:
                    stack.enter_context(self.no_sync(model))
            yield

    # ---- Preparing ---------------------------------------------------------------------------------------------------

    def prepare(self, *objects: Any, device_placement: Any = None) -> Any:
        """Prepare loaders, models, optimizers and schedules in any order."""
        methods = (
            (DataLoader, self.prepare_data_loader),
            (nn.Module, self.prepare_model),
            (torch.optim.Optimizer, self.prepare_optimizer),
        )
        prepared = list(objects)
        for position, item in enumerate(objects):
            method: Any = next((method for kind, method in methods if isinstance(item, kind)), None)
            if method is not None:
                prepared[position] = method(item, device_placement=device_placement)
        # Schedules need the prepared optimizers.
        prepared = [self.prepare_scheduler(item) if isinstance(item, LRScheduler) else item for item in prepared]
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        args = self._args
        trains = any(parameter.requires_grad for parameter in model.parameters())
        if has_deepspeed(args) and trains and not evaluation_mode:
            _refuse_second_engine(model)
        if getattr(model, "_is_accelerate_prepared", False):
            return model
        dtype = get_autocast_dtype(args)
        if dtype is not None:
            autocast_forward(model, args.device.type, dtype)
        if device_placement is not False:
            move_model(model, args.device)
        prepared: Any = model
        if collectives.get_world_size() > 1 and trains and not evaluation_mode:
            prepared = DistributedDataParallel(model, device_ids=None if args.device.type == "cpu" else [args.device])
        keywords = get_compile_keywords(args)
        if keywords is not None and not is_compiled(prepared):
            prepared = torch.compile(prepared, **keywords)
        prepared._is_accelerate_prepared = True
        return prepared

    def prepare_data_loader(self, data_loader: DataLoader, device_placement: bool | None = None) -> DataLoader:
        settings = self.dataloader_config
        prepared: Any = prepare_loader(self._args, data_loader, settings)
        if isinstance(prepared, PrefetchLoader):
            prepared.gradient_state = self.gradient_state
            if device_placement is not False:
                prepared.set_destination(self._args.device, settings)
        return prepared

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> PreparedOptimizer:
        """Return an optimizer that steps with the Trainer's optimizer steps."""
        prepared = optimizer if isinstance(optimizer, PreparedOptimizer) else PreparedOptimizer(optimizer, self)
        if not any(prepared is optimizer for optimizer in self._optimizers):
            self._optimizers.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Return a schedule that steps with its prepared optimizer."""
        if not isinstance(scheduler, PreparedScheduler):
            driven = getattr(scheduler, "optimizer", None)
            matches = [prepared for prepared in self._optimizers if driven in (prepared, prepared.optimizer)]
            scheduler = PreparedScheduler(scheduler, matches or list(self._optimizers), self)
        return scheduler

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the user's model, by default with `torch.compile`'s wrapper."""
        if is_compiled(model):
            inner: Any = self.unwrap_model(model._orig_mod, keep_fp32_wrapper, keep_torch_compile)  # type: ignore[arg-type]
            if not keep_torch_compile:
                return inner
            model._orig_mod = inner
            return model
        inner = getattr(model, "module", None)
        if isinstance(inner, nn.Module) and type(model).__module__.partition(".")[0] in WRAPPERS:
            return self.unwrap_model(inner, keep_fp32_wrapper, keep_torch_compile)
        if not keep_fp32_wrapper:
            restore_forward(model)
        return model

    def free_memory(self, *objects: Any) -> list[None]:
        """Release prepared optimizers and the device's cache; return a None for each object."""
        self._optimizers.clear()
        free_memory()
        return [None] * len(objects)

    clear = free_memory

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the state dict; of a sharded model, only in the main process."""
        consolidated = getattr(model, "_zero3_consolidated_16bit_state_dict", None)
        plugin = self._args.deepspeed_plugin
        if consolidated is not None and plugin is not None and plugin.zero_stage == 3:
            return consolidated()
        if unwrap:
            model = self.unwrap_model(model, keep_torch_compile=False)
        return get_full_state_dict(model) if is_sharded(model) else model.state_dict()

    # ---- State and settings ------------------------------------------------------------------------------------------

    deepspeed_plugin = DelegatedAttribute("_args")
    parallelism_config = property(lambda self: build_parallelism_config(self._args))

    @property
    def is_fsdp2(self) -> bool:
        plan = get_sharding_plan(self._args)
        return plan is not None and plan.version == 2 and self.num_processes > 1

    @property
    def state(self) -> Any:
        state = shared_accelerator_state(self._args, load=True)
        if state is None:
            raise ImportError("trainer.accelerator.state is accelerate's AcceleratorState: pip install accelerate.")
        return state

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in PARTIAL_STATE_MEMBERS:
            state = self._args.distributed_state
            if state is None:
                raise ImportError(f"trainer.accelerator.{name} is accelerate's: pip install accelerate.")
            return getattr(state, name)
        if name in WITHOUT_EFFECT:
            return lambda *args, **kwargs: _log_once(WITHOUT_EFFECT[name])
        raise AttributeError(
            f"trainer.accelerator has no {name!r}: littrainer trains on Lightning, and has what Trainers use of "
            "accelerate's Accelerator. Use the Trainer's own method (save_model, train(resume_from_checkpoint=...)), "
            "an argument (report_to, lightning={...}), trainer.lightning_trainer or torch instead."
        )


_log_once = functools.cache(logger.warning)


def _create_scaler(args: TrainingArguments) -> torch.amp.GradScaler:
    plan = get_sharding_plan(args)
    if plan is None or plan.version > 1:
        return torch.amp.GradScaler(args.device.type)
    # Gradients of FSDP version 1 are shards, so all ranks decide together whether to step.
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    return ShardedGradScaler(args.device.type)


def _refuse_second_engine(model: nn.Module) -> None:
    if type(model).__module__.partition(".")[0] != "deepspeed":
        raise NotImplementedError(
            f"accelerator.prepare({type(model).__name__}): DeepSpeed's engine holds the Trainer's model, and another "
            "one that is trained needs another engine: make it by deepspeed.initialize(model=..., "
            "config=accelerator.state.deepspeed_plugin.deepspeed_config). Prepare one that is not trained by "
            "accelerator.prepare_model(model, evaluation_mode=True)."
        )


# ---- An Accelerator of accelerate's ----------------------------------------------------------------------------------


# Ignored attribute -> alternative, and whether the arguments already have it.
UNSUPPORTED_SETTINGS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "deepspeed_plugin": ("set deepspeed to its configuration", has_deepspeed),
    "fsdp_plugin": ("set fsdp and fsdp_config", lambda args: get_sharding_plan(args) is not None),
    "parallelism_config": ("set parallelism_config", lambda args: get_process_layout(args).is_given),
    "megatron_lm_plugin": ("pass a strategy as lightning={...}", lambda args: False),
    "autocast_handler": ("override autocast_smart_context_manager", lambda args: False),
    "scaler_handler": ("pass lightning={'plugins': ...} with a precision plugin", lambda args: False),
    "fp8_recipe_handler": ("set bf16", lambda args: False),
}


def wrap_accelerator(new: Any, args: TrainingArguments, current: Any) -> Any:
    """Return the facade for an accelerator that a script has set.

    Raises:
        NotImplementedError: settings would be ignored.
        ValueError: its precision differs from that of the arguments.
    """
    if is_a(new, "accelerator"):
        _check_settings(new, args)
        facade = AcceleratorFacade(args)
        facade.dataloader_config = new.dataloader_config
        facade.gradient_state.plugin_kwargs = dict(new.gradient_state.plugin_kwargs)
        facade.step_scheduler_with_optimizer = new.step_scheduler_with_optimizer
        new = facade
    if isinstance(new, AcceleratorFacade) and isinstance(current, AcceleratorFacade):
        new.module = current.module
        new._scaler = current._scaler
        new.samples_in_last_batch = current.samples_in_last_batch
    return new


def _check_settings(accelerator: Any, args: TrainingArguments) -> None:
    origin = "trainer.accelerator, as create_accelerator_and_postprocess or a script has set it"
    if type(accelerator).__module__.partition(".")[0] != "accelerate":
        raise NotImplementedError(
            f"{origin}, is a {type(accelerator).__name__}, a subclass of accelerate's Accelerator: littrainer trains "
            "on Lightning and would call none of its methods. Override the methods of the Trainer that call them."
        )
    unsupported = [
        f"{name} ({alternative})"
        for name, (alternative, is_in_arguments) in UNSUPPORTED_SETTINGS.items()
        if not is_in_arguments(args)
        if getattr(accelerator.state, name, None) is not None or getattr(accelerator, name, None) is not None
    ]
    if unsupported:
        raise NotImplementedError(f"{origin}, has what littrainer's Lightning does not take: {', '.join(unsupported)}.")
    if accelerator.mixed_precision == "no" != args.mixed_precision and not has_deepspeed(args):
        _log_once(
            f"{origin}, computes in float32, and so does the training: {args.mixed_precision} of the arguments has no "
            "effect. Pass mixed_precision=self.args.mixed_precision to Accelerator for it."
        )
        args.mixed_precision = "no"
    if accelerator.mixed_precision != args.mixed_precision:
        raise ValueError(
            f"{origin}, has mixed_precision={accelerator.mixed_precision!r}, and the arguments ask for "
            f"{args.mixed_precision!r}. Pass mixed_precision=self.args.mixed_precision to Accelerator, or set bf16 or "
            "fp16 to what it computes in."
        )
