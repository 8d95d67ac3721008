"""What `trainer.accelerator` is: the names that Trainer subclasses call, without accelerate."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from littrainer.arguments.accelerator_config import AcceleratorConfig
from littrainer.arguments.deepspeed import asks_for_deepspeed
from littrainer.arguments.sharding import sharding_plan
from littrainer.compat.accelerator.preparing import Preparing
from littrainer.compat.accelerator.processes import ProcessMembers
from littrainer.compat.accelerator.states import HeldBy, parallelism_config_of, shared_accelerator_state
from littrainer.compat.accelerator.stepping import Stepping
from littrainer.distributed import collectives
from littrainer.distributed.layout import process_layout, tensor_parallel_size
from littrainer.errors.lazy_isinstance import is_a
from littrainer.errors.nested_values import truncated
from littrainer.strategies.shards import is_sharded, whole_state_dict

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments


logger = logging.getLogger(__name__)

# Members that accelerate's PartialState has too; it is loaded when one of them is asked for.
OF_PARTIAL_STATE = ("on_last_process", "on_process", "on_local_process", "split_between_processes")
# Member of accelerate's Accelerator -> why it is not offered, and what to do instead.
REFUSED: dict[str, str] = {
    "save": "call torch.save() or safetensors where trainer.args.should_save is set",
    "save_model": "call trainer.save_model()",
    "save_state": "checkpoints are the Trainer's; set save_strategy, or call trainer.save_model() and save_state()",
    "load_state": "checkpoints are the Trainer's; call trainer.train(resume_from_checkpoint=...)",
    "get_tracker": "a Trainer's accelerator has no trackers; report_to adds callbacks to trainer.callback_handler",
    "profile": 'profile with Trainer(lightning={"profiler": ...}), or with torch.profiler.profile() itself',
    "ddp_handler": "Lightning's strategy sets DistributedDataParallel up; see ddp_find_unused_parameters",
}
# Method that has no effect here, nor in transformers' Trainer -> what is logged once.
WITHOUT_EFFECT: dict[str, str] = {
    "init_trackers": "The accelerator of a Trainer has no trackers to set up; choose them with report_to=[...].",
    "log": "accelerator.log() reaches no tracker of a Trainer; call trainer.log() instead.",
    "register_for_checkpointing": "A Trainer's checkpoints do not hold objects registered with the accelerator, here "
    "or in transformers: save them in an on_save callback, or in a callback with a state() (ExportableState).",
}


class AcceleratorFacade(ProcessMembers, Stepping, Preparing):
    """What subclasses of a Trainer use as an accelerator; docs/api/compatibility.md lists what it answers.

    Parameters:
        args: the training arguments, which know device and ranks.
    """

    split_batches = HeldBy("dataloader_config")
    dispatch_batches = HeldBy("dataloader_config")
    even_batches = HeldBy("dataloader_config")
    use_seedable_sampler = HeldBy("dataloader_config")
    non_blocking = HeldBy("dataloader_config")

    def __init__(self, args: TrainingArguments):
        ProcessMembers.__init__(self, args)
        # A copy, as in accelerate: libraries write it, and the arguments stay as they are.
        config = AcceleratorConfig.from_argument(args.accelerator_config)
        self.dataloader_config: Any = SimpleNamespace(**vars(config), data_seed=args.data_seed)
        Stepping.__init__(self)
        # Samples in the current batch if it is an evaluation's last and not a full one; set by the evaluation.
        self.samples_in_last_batch: int | None = None
        self.evaluated_loader: Any = None
        # Libraries make accelerate's state again, in callbacks for instance, and expect it to be set up.
        shared_accelerator_state(args)

    def take_over_from(self, other: AcceleratorFacade) -> None:
        """Take the place of another facade, during a training too."""
        self.module, self._scaler = other.module, other._scaler
        self.samples_in_last_batch = other.samples_in_last_batch

    @property
    def deepspeed_plugin(self) -> Any:
        """DeepSpeed's configuration, if it carries the training out; else None."""
        return self._args.deepspeed_plugin

    @property
    def is_fsdp2(self) -> bool:
        """Whether the model is sharded by version 2 of FSDP."""
        plan = sharding_plan(self._args)
        return plan is not None and plan.version == 2 and self._args.world_size > 1

    @property
    def parallelism_config(self) -> Any:
        """The argument `parallelism_config` as accelerate's ParallelismConfig; None for nothing."""
        return parallelism_config_of(self._args)

    @property
    def state(self) -> Any:
        """accelerate's AcceleratorState, which is loaded when it is first read.

        Raises:
            ImportError: accelerate is not installed.
        """
        found = shared_accelerator_state(self._args, load=True)
        if found is None:
            raise ImportError("trainer.accelerator.state is accelerate's AcceleratorState: pip install accelerate.")
        return found

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The model's state dict, under the names of the user's model.

        Parameters:
            unwrap: take wrappers off before.

        Returns:
            whole tensors; of a sharded model, for which all processes have to call this, in the first process alone.
        """
        consolidated = getattr(model, "_zero3_consolidated_16bit_state_dict", None)
        plugin = self._args.deepspeed_plugin
        if consolidated is not None and plugin is not None and plugin.zero_stage == 3:
            return consolidated()
        if unwrap:
            model = self.unwrap_model(model, keep_torch_compile=False)
        return whole_state_dict(model) if is_sharded(model) else model.state_dict()

    def end_training(self) -> None:
        """Leave the process group, if there is one."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    @contextmanager
    def evaluating(self, loader: Any) -> Iterator[None]:
        """Read the loader of an evaluation while the block runs."""
        outer, self.evaluated_loader = self.evaluated_loader, loader
        try:
            yield
        finally:
            self.evaluated_loader = outer

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As `gather`, without samples that only fill the last batch.

        Parameters:
            use_gather_object: gather Python objects; anything that holds more than tensors is gathered so too.
        """
        rows = self._rows_that_count()
        if rows is None and collectives.process_count() == 1:
            return input_data
        copies = self._processes_with_the_same_samples
        if not use_gather_object and collectives.holds_only_tensors(input_data):
            data = collectives.gathered(input_data, copies)
        else:
            data = collectives.gathered_objects(input_data, copies)
            if rows is not None and isinstance(data, list):
                return data[:rows]
        return data if rows is None else truncated(data, rows)

    def gather_each_sample(self, tensor: Any) -> Any:
        """As `gather`, with one copy of a sample that several processes have predicted together."""
        return collectives.gathered(tensor, self._processes_with_the_same_samples)

    @property
    def _processes_with_the_same_samples(self) -> int:
        return tensor_parallel_size(self._args)

    def _rows_that_count(self) -> int | None:
        if self.evaluated_loader is not None or self.samples_in_last_batch is not None:
            return self.samples_in_last_batch
        # In training all micro-batches of the last window count as many rows as its last one has, as in transformers.
        state = self.gradient_state
        return state.remainder if state.end_of_dataloader and state.remainder > 0 else None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in OF_PARTIAL_STATE:
            state = self._args.distributed_state
            if state is None:
                raise ImportError(f"trainer.accelerator.{name} is accelerate's: pip install accelerate.")
            return getattr(state, name)
        if name in WITHOUT_EFFECT:
            return lambda *args, **kwargs: _log_once(WITHOUT_EFFECT[name])
        if name in REFUSED:
            raise AttributeError(f"trainer.accelerator does not offer {name}: {REFUSED[name]}.")
        raise AttributeError(
            f"trainer.accelerator has no {name!r}: littrainer trains on Lightning, and answers what Trainers ask of "
            "accelerate's Accelerator. Ask trainer.lightning_trainer (its strategy), or torch, instead."
        )


_log_once = functools.cache(logger.warning)


# ---- An Accelerator of accelerate's ----------------------------------------------------------------------------------


# Attribute of what would change a training and Lightning does not take -> what to do instead, and whether the arguments
# ask for the same, so that nothing is lost.
WITHOUT_A_PLACE: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "deepspeed_plugin": ("set deepspeed to its configuration", asks_for_deepspeed),
    "fsdp_plugin": ("set fsdp and fsdp_config", lambda args: sharding_plan(args) is not None),
    "parallelism_config": ("set parallelism_config", lambda args: process_layout(args).is_given),
    "megatron_lm_plugin": ("pass a strategy as lightning={...}", lambda args: False),
    "autocast_handler": ("override autocast_smart_context_manager", lambda args: False),
    "scaler_handler": ("pass lightning={'plugins': ...} with a precision plugin", lambda args: False),
    "fp8_recipe_handler": ("set bf16", lambda args: False),
}


def adopted(given: Any, args: TrainingArguments, engaged: Any) -> Any:
    """Return what a script has set as `accelerator`; for accelerate's Accelerator, a facade with its settings.

    Parameters:
        engaged: the facade that it replaces, which knows what fit is carrying out; None at construction.

    Raises:
        NotImplementedError: it has a part that Lightning does not take.
        ValueError: it computes in another precision than the arguments ask for.
    """
    if is_a(given, "accelerator"):
        _refuse_what_would_be_lost(given, args)
        facade = AcceleratorFacade(args)
        facade.dataloader_config = given.dataloader_config
        facade.gradient_state.plugin_kwargs = dict(given.gradient_state.plugin_kwargs)
        facade.step_scheduler_with_optimizer = given.step_scheduler_with_optimizer
        given = facade
    if isinstance(given, AcceleratorFacade) and isinstance(engaged, AcceleratorFacade):
        given.take_over_from(engaged)
    return given


def _refuse_what_would_be_lost(given: Any, args: TrainingArguments) -> None:
    where = "trainer.accelerator, as create_accelerator_and_postprocess or a script has set it"
    if type(given).__module__.partition(".")[0] != "accelerate":
        raise NotImplementedError(
            f"{where}, is a {type(given).__name__}, a subclass of accelerate's Accelerator: littrainer trains on "
            "Lightning and would call none of its methods. Override the methods of the Trainer that call them."
        )
    lost = [
        f"{name} ({instead})"
        for name, (instead, is_in_arguments) in WITHOUT_A_PLACE.items()
        if not is_in_arguments(args)
        if getattr(given.state, name, None) is not None or getattr(given, name, None) is not None
    ]
    if lost:
        raise NotImplementedError(f"{where}, has what littrainer's Lightning does not take: {', '.join(lost)}.")
    if given.mixed_precision != args.mixed_precision:
        raise ValueError(
            f"{where}, has mixed_precision={given.mixed_precision!r}, and the arguments ask for "
            f"{args.mixed_precision!r}. Pass mixed_precision=self.args.mixed_precision to Accelerator, or set bf16 or "
            "fp16 to what it computes in."
        )
