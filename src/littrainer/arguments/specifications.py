"""The specification of each argument: the part of a run that reads it, and the values that it may have."""

from __future__ import annotations

import math
import os
from enum import Enum
from multiprocessing.context import BaseContext
from typing import Any, NamedTuple

from littrainer.arguments.fields import ANNOUNCING_SIGNALS, COMPILE_MODES


class Place(str, Enum):
    """The part of a run that reads an argument."""

    KEYWORD = "Lightning keyword"
    STEP = "optimizer step"
    OPTIMIZER = "optimizer"
    SCHEDULE = "schedule"
    PLAN = "length of the run"
    LOADER = "data loader"
    COLUMNS = "data columns"
    SAMPLER = "sampler"
    MODEL = "model"
    PRECISION = "precision"
    SEED = "seeds"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    HUB = "Hub"
    FLOW = "flow callback"
    LOGS = "logs"
    CONSOLE = "console callback"
    TRACKER = "trackers"
    PROCESSES = "processes"
    SCRIPT = "the script"


class Range(NamedTuple):
    """The values that a number may have: from `low` to `high`, both included, and less than `below`."""

    low: float = -math.inf
    high: float = math.inf
    below: float = math.inf

    def holds(self, value: float) -> bool:
        """Return whether a number is finite and in the range."""
        return math.isfinite(value) and self.low <= value <= self.high and value < self.below

    def __str__(self) -> str:
        if self.low == -math.inf:
            return ""
        if self.below < math.inf:
            return f" from {self.low:g} to below {self.below:g}"
        return f" from {self.low:g} up" if self.high == math.inf else f" from {self.low:g} to {self.high:.10g}"


class ArgumentSpec(NamedTuple):
    """An argument's reader and values, in addition to its type.

    Parameters:
        place: the part of a run that reads it.
        range: the values of a number.
        also: further types and values, which the annotation leaves out for the sake of command-line parsers.
        texts: the names that it may have, one or several, if its field does not list them as choices.
        may_be_infinite: a number may be anything except nan.
    """

    place: Place
    range: Range = Range()
    also: tuple[Any, ...] = ()
    texts: tuple[str, ...] = ()
    may_be_infinite: bool = False


FROM_0 = Range(low=0)
FROM_1 = Range(low=1)
SHARE = Range(low=0, high=1)

# In the documented order.
SPECS: dict[str, ArgumentSpec] = {
    # Schedule
    "output_dir": ArgumentSpec(Place.CHECKPOINT, also=(os.PathLike, None)),
    "per_device_train_batch_size": ArgumentSpec(Place.LOADER, FROM_1),
    "num_train_epochs": ArgumentSpec(Place.PLAN, FROM_0),
    # Both -1 and 0 leave the length to num_train_epochs.
    "max_steps": ArgumentSpec(Place.FLOW, Range(low=-1)),
    "learning_rate": ArgumentSpec(Place.OPTIMIZER, FROM_0),
    "lr_scheduler_type": ArgumentSpec(Place.SCHEDULE),
    "lr_scheduler_kwargs": ArgumentSpec(Place.SCHEDULE),
    "warmup_steps": ArgumentSpec(Place.SCHEDULE, FROM_0),
    # Optimization
    "optim": ArgumentSpec(Place.OPTIMIZER),
    "optim_args": ArgumentSpec(Place.OPTIMIZER),
    "weight_decay": ArgumentSpec(Place.OPTIMIZER, FROM_0),
    "adam_beta1": ArgumentSpec(Place.OPTIMIZER, Range(low=0, below=1)),
    "adam_beta2": ArgumentSpec(Place.OPTIMIZER, Range(low=0, below=1)),
    "adam_epsilon": ArgumentSpec(Place.OPTIMIZER, FROM_0),
    "optim_target_modules": ArgumentSpec(Place.OPTIMIZER),
    "gradient_accumulation_steps": ArgumentSpec(Place.KEYWORD, FROM_1),
    "average_tokens_across_devices": ArgumentSpec(Place.STEP),
    # Scripts switch clipping off with 0, a negative number or infinity.
    "max_grad_norm": ArgumentSpec(Place.STEP, may_be_infinite=True),
    "label_smoothing_factor": ArgumentSpec(Place.STEP, SHARE),
    # Precision
    "bf16": ArgumentSpec(Place.KEYWORD),
    "fp16": ArgumentSpec(Place.KEYWORD),
    "bf16_full_eval": ArgumentSpec(Place.EVALUATION),
    "fp16_full_eval": ArgumentSpec(Place.EVALUATION),
    "tf32": ArgumentSpec(Place.PRECISION),
    "activation_checkpointing": ArgumentSpec(Place.MODEL),
    "activation_checkpointing_kwargs": ArgumentSpec(Place.MODEL),
    "gradient_checkpointing": ArgumentSpec(Place.MODEL),
    "gradient_checkpointing_kwargs": ArgumentSpec(Place.MODEL),
    "torch_compile": ArgumentSpec(Place.MODEL),
    "torch_compile_backend": ArgumentSpec(Place.MODEL),
    "torch_compile_mode": ArgumentSpec(Place.MODEL, texts=COMPILE_MODES),
    "use_liger_kernel": ArgumentSpec(Place.MODEL),
    "liger_kernel_config": ArgumentSpec(Place.MODEL),
    "use_cache": ArgumentSpec(Place.MODEL),
    "neftune_noise_alpha": ArgumentSpec(Place.MODEL, FROM_0),
    "torch_empty_cache_steps": ArgumentSpec(Place.STEP, FROM_1),
    "auto_find_batch_size": ArgumentSpec(Place.LOADER),
    # Logging
    "logging_strategy": ArgumentSpec(Place.FLOW),
    "logging_steps": ArgumentSpec(Place.FLOW, FROM_0),
    "logging_first_step": ArgumentSpec(Place.FLOW),
    "log_on_each_node": ArgumentSpec(Place.PROCESSES),
    "logging_nan_inf_filter": ArgumentSpec(Place.LOGS),
    "include_num_input_tokens_seen": ArgumentSpec(Place.LOGS, texts=("all", "non_padding", "no")),
    "log_level": ArgumentSpec(Place.LOGS),
    "log_level_replica": ArgumentSpec(Place.LOGS),
    "disable_tqdm": ArgumentSpec(Place.CONSOLE),
    "report_to": ArgumentSpec(Place.TRACKER),
    "run_name": ArgumentSpec(Place.TRACKER),
    "project": ArgumentSpec(Place.TRACKER),
    "trackio_space_id": ArgumentSpec(Place.TRACKER),
    "trackio_bucket_id": ArgumentSpec(Place.TRACKER),
    "trackio_static_space_id": ArgumentSpec(Place.TRACKER),
    # Evaluation
    "eval_strategy": ArgumentSpec(Place.FLOW),
    "eval_steps": ArgumentSpec(Place.FLOW, FROM_0),
    "eval_delay": ArgumentSpec(Place.FLOW, FROM_0),
    "per_device_eval_batch_size": ArgumentSpec(Place.LOADER, FROM_1),
    "prediction_loss_only": ArgumentSpec(Place.EVALUATION),
    "eval_on_start": ArgumentSpec(Place.EVALUATION),
    "eval_do_concat_batches": ArgumentSpec(Place.EVALUATION),
    "eval_use_gather_object": ArgumentSpec(Place.PROCESSES),
    "eval_accumulation_steps": ArgumentSpec(Place.EVALUATION, FROM_1),
    "include_for_metrics": ArgumentSpec(Place.EVALUATION, also=(str,), texts=("inputs", "loss")),
    "batch_eval_metrics": ArgumentSpec(Place.EVALUATION),
    # Saving
    "save_only_model": ArgumentSpec(Place.CHECKPOINT),
    "save_strategy": ArgumentSpec(Place.FLOW),
    # Scripts switch saving off with save_steps=-1.
    "save_steps": ArgumentSpec(Place.FLOW, Range(low=-1)),
    "save_on_each_node": ArgumentSpec(Place.PROCESSES),
    # Scripts switch the limit off with save_total_limit=-1.
    "save_total_limit": ArgumentSpec(Place.CHECKPOINT, Range(low=-1)),
    "enable_jit_checkpoint": ArgumentSpec(Place.CHECKPOINT),
    "push_to_hub": ArgumentSpec(Place.HUB),
    "hub_token": ArgumentSpec(Place.HUB),
    "hub_private_repo": ArgumentSpec(Place.HUB),
    "hub_model_id": ArgumentSpec(Place.HUB),
    "hub_strategy": ArgumentSpec(Place.HUB),
    "hub_always_push": ArgumentSpec(Place.HUB),
    "hub_revision": ArgumentSpec(Place.HUB),
    "load_best_model_at_end": ArgumentSpec(Place.CHECKPOINT),
    "metric_for_best_model": ArgumentSpec(Place.CHECKPOINT),
    "greater_is_better": ArgumentSpec(Place.CHECKPOINT),
    "ignore_data_skip": ArgumentSpec(Place.LOADER),
    "restore_callback_states_from_checkpoint": ArgumentSpec(Place.CHECKPOINT),
    # Environment
    "full_determinism": ArgumentSpec(Place.SEED),
    # NumPy and torch take these as seeds.
    "seed": ArgumentSpec(Place.SEED, Range(low=0, high=2**32 - 1)),
    "data_seed": ArgumentSpec(Place.SAMPLER, FROM_0),
    "use_cpu": ArgumentSpec(Place.KEYWORD),
    "accelerator_config": ArgumentSpec(Place.LOADER),
    "parallelism_config": ArgumentSpec(Place.PROCESSES),
    # Data
    "dataloader_drop_last": ArgumentSpec(Place.LOADER),
    "dataloader_num_workers": ArgumentSpec(Place.LOADER, FROM_0),
    "dataloader_pin_memory": ArgumentSpec(Place.LOADER),
    "dataloader_persistent_workers": ArgumentSpec(Place.LOADER),
    "dataloader_prefetch_factor": ArgumentSpec(Place.LOADER, FROM_1),
    "dataloader_multiprocessing_context": ArgumentSpec(Place.LOADER, also=(BaseContext,)),
    "dataloader_in_order": ArgumentSpec(Place.LOADER),
    "remove_unused_columns": ArgumentSpec(Place.COLUMNS),
    "label_names": ArgumentSpec(Place.COLUMNS),
    "train_sampling_strategy": ArgumentSpec(Place.SAMPLER),
    "length_column_name": ArgumentSpec(Place.SAMPLER),
    # Distributed
    "ddp_find_unused_parameters": ArgumentSpec(Place.PROCESSES),
    "ddp_bucket_cap_mb": ArgumentSpec(Place.PROCESSES, FROM_1),
    "ddp_broadcast_buffers": ArgumentSpec(Place.PROCESSES),
    "ddp_static_graph": ArgumentSpec(Place.PROCESSES),
    "ddp_backend": ArgumentSpec(Place.PROCESSES),
    # A timedelta holds no more.
    "ddp_timeout": ArgumentSpec(Place.PROCESSES, Range(low=1, high=86_400 * 10**9 - 1)),
    "fsdp": ArgumentSpec(Place.PROCESSES, also=(bool, list)),
    "fsdp_config": ArgumentSpec(Place.PROCESSES, also=(os.PathLike,)),
    "deepspeed": ArgumentSpec(Place.PROCESSES, also=(os.PathLike,)),
    # Script
    "debug": ArgumentSpec(Place.MODEL, also=(None,)),
    "skip_memory_metrics": ArgumentSpec(Place.LOGS),
    "do_train": ArgumentSpec(Place.SCRIPT),
    "do_eval": ArgumentSpec(Place.SCRIPT),
    "do_predict": ArgumentSpec(Place.SCRIPT),
    "resume_from_checkpoint": ArgumentSpec(Place.SCRIPT, also=(os.PathLike, bool)),
    "local_rank": ArgumentSpec(Place.SCRIPT, Range(low=-1)),
    # Additional
    "warmup_ratio": ArgumentSpec(Place.SCHEDULE, SHARE),
    "logging_dir": ArgumentSpec(Place.TRACKER, also=(os.PathLike,)),
    "lightning": ArgumentSpec(Place.KEYWORD),
    "async_save": ArgumentSpec(Place.CHECKPOINT),
    "jit_checkpoint_signals": ArgumentSpec(Place.CHECKPOINT, texts=ANNOUNCING_SIGNALS),
    "eval_loss_weighting": ArgumentSpec(Place.EVALUATION),
    "save_minutes": ArgumentSpec(Place.CHECKPOINT, FROM_0),
    "eval_minutes": ArgumentSpec(Place.EVALUATION, FROM_0),
    "max_minutes": ArgumentSpec(Place.FLOW, FROM_0),
    "hang_timeout": ArgumentSpec(Place.FLOW, FROM_1),
    "max_tokens_per_batch": ArgumentSpec(Place.LOADER, FROM_1),
    "pack_to_length": ArgumentSpec(Place.LOADER, Range(low=2)),
    "on_nonfinite": ArgumentSpec(Place.FLOW),
    "spike_factor": ArgumentSpec(Place.FLOW, FROM_1),
    "save_total_limit_best": ArgumentSpec(Place.CHECKPOINT, FROM_1),
    "keep_optimizer_states": ArgumentSpec(Place.CHECKPOINT, FROM_1),
    "loss_normalization": ArgumentSpec(Place.STEP),
    "global_batch_size": ArgumentSpec(Place.STEP, FROM_1),
    "log_speed": ArgumentSpec(Place.LOGS),
    "auto_micro_batch": ArgumentSpec(Place.STEP),
    "ema_decay": ArgumentSpec(Place.STEP, Range(low=0, below=1)),
    "ema_use": ArgumentSpec(Place.CHECKPOINT),
    # Generation
    "sortish_sampler": ArgumentSpec(Place.SAMPLER),
    "predict_with_generate": ArgumentSpec(Place.EVALUATION),
    "generation_max_length": ArgumentSpec(Place.EVALUATION, FROM_1),
    "generation_num_beams": ArgumentSpec(Place.EVALUATION, FROM_1),
    "generation_config": ArgumentSpec(Place.MODEL),
}
