"""What a Trainer refuses that DeepSpeed carries out, before anything is computed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from littrainer.arguments.choices import SchedulerType
from littrainer.processes.layout import tensor_parallel_size

if TYPE_CHECKING:
    from littrainer.arguments.deepspeed import DeepSpeedConfig
    from littrainer.trainer import Trainer

logger = logging.getLogger(__name__)


def check_deepspeed(trainer: Trainer) -> None:
    """Refuse what DeepSpeed cannot do together.

    Raises:
        ValueError: names the two things of which one has to go.
    """
    args: Any = trainer.args
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
        "a strategy given as lightning={'strategy': ...}: set one of the two": (
            "strategy" in {**(args.lightning or {}), **trainer.lightning_keywords}
        ),
    }
    for what, is_asked_for in refused.items():
        if is_asked_for:
            raise ValueError(f"`deepspeed` does not go with {what}.")


def warn_of_what_has_no_effect(trainer: Trainer) -> None:
    """Say, in the process that logs, which arguments the configuration leaves without effect."""
    args: Any = trainer.args
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
