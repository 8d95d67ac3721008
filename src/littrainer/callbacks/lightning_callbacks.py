"""Lightning's callbacks that do not work in a Trainer, and checks of callbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from littrainer.arguments.choices import IntervalStrategy, SaveStrategy
from littrainer.callbacks.handler import instantiate_callback, pop_matching

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments


def _has_batch_norm(model: Any) -> bool:
    from torch.nn.modules.batchnorm import _BatchNorm

    return any(isinstance(module, _BatchNorm) for module in model.modules())


def find_backbone(model: Any) -> Any:
    """Return the model without its head, which `BackboneFinetuning` freezes; None if there is no such part."""
    candidates = (getattr(model, name, None) for name in ("backbone", "base_model"))
    return next((part for part in candidates if hasattr(part, "parameters") and part is not model), None)


class Refusal(NamedTuple):
    """Lightning callback that does not work in a Trainer.

    Parameters:
        name: its class; derived classes are refused too.
        instead: the remedy.
        applies: called with arguments and model, returns whether to refuse; None for always.
    """

    name: str
    reason: str
    instead: str
    applies: Callable[[Any, Any], bool] | None = None


# docs/callbacks.md describes all other callbacks.
REFUSED: tuple[Refusal, ...] = (
    Refusal(
        "BatchSizeFinder",
        "it trains on trial batches of another loader, while the Trainer builds and counts its batches itself",
        "call trainer.scale_batch_size() before training, or set auto_find_batch_size=True",
    ),
    Refusal(
        "LearningRateFinder",
        "it runs trial steps before training, on another loader and with another schedule",
        "call trainer.lr_find() before training, and set learning_rate to the suggestion()",
    ),
    Refusal(
        "BackboneFinetuning",
        "the model has neither a `backbone` nor a head on a base model",
        "derive from BaseFinetuning; the model is pl_module.model",
        lambda args, model: find_backbone(model) is None,
    ),
    Refusal(
        "GradientAccumulationScheduler",
        "the Trainer counts all optimizer steps before training, each with as many micro-batches",
        "set gradient_accumulation_steps, or train a TransformersModule in a lightning.Trainer",
    ),
    Refusal(
        "ModelPruning",
        "checkpoints written while it prunes hold masks besides weights, which from_pretrained does not load",
        'set save_strategy="no" and save the model after training',
        lambda args, model: args.save_strategy != SaveStrategy.NO,
    ),
    *(
        Refusal(
            name,
            "load_best_model_at_end=True loads the weights of a checkpoint instead of the averaged ones",
            "set load_best_model_at_end=False",
            lambda args, model: bool(args.load_best_model_at_end),
        )
        for name in ("StochasticWeightAveraging", "WeightAveraging")
    ),
    Refusal(
        "StochasticWeightAveraging",
        "for batch norm it needs an epoch more than the training has",
        "use EMAWeightAveraging, which averages the statistics of batch norm too",
        lambda args, model: _has_batch_norm(model),
    ),
)
# Callbacks that modify the model: never in a standalone evaluation.
ONLY_IN_TRAINING = ("BaseFinetuning", "ModelPruning", "StochasticWeightAveraging", "WeightAveraging")
PACKAGES = ("lightning", "pytorch_lightning")
LIBRARY_PACKAGES = ("littrainer", "transformers", *PACKAGES)


def get_lightning_class_names(callback: Any) -> Iterator[str]:
    """Yield a callback's Lightning base classes, nearest first."""
    kind = callback if isinstance(callback, type) else type(callback)
    for ancestor in kind.__mro__:
        if ancestor.__module__.partition(".")[0] in PACKAGES:
            yield ancestor.__name__


def is_lightning_class(callback: Any, *names: str) -> bool:
    return any(name in names for name in get_lightning_class_names(callback))


def has_progress_bar(callbacks: list[Any], args: TrainingArguments) -> bool:
    return not args.disable_tqdm and any(is_lightning_class(callback, "ProgressBar") for callback in callbacks)


def add_lightning_callback(present: list[Any], callback: Any) -> None:
    """Add a Lightning callback, from the next training on.

    Raises:
        ValueError: the callback does not work in a Trainer.
        TypeError: the class takes arguments.
    """
    reject_unsupported_callback(callback)
    present.append(instantiate_callback(callback))


def remove_lightning_callback(present: list[Any], callback: Any) -> None:
    """Remove a Lightning callback (raise a ValueError if absent), or the first callback of a class."""
    if pop_matching(present, callback) is None and not isinstance(callback, type):
        raise ValueError(f"This Trainer does not have the callback {callback!r}.")


def reject_unsupported_callback(callback: Any, *training: Any) -> None:
    """Raise a ValueError for a callback that does not work in a Trainer, or in this training (arguments, model)."""
    names = set(get_lightning_class_names(callback))
    for refusal in REFUSED:
        if refusal.name not in names:
            continue
        if refusal.applies is None:
            raise ValueError(
                f"Lightning's {refusal.name} cannot work in a Trainer: {refusal.reason}. Instead, {refusal.instead}."
            )
        if training and refusal.applies(*training):
            raise ValueError(
                f"Lightning's {refusal.name} does not work in this training: {refusal.reason}. To train with it, "
                f"{refusal.instead}."
            )


def check_callbacks(callbacks: list[Any], args: TrainingArguments, model: Any, others: Sequence[Any]) -> None:
    """Raise a ValueError if a Lightning callback does not work in a training.

    Parameters:
        others: the Trainer and its callbacks; instances of user classes may evaluate or log at any time.
    """
    evaluates = args.eval_strategy != IntervalStrategy.NO or args.eval_on_start or args.eval_at_end
    for callback in callbacks:
        reject_unsupported_callback(callback, args, model)
        monitored = getattr(callback, "monitor", None)
        if not isinstance(monitored, str):
            continue
        has_lambda = any(is_lightning_class(other, "LambdaCallback") for other in callbacks)
        is_val = monitored.startswith(("val_", "val/"))
        if is_val and not has_lambda and _are_from_libraries([*others, *callbacks]):
            raise ValueError(
                f"{type(callback).__name__}(monitor={monitored!r}) waits for a value that nothing logs: the names that "
                f"a Trainer's evaluations log begin with `eval_`. Set monitor={f'eval_{monitored[4:]}'!r}."
            )
        if monitored.startswith("eval_") and not evaluates and _are_from_libraries(others):
            raise ValueError(
                f"{type(callback).__name__}(monitor={monitored!r}) waits for an evaluation, and this training has "
                'none: set eval_strategy="steps" or "epoch".'
            )


def _are_from_libraries(objects: Sequence[Any]) -> bool:
    return {type(instance).__module__.partition(".")[0] for instance in objects}.issubset(LIBRARY_PACKAGES)


def check_average_begins(callbacks: list[Any], steps: int, epochs: int) -> None:
    """Raise a ValueError if weight averaging would not begin within a training of this length."""
    for callback in callbacks:
        if is_lightning_class(callback, "EMAWeightAveraging") and not (
            any(callback.should_update(step_idx=step) for step in range(steps))
            or any(callback.should_update(epoch_idx=epoch) for epoch in range(min(epochs, steps)))
        ):
            raise ValueError(
                f"{type(callback).__name__} never averages in this training of {steps} optimizer steps and {epochs} "
                f"epochs: lower update_starting_at_step={callback.update_starting_at_step} or "
                f"update_starting_at_epoch={callback.update_starting_at_epoch}."
            )


def check_can_resume(callbacks: list[Any]) -> None:
    """Raise a ValueError if a callback's state is not in checkpoints."""
    for callback in callbacks:
        if is_lightning_class(callback, "BaseFinetuning"):
            raise ValueError(
                f"A training with Lightning's {type(callback).__name__} cannot be resumed: which layers are trained is "
                "not in the checkpoint. Load the checkpoint's model and start a new training."
            )
