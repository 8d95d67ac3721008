"""Rules between arguments: combinations that cannot mean anything are refused before a run starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from littrainer.arguments.accelerator_config import configured_device
from littrainer.arguments.choices import IntervalStrategy, SaveStrategy, SchedulerType
from littrainer.arguments.fields import ArgumentFields
from littrainer.arguments.fields_additional import EVAL_LOSS_WEIGHTINGS
from littrainer.arguments.fields_data import SAMPLING_STRATEGIES, WORKER_START_METHODS
from littrainer.arguments.fields_logging import LOG_LEVELS
from littrainer.arguments.fields_precision import COMPILE_MODES
from littrainer.arguments.nearest import suggestion

# Plain strings with a fixed set of values. A context object may stand in place of a start method's name.
STRING_CHOICES: dict[str, Sequence[str]] = {
    "log_level": LOG_LEVELS,
    "log_level_replica": LOG_LEVELS,
    "train_sampling_strategy": SAMPLING_STRATEGIES,
    "dataloader_multiprocessing_context": WORKER_START_METHODS,
    "torch_compile_mode": COMPILE_MODES,
    "eval_loss_weighting": EVAL_LOSS_WEIGHTINGS,
}

# Interval in steps -> the strategy under which it is read.
STEP_INTERVALS = {
    "logging_steps": "logging_strategy",
    "eval_steps": "eval_strategy",
    "save_steps": "save_strategy",
}

# Shares of all steps are compared in millionths, where floating point rounding no longer matters.
MILLIONTHS = 1_000_000


def validate(args: ArgumentFields) -> None:
    """Refuse values and combinations that cannot be carried out; expects normalized arguments.

    Raises:
        ValueError: names the arguments and what to change.
    """
    _check_string_choices(args)
    _check_step_intervals(args)
    if getattr(args, "decides_the_run", True):
        _check_best_model(args)
        _check_evaluations_for_schedule(args)
    _check_precision(args)
    _check_schedule(args)
    _check_memory(args)
    _check_loading(args)
    _check_sampling(args)


def _check_string_choices(args: ArgumentFields) -> None:
    for name, valid in STRING_CHOICES.items():
        value = getattr(args, name)
        if isinstance(value, str) and value not in valid:
            raise ValueError(
                f"{name}={value!r} is not valid ({suggestion(value, valid)}); choose one of {', '.join(valid)}."
            )


def _check_step_intervals(args: ArgumentFields) -> None:
    if args.logging_strategy == IntervalStrategy.STEPS and args.logging_steps == 0:
        raise ValueError('logging_strategy="steps" needs logging_steps other than 0; give one, or use "epoch" or "no".')
    for name, strategy in STEP_INTERVALS.items():
        steps: Any = getattr(args, name)
        if getattr(args, strategy) != IntervalStrategy.STEPS or steps <= 1:
            continue
        if steps != int(steps):
            raise ValueError(
                f"{name}={steps} is not a whole number; from 1 up it counts steps, only below 1 is it a share of them."
            )
        setattr(args, name, int(steps))


def _check_best_model(args: ArgumentFields) -> None:
    if not args.load_best_model_at_end or args.save_strategy == SaveStrategy.BEST:
        return
    if args.eval_strategy != args.save_strategy:
        raise ValueError(
            "load_best_model_at_end needs a checkpoint for each evaluation, but "
            f"eval_strategy={_text(args.eval_strategy)!r} and save_strategy={_text(args.save_strategy)!r}; "
            'set both to the same value, or save_strategy="best".'
        )
    if args.eval_strategy == IntervalStrategy.STEPS and not _is_multiple(args.save_steps, args.eval_steps or 0):
        raise ValueError(
            "load_best_model_at_end needs an evaluation at each checkpoint, but "
            f"save_steps={args.save_steps} is not a multiple of eval_steps={args.eval_steps}."
        )


def _is_multiple(save_steps: float, eval_steps: float) -> bool:
    if save_steps % eval_steps == 0:
        return True
    both_are_shares = save_steps < 1 and eval_steps < 1
    return both_are_shares and (save_steps * MILLIONTHS) % (eval_steps * MILLIONTHS) == 0


def _check_precision(args: ArgumentFields) -> None:
    for first, second in (("fp16", "bf16"), ("fp16_full_eval", "bf16_full_eval")):
        if getattr(args, first) and getattr(args, second):
            raise ValueError(f"{first} and {second} are both set; choose one of them.")


def _check_schedule(args: ArgumentFields) -> None:
    if args.warmup_steps < 0:
        raise ValueError(f"warmup_steps={args.warmup_steps} is negative; give a number of steps or a share below 1.")


def _check_evaluations_for_schedule(args: ArgumentFields) -> None:
    needs_a_metric = args.lr_scheduler_type in (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)
    if needs_a_metric and args.eval_strategy == IntervalStrategy.NO:
        raise ValueError(
            f"lr_scheduler_type={_text(args.lr_scheduler_type)!r} follows an evaluation metric; "
            'set eval_strategy to "steps" or "epoch".'
        )


def _check_memory(args: ArgumentFields) -> None:
    checkpointing: Any = args.activation_checkpointing_kwargs
    every = (checkpointing or {}).get("every_n_layers", 1)
    if not isinstance(every, int) or every < 1:
        raise ValueError(
            f"activation_checkpointing_kwargs={{'every_n_layers': {every!r}}} must be a whole number above 0."
        )
    steps = args.torch_empty_cache_steps
    if steps is not None and not (isinstance(steps, int) and steps > 0):
        raise ValueError(f"torch_empty_cache_steps={steps!r} must be a whole number above 0, or unset.")


def _check_loading(args: ArgumentFields) -> None:
    _check_loader_processes(args, "dataloader_prefetch_factor")
    if getattr(args.accelerator_config, "use_configured_state", False):
        configured_device()


def _check_sampling(args: ArgumentFields) -> None:
    strategy = args.train_sampling_strategy
    if getattr(args, "sortish_sampler", False) and strategy not in ("random", "group_by_length"):
        raise ValueError(
            f"sortish_sampler groups training samples by length and train_sampling_strategy={strategy!r} does not; "
            "set one of them."
        )


def check_loader_processes(args: ArgumentFields) -> None:
    """Refuse what torch refuses where the training process loads the data itself.

    transformers lets a script set the number of processes after it made the arguments, so this is for whoever is about
    to make loaders.

    Raises:
        ValueError: names the argument and what to change.
    """
    _check_loader_processes(args, "dataloader_persistent_workers", "dataloader_multiprocessing_context")


def _check_loader_processes(args: ArgumentFields, *names: str) -> None:
    for name in names:
        value = getattr(args, name)
        if value is not None and value is not False and args.dataloader_num_workers == 0:
            raise ValueError(
                f"{name}={value!r} needs loader processes; set dataloader_num_workers above 0 or leave {name} unset."
            )


def _text(choice: Any) -> str:
    return getattr(choice, "value", choice)
