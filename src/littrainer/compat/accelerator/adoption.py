"""An Accelerator of accelerate's own, set as `trainer.accelerator`: its settings go over to the facade."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from littrainer.arguments.deepspeed import asks_for_deepspeed
from littrainer.arguments.sharding import sharding_plan
from littrainer.compat.accelerator.facade import AcceleratorFacade
from littrainer.distributed.layout import process_layout
from littrainer.errors.lazy_isinstance import is_a

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments

LOADER_SETTINGS = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking")
ACCUMULATION_SETTINGS = ("num_steps", "adjust_scheduler", "sync_with_dataloader", "sync_each_batch")
# Where accelerate keeps what would change a training and has no part in Lightning's.
WITHOUT_A_PLACE = {
    "deepspeed_plugin": "set deepspeed to its configuration",
    "fsdp_plugin": "set fsdp and fsdp_config",
    "megatron_lm_plugin": "pass a strategy as lightning={...}",
    "parallelism_config": "set parallelism_config",
    "autocast_handler": "override autocast_smart_context_manager",
    "scaler_handler": "pass lightning={'plugins': ...} with a precision plugin",
    "fp8_recipe_handler": "set bf16",
}
# Of these -> whether the arguments ask for the same, so that nothing is lost.
ALSO_IN_ARGUMENTS: dict[str, Callable[[Any], bool]] = {
    "deepspeed_plugin": asks_for_deepspeed,
    "fsdp_plugin": lambda args: sharding_plan(args) is not None,
    "parallelism_config": lambda args: process_layout(args).is_given,
}


def adopted(given: Any, args: TrainingArguments, engaged: Any) -> Any:
    """What takes the place of an accelerator that a script has set: a facade with its settings.

    Parameters:
        given: what was set; anything but accelerate's Accelerator stays as it is.
        args: the training arguments.
        engaged: the facade whose place it takes, which knows what fit is carrying out; None at construction.

    Raises:
        NotImplementedError: it is set up in a way that Lightning has no part in.
        ValueError: it computes in another precision than the arguments ask for.
    """
    if is_a(given, "accelerator"):
        _refuse_what_would_be_lost(given, args)
        given = _facade_like(given, args)
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
        for name, instead in WITHOUT_A_PLACE.items()
        if not (name in ALSO_IN_ARGUMENTS and ALSO_IN_ARGUMENTS[name](args))
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


def _facade_like(given: Any, args: TrainingArguments) -> AcceleratorFacade:
    facade = AcceleratorFacade(args)
    for name in LOADER_SETTINGS:
        setattr(facade.dataloader_config, name, getattr(given.dataloader_config, name))
    accumulation = given.gradient_state.plugin_kwargs
    facade.gradient_state.plugin_kwargs = {
        name: accumulation[name] for name in ACCUMULATION_SETTINGS if name in accumulation
    }
    facade.step_scheduler_with_optimizer = given.step_scheduler_with_optimizer
    facade.rng_types = given.rng_types
    return facade
