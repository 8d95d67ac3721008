"""Readers of arguments, and the keywords of `lightning.Trainer` that are derived from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Part of a run -> the arguments that it reads.
ARGUMENTS_OF: dict[str, str] = {
    "Lightning keyword": "gradient_accumulation_steps bf16 fp16 use_cpu lightning",
    "optimizer step": (
        "average_tokens_across_devices max_grad_norm label_smoothing_factor torch_empty_cache_steps "
        "loss_normalization global_batch_size auto_micro_batch ema_decay chunked_loss"
    ),
    "optimizer": (
        "learning_rate optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon optim_target_modules"
    ),
    "schedule": "lr_scheduler_type lr_scheduler_kwargs warmup_steps warmup_ratio",
    "length of the run": "num_train_epochs",
    "data loader": (
        "per_device_train_batch_size auto_find_batch_size per_device_eval_batch_size ignore_data_skip "
        "accelerator_config dataloader_drop_last dataloader_num_workers dataloader_pin_memory "
        "dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context "
        "dataloader_in_order max_tokens_per_batch pack_to_length"
    ),
    "data columns": "remove_unused_columns signature_columns label_names",
    "sampler": "data_seed train_sampling_strategy length_column_name sortish_sampler",
    "model": (
        "activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing "
        "gradient_checkpointing_kwargs torch_compile torch_compile_backend torch_compile_mode use_liger_kernel "
        "liger_kernel_config use_cache neftune_noise_alpha debug generation_config"
    ),
    "precision": "tf32",
    "seeds": "full_determinism seed",
    "evaluation": (
        "bf16_full_eval fp16_full_eval prediction_loss_only eval_on_start eval_do_concat_batches "
        "eval_accumulation_steps include_for_metrics batch_eval_metrics eval_loss_weighting eval_minutes eval_at_end "
        "predict_with_generate generation_max_length generation_num_beams"
    ),
    "checkpoint": (
        "output_dir save_only_model save_total_limit enable_jit_checkpoint load_best_model_at_end "
        "metric_for_best_model greater_is_better restore_callback_states_from_checkpoint async_save "
        "jit_checkpoint_signals save_minutes save_total_limit_best keep_optimizer_states ema_use"
    ),
    "Hub": "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision",
    "flow callback": (
        "max_steps logging_strategy logging_steps logging_first_step eval_strategy eval_steps eval_delay "
        "save_strategy save_steps max_minutes hang_timeout on_nonfinite spike_factor"
    ),
    "logs": (
        "logging_nan_inf_filter include_num_input_tokens_seen log_level log_level_replica skip_memory_metrics "
        "log_speed log_loss_terms"
    ),
    "console callback": "disable_tqdm",
    "trackers": ("report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id logging_dir"),
    "processes": (
        "log_on_each_node eval_use_gather_object save_on_each_node parallelism_config ddp_find_unused_parameters "
        "ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout fsdp fsdp_config deepspeed"
    ),
    "the script": "do_train do_eval do_predict resume_from_checkpoint local_rank",
}
# Argument -> the part of a run that reads it.
READERS = {name: reader for reader, names in ARGUMENTS_OF.items() for name in names.split()}

# `mixed_precision` -> `precision` of Lightning.
LIGHTNING_PRECISIONS = {"bf16": "bf16-mixed", "fp16": "16-mixed"}
FULL_PRECISION = "32-true"


def get_lightning_precision(args: Any) -> str:
    """Return Lightning's `precision`; full for fp16 on a CPU, where torch cannot scale losses."""
    if args.mixed_precision == "fp16" and args.device.type == "cpu":
        return FULL_PRECISION
    return LIGHTNING_PRECISIONS.get(args.mixed_precision, FULL_PRECISION)


# Keyword -> value, and reason for `littrainer explain`.
DERIVED_KEYWORDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "accumulate_grad_batches": (lambda args: args.gradient_accumulation_steps, "from gradient_accumulation_steps"),
    "precision": (get_lightning_precision, "from bf16 and fp16"),
    "accelerator": (lambda args: "gpu" if args.device.type == "cuda" else args.device.type, "from use_cpu"),
}
