"""What a `lightning.Trainer` decides, from training arguments, and back to them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import DDPStrategy

from littrainer.arguments.choices import IntervalStrategy, SaveStrategy
from littrainer.arguments.destinations import lightning_precision
from littrainer.arguments.training_arguments import Seq2SeqTrainingArguments
from littrainer.plain_lightning.intervals import DueSteps, SavesAsTrainer, ValidatesAtSteps, ValidatesOutsideFitOnly
from littrainer.plain_lightning.module_arguments import ModuleArguments, names_of_arguments
from littrainer.plain_lightning.unheeded import ABOUT_DATA

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from littrainer.arguments.training_arguments import TrainingArguments

# The Trainer's names of evaluation metrics begin with the first, those of a TransformersModule with the second.
EVALUATED, VALIDATED = "eval_", "val_"
# Lightning's precision -> bf16 and fp16. Others cast the model, which a Trainer leaves to its user.
PRECISIONS: dict[str, tuple[bool, bool]] = {
    "32-true": (False, False),
    "bf16-mixed": (True, False),
    "16-mixed": (False, True),
}

# Keyword of lightning.Trainer -> its value for training arguments and the optimizer steps of the whole training, which
# are looked up only where they are needed.
KEYWORDS: dict[str, Callable[[TrainingArguments, Callable[[], int]], Any]] = {
    "accelerator": lambda args, steps: "gpu" if args.device.type == "cuda" else args.device.type,
    "devices": lambda args, steps: args.visible_device_count,
    "num_nodes": lambda args, steps: args.world_size // args.local_world_size,
    "strategy": lambda args, steps: (
        "auto" if args.world_size == 1 else DDPStrategy(parallel_devices=[args.device] * args.local_world_size)
    ),
    "precision": lambda args, steps: lightning_precision(args),
    "max_epochs": lambda args, steps: -1 if _ends_by_steps(args) else int(args.num_train_epochs),
    "max_steps": lambda args, steps: steps() if _ends_by_steps(args) else -1,
    "accumulate_grad_batches": lambda args, steps: args.gradient_accumulation_steps,
    "gradient_clip_val": lambda args, steps: args.max_grad_norm or None,
    "log_every_n_steps": lambda args, steps: resolved(args.logging_steps, steps),
    # Where an epoch's last window is short, `ValidatesAtSteps` knows better.
    "val_check_interval": lambda args, steps: (
        args.gradient_accumulation_steps * resolved(args.eval_steps, steps) if _evaluates_by_steps(args) else 1.0
    ),
    "check_val_every_n_epoch": lambda args, steps: None if _evaluates_by_steps(args) else 1,
    "enable_checkpointing": lambda args, steps: saves(args),
    "enable_progress_bar": lambda args, steps: not args.disable_tqdm,
    "enable_model_summary": lambda args, steps: False,
    "num_sanity_val_steps": lambda args, steps: 0,
    "use_distributed_sampler": lambda args, steps: False,
    "default_root_dir": lambda args, steps: args.output_dir,
}


def lightning_keywords(args: TrainingArguments, total_steps: Callable[[], int]) -> dict[str, Any]:
    """The keywords of a `lightning.Trainer` that trains as training arguments say, but for callbacks and loggers.

    Parameters:
        total_steps: finds the optimizer steps of the whole training.
    """
    return {name: find(args, total_steps) for name, find in KEYWORDS.items()}


def _ends_by_steps(args: TrainingArguments) -> bool:
    return args.max_steps > 0 or args.num_train_epochs != int(args.num_train_epochs)


def _evaluates_by_steps(args: TrainingArguments) -> bool:
    return args.eval_strategy == IntervalStrategy.STEPS


def saves(args: TrainingArguments) -> bool:
    """Whether the arguments ask for checkpoints."""
    return args.save_strategy != SaveStrategy.NO and (args.save_strategy != SaveStrategy.STEPS or args.save_steps > 0)


def resolved(interval: float | None, total_steps: Callable[[], int]) -> int:
    """Optimizer steps of an interval; one below 1 is a share of all steps."""
    if interval is None:
        return 1
    return math.ceil(interval * total_steps()) if 0 < interval < 1 else max(int(interval), 1)


def validation_callback(args: TrainingArguments, total_steps: Callable[[], int]) -> pl.Callback | None:
    """What lets `fit` validate when the arguments say so; None where Lightning does by itself, at ends of epochs."""
    if args.eval_strategy == IntervalStrategy.NO:
        return ValidatesOutsideFitOnly()
    if _evaluates_by_steps(args):
        return ValidatesAtSteps(DueSteps(resolved(args.eval_steps, total_steps), args.eval_delay))
    return None


def checkpoint_callback(
    args: TrainingArguments, total_steps: Callable[[], int], validation: pl.Callback | None
) -> SavesAsTrainer:
    """What saves when and as many as the arguments say.

    Parameters:
        validation: what `validation_callback` has returned; None too where somebody else decides when to validate.
    """
    by_steps = args.save_strategy == SaveStrategy.STEPS
    return SavesAsTrainer(
        DueSteps(resolved(args.save_steps, total_steps)) if by_steps else None,
        validation if isinstance(validation, ValidatesAtSteps) else None,
        only_best=args.save_strategy == SaveStrategy.BEST,
        **_checkpoint_settings(args),
    )


def _checkpoint_settings(args: TrainingArguments) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "dirpath": args.output_dir,
        "save_top_k": -1,
        "save_weights_only": args.save_only_model,
    }
    keeps_all = args.save_total_limit is None or args.save_total_limit <= 0
    if args.load_best_model_at_end or args.save_strategy == SaveStrategy.BEST:
        watched = (args.metric_for_best_model or "loss").removeprefix(EVALUATED)
        settings.update(monitor=f"{VALIDATED}{watched}", mode="max" if args.greater_is_better else "min")
        # The best ones alone would not have the one to resume from.
        settings["save_last"] = not keeps_all and args.save_strategy != SaveStrategy.BEST
    elif not keeps_all:
        settings.update(monitor="step", mode="max")
    if not keeps_all:
        settings["save_top_k"] = args.save_total_limit
    return settings


def arguments_under(
    args: TrainingArguments, data_arguments: TrainingArguments | None, lightning_trainer: pl.Trainer | None
) -> TrainingArguments:
    """Training arguments that train as a module did in its `lightning.Trainer`.

    Parameters:
        args: the module's.
        data_arguments: those of the data module, where it has some.
        lightning_trainer: what decided the length of the training, its accumulation, precision and clipping.

    Raises:
        ValueError: a Trainer has no such precision, does not clip by value, or would not know when to end.
    """
    found = copy.copy(args)
    if isinstance(found, ModuleArguments):
        # The processes are those that there are; checkpoints name the class that other tools know.
        found.__class__ = Seq2SeqTrainingArguments  # type: ignore[assignment]
    if data_arguments is not None:
        # Earlier names of some are among them.
        for name in ABOUT_DATA.intersection(names_of_arguments()) & vars(data_arguments).keys():
            setattr(found, name, getattr(data_arguments, name))
    if lightning_trainer is None:
        return found
    precision = lightning_trainer.precision
    if precision not in PRECISIONS:
        raise ValueError(
            f"lightning.Trainer(precision={precision!r}) is no precision of a Trainer, which has "
            f"{', '.join(map(repr, PRECISIONS))}. Cast the model, and give args=TrainingArguments(...) beside it."
        )
    found.bf16, found.fp16 = PRECISIONS[precision]
    found.mixed_precision = found._chosen_precision()
    if lightning_trainer.gradient_clip_val is not None:
        if lightning_trainer.gradient_clip_algorithm == "value":
            raise ValueError(
                "lightning.Trainer(gradient_clip_algorithm='value') clips single gradients, and a Trainer their norm. "
                "Give args=TrainingArguments(max_grad_norm=...) with what is to be taken in its place."
            )
        found.max_grad_norm = float(lightning_trainer.gradient_clip_val)
    found.gradient_accumulation_steps = lightning_trainer.accumulate_grad_batches
    found.max_steps = lightning_trainer.max_steps
    epochs = lightning_trainer.max_epochs
    if epochs is not None and epochs >= 0:
        found.num_train_epochs = float(epochs)
    elif found.max_steps < 0:
        raise ValueError(
            "The lightning.Trainer has neither max_epochs nor max_steps, as with max_time alone, and a Trainer ends by "
            "one of them. Give args=TrainingArguments(...) with num_train_epochs or max_steps."
        )
    return found
