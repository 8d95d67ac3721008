"""Reader and valid values of each argument."""

from __future__ import annotations

import math
import os
from enum import Enum
from multiprocessing.context import BaseContext
from typing import Any, NamedTuple

from littrainer.arguments.fields import ANNOUNCING_SIGNALS, COMPILE_MODES


class ArgumentReader(str, Enum):
    """Part of a run that reads an argument."""

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
    """Range from `low` to `high`, both included, and less than `below`."""

    low: float = -math.inf
    high: float = math.inf
    below: float = math.inf

    def holds(self, value: float) -> bool:
        return math.isfinite(value) and self.low <= value <= self.high and value < self.below

    def __str__(self) -> str:
        if self.low == -math.inf:
            return ""
        if self.below < math.inf:
            return f" from {self.low:g} to below {self.below:g}"
        return f" from {self.low:g} up" if self.high == math.inf else f" from {self.low:g} to {self.high:.10g}"


class ArgumentSpec(NamedTuple):
    """Reader and valid values of an argument.

    Parameters:
        also: types and values that the annotation omits because command-line parsers read it.
        texts: valid names, unless the field lists them as choices.
        may_be_infinite: accept any number except nan.
    """

    reader: ArgumentReader
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
    "output_dir": ArgumentSpec(ArgumentReader.CHECKPOINT, also=(os.PathLike, None)),
    "per_device_train_batch_size": ArgumentSpec(ArgumentReader.LOADER, FROM_1),
    "num_train_epochs": ArgumentSpec(ArgumentReader.PLAN, FROM_0),
    # -1 and 0: num_train_epochs decides.
    "max_steps": ArgumentSpec(ArgumentReader.FLOW, Range(low=-1)),
    "learning_rate": ArgumentSpec(ArgumentReader.OPTIMIZER, FROM_0),
    "lr_scheduler_type": ArgumentSpec(ArgumentReader.SCHEDULE),
    "lr_scheduler_kwargs": ArgumentSpec(ArgumentReader.SCHEDULE),
    "warmup_steps": ArgumentSpec(ArgumentReader.SCHEDULE, FROM_0),
    # Optimization
    "optim": ArgumentSpec(ArgumentReader.OPTIMIZER),
    "optim_args": ArgumentSpec(ArgumentReader.OPTIMIZER),
    "weight_decay": ArgumentSpec(ArgumentReader.OPTIMIZER, FROM_0),
    "adam_beta1": ArgumentSpec(ArgumentReader.OPTIMIZER, Range(low=0, below=1)),
    "adam_beta2": ArgumentSpec(ArgumentReader.OPTIMIZER, Range(low=0, below=1)),
    "adam_epsilon": ArgumentSpec(ArgumentReader.OPTIMIZER, FROM_0),
    "optim_target_modules": ArgumentSpec(ArgumentReader.OPTIMIZER),
    "gradient_accumulation_steps": ArgumentSpec(ArgumentReader.KEYWORD, FROM_1),
    "average_tokens_across_devices": ArgumentSpec(ArgumentReader.STEP),
    # 0, negative numbers and infinity disable clipping.
    "max_grad_norm": ArgumentSpec(ArgumentReader.STEP, may_be_infinite=True),
    "label_smoothing_factor": ArgumentSpec(ArgumentReader.STEP, SHARE),
    # Precision
    "bf16": ArgumentSpec(ArgumentReader.KEYWORD),
    "fp16": ArgumentSpec(ArgumentReader.KEYWORD),
    "bf16_full_eval": ArgumentSpec(ArgumentReader.EVALUATION),
    "fp16_full_eval": ArgumentSpec(ArgumentReader.EVALUATION),
    "tf32": ArgumentSpec(ArgumentReader.PRECISION),
    "activation_checkpointing": ArgumentSpec(ArgumentReader.MODEL),
    "activation_checkpointing_kwargs": ArgumentSpec(ArgumentReader.MODEL),
    "gradient_checkpointing": ArgumentSpec(ArgumentReader.MODEL),
    "gradient_checkpointing_kwargs": ArgumentSpec(ArgumentReader.MODEL),
    "torch_compile": ArgumentSpec(ArgumentReader.MODEL),
    "torch_compile_backend": ArgumentSpec(ArgumentReader.MODEL),
    "torch_compile_mode": ArgumentSpec(ArgumentReader.MODEL, texts=COMPILE_MODES),
    "use_liger_kernel": ArgumentSpec(ArgumentReader.MODEL),
    "liger_kernel_config": ArgumentSpec(ArgumentReader.MODEL),
    "use_cache": ArgumentSpec(ArgumentReader.MODEL),
    "neftune_noise_alpha": ArgumentSpec(ArgumentReader.MODEL, FROM_0),
    "torch_empty_cache_steps": ArgumentSpec(ArgumentReader.STEP, FROM_1),
    "auto_find_batch_size": ArgumentSpec(ArgumentReader.LOADER),
    # Logging
    "logging_strategy": ArgumentSpec(ArgumentReader.FLOW),
    "logging_steps": ArgumentSpec(ArgumentReader.FLOW, FROM_0),
    "logging_first_step": ArgumentSpec(ArgumentReader.FLOW),
    "log_on_each_node": ArgumentSpec(ArgumentReader.PROCESSES),
    "logging_nan_inf_filter": ArgumentSpec(ArgumentReader.LOGS),
    "include_num_input_tokens_seen": ArgumentSpec(ArgumentReader.LOGS, texts=("all", "non_padding", "no")),
    "log_level": ArgumentSpec(ArgumentReader.LOGS),
    "log_level_replica": ArgumentSpec(ArgumentReader.LOGS),
    "disable_tqdm": ArgumentSpec(ArgumentReader.CONSOLE),
    "report_to": ArgumentSpec(ArgumentReader.TRACKER),
    "run_name": ArgumentSpec(ArgumentReader.TRACKER),
    "project": ArgumentSpec(ArgumentReader.TRACKER),
    "trackio_space_id": ArgumentSpec(ArgumentReader.TRACKER),
    "trackio_bucket_id": ArgumentSpec(ArgumentReader.TRACKER),
    "trackio_static_space_id": ArgumentSpec(ArgumentReader.TRACKER),
    # Evaluation
    "eval_strategy": ArgumentSpec(ArgumentReader.FLOW),
    "eval_steps": ArgumentSpec(ArgumentReader.FLOW, FROM_0),
    "eval_delay": ArgumentSpec(ArgumentReader.FLOW, FROM_0),
    "per_device_eval_batch_size": ArgumentSpec(ArgumentReader.LOADER, FROM_1),
    "prediction_loss_only": ArgumentSpec(ArgumentReader.EVALUATION),
    "eval_on_start": ArgumentSpec(ArgumentReader.EVALUATION),
    "eval_do_concat_batches": ArgumentSpec(ArgumentReader.EVALUATION),
    "eval_use_gather_object": ArgumentSpec(ArgumentReader.PROCESSES),
    "eval_accumulation_steps": ArgumentSpec(ArgumentReader.EVALUATION, FROM_1),
    "include_for_metrics": ArgumentSpec(ArgumentReader.EVALUATION, also=(str,), texts=("inputs", "loss")),
    "batch_eval_metrics": ArgumentSpec(ArgumentReader.EVALUATION),
    # Saving
    "save_only_model": ArgumentSpec(ArgumentReader.CHECKPOINT),
    "save_strategy": ArgumentSpec(ArgumentReader.FLOW),
    # -1 disables saving.
    "save_steps": ArgumentSpec(ArgumentReader.FLOW, Range(low=-1)),
    "save_on_each_node": ArgumentSpec(ArgumentReader.PROCESSES),
    # -1 disables the limit.
    "save_total_limit": ArgumentSpec(ArgumentReader.CHECKPOINT, Range(low=-1)),
    "enable_jit_checkpoint": ArgumentSpec(ArgumentReader.CHECKPOINT),
    "push_to_hub": ArgumentSpec(ArgumentReader.HUB),
    "hub_token": ArgumentSpec(ArgumentReader.HUB),
    "hub_private_repo": ArgumentSpec(ArgumentReader.HUB),
    "hub_model_id": ArgumentSpec(ArgumentReader.HUB),
    "hub_strategy": ArgumentSpec(ArgumentReader.HUB),
    "hub_always_push": ArgumentSpec(ArgumentReader.HUB),
    "hub_revision": ArgumentSpec(ArgumentReader.HUB),
    "load_best_model_at_end": ArgumentSpec(ArgumentReader.CHECKPOINT),
    "metric_for_best_model": ArgumentSpec(ArgumentReader.CHECKPOINT),
    "greater_is_better": ArgumentSpec(ArgumentReader.CHECKPOINT),
    "ignore_data_skip": ArgumentSpec(ArgumentReader.LOADER),
    "restore_callback_states_from_checkpoint": ArgumentSpec(ArgumentReader.CHECKPOINT),
    # Environment
    "full_determinism": ArgumentSpec(ArgumentReader.SEED),
    # Seeds of NumPy.
    "seed": ArgumentSpec(ArgumentReader.SEED, Range(low=0, high=2**32 - 1)),
    "data_seed": ArgumentSpec(ArgumentReader.SAMPLER, FROM_0),
    "use_cpu": ArgumentSpec(ArgumentReader.KEYWORD),
    "accelerator_config": ArgumentSpec(ArgumentReader.LOADER),
    "parallelism_config": ArgumentSpec(ArgumentReader.PROCESSES),
    # Data
    "dataloader_drop_last": ArgumentSpec(ArgumentReader.LOADER),
    "dataloader_num_workers": ArgumentSpec(ArgumentReader.LOADER, FROM_0),
    "dataloader_pin_memory": ArgumentSpec(ArgumentReader.LOADER),
    "dataloader_persistent_workers": ArgumentSpec(ArgumentReader.LOADER),
    "dataloader_prefetch_factor": ArgumentSpec(ArgumentReader.LOADER, FROM_1),
    "dataloader_multiprocessing_context": ArgumentSpec(ArgumentReader.LOADER, also=(BaseContext,)),
    "dataloader_in_order": ArgumentSpec(ArgumentReader.LOADER),
    "remove_unused_columns": ArgumentSpec(ArgumentReader.COLUMNS),
    "label_names": ArgumentSpec(ArgumentReader.COLUMNS),
    "train_sampling_strategy": ArgumentSpec(ArgumentReader.SAMPLER),
    "length_column_name": ArgumentSpec(ArgumentReader.SAMPLER),
    # Distributed
    "ddp_find_unused_parameters": ArgumentSpec(ArgumentReader.PROCESSES),
    "ddp_bucket_cap_mb": ArgumentSpec(ArgumentReader.PROCESSES, FROM_1),
    "ddp_broadcast_buffers": ArgumentSpec(ArgumentReader.PROCESSES),
    "ddp_static_graph": ArgumentSpec(ArgumentReader.PROCESSES),
    "ddp_backend": ArgumentSpec(ArgumentReader.PROCESSES),
    # Maximum of a timedelta.
    "ddp_timeout": ArgumentSpec(ArgumentReader.PROCESSES, Range(low=1, high=86_400 * 10**9 - 1)),
    "fsdp": ArgumentSpec(ArgumentReader.PROCESSES, also=(bool, list)),
    "fsdp_config": ArgumentSpec(ArgumentReader.PROCESSES, also=(os.PathLike,)),
    "deepspeed": ArgumentSpec(ArgumentReader.PROCESSES, also=(os.PathLike,)),
    # Script
    "debug": ArgumentSpec(ArgumentReader.MODEL, also=(None,)),
    "skip_memory_metrics": ArgumentSpec(ArgumentReader.LOGS),
    "do_train": ArgumentSpec(ArgumentReader.SCRIPT),
    "do_eval": ArgumentSpec(ArgumentReader.SCRIPT),
    "do_predict": ArgumentSpec(ArgumentReader.SCRIPT),
    "resume_from_checkpoint": ArgumentSpec(ArgumentReader.SCRIPT, also=(os.PathLike, bool)),
    "local_rank": ArgumentSpec(ArgumentReader.SCRIPT, Range(low=-1)),
    # Additional
    "warmup_ratio": ArgumentSpec(ArgumentReader.SCHEDULE, SHARE),
    "logging_dir": ArgumentSpec(ArgumentReader.TRACKER, also=(os.PathLike,)),
    "lightning": ArgumentSpec(ArgumentReader.KEYWORD),
    "async_save": ArgumentSpec(ArgumentReader.CHECKPOINT),
    "jit_checkpoint_signals": ArgumentSpec(ArgumentReader.CHECKPOINT, texts=ANNOUNCING_SIGNALS),
    "eval_loss_weighting": ArgumentSpec(ArgumentReader.EVALUATION),
    "save_minutes": ArgumentSpec(ArgumentReader.CHECKPOINT, FROM_0),
    "eval_minutes": ArgumentSpec(ArgumentReader.EVALUATION, FROM_0),
    "max_minutes": ArgumentSpec(ArgumentReader.FLOW, FROM_0),
    "hang_timeout": ArgumentSpec(ArgumentReader.FLOW, FROM_1),
    "max_tokens_per_batch": ArgumentSpec(ArgumentReader.LOADER, FROM_1),
    "pack_to_length": ArgumentSpec(ArgumentReader.LOADER, Range(low=2)),
    "on_nonfinite": ArgumentSpec(ArgumentReader.FLOW),
    "spike_factor": ArgumentSpec(ArgumentReader.FLOW, FROM_1),
    "save_total_limit_best": ArgumentSpec(ArgumentReader.CHECKPOINT, FROM_1),
    "keep_optimizer_states": ArgumentSpec(ArgumentReader.CHECKPOINT, FROM_1),
    "loss_normalization": ArgumentSpec(ArgumentReader.STEP),
    "global_batch_size": ArgumentSpec(ArgumentReader.STEP, FROM_1),
    "log_speed": ArgumentSpec(ArgumentReader.LOGS),
    "auto_micro_batch": ArgumentSpec(ArgumentReader.STEP),
    "ema_decay": ArgumentSpec(ArgumentReader.STEP, Range(low=0, below=1)),
    "ema_use": ArgumentSpec(ArgumentReader.CHECKPOINT),
    # Generation
    "sortish_sampler": ArgumentSpec(ArgumentReader.SAMPLER),
    "predict_with_generate": ArgumentSpec(ArgumentReader.EVALUATION),
    "generation_max_length": ArgumentSpec(ArgumentReader.EVALUATION, FROM_1),
    "generation_num_beams": ArgumentSpec(ArgumentReader.EVALUATION, FROM_1),
    "generation_config": ArgumentSpec(ArgumentReader.MODEL),
}
