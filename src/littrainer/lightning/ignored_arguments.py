"""Which training arguments a module acts on, and what a lightning.Trainer is given in the place of the others."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from lightning.pytorch.utilities.rank_zero import WarningCache, rank_zero_warn

from littrainer.lightning.arguments import changed_arguments

ACTED_ON = frozenset(
    (
        *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio"),
        *("optim", "optim_args", "optim_target_modules", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
        *("average_tokens_across_devices", "label_smoothing_factor", "label_names"),
        *("activation_checkpointing", "activation_checkpointing_kwargs"),
        *("gradient_checkpointing", "gradient_checkpointing_kwargs"),
        *("use_liger_kernel", "liger_kernel_config", "use_cache", "neftune_noise_alpha"),
        *("logging_nan_inf_filter", "prediction_loss_only", "eval_do_concat_batches", "eval_accumulation_steps"),
        *("include_for_metrics", "metric_for_best_model", "eval_loss_weighting"),
        *("predict_with_generate", "generation_max_length", "generation_num_beams", "generation_config"),
    )
)
# Acted on by `TrainerDataModule`.
ABOUT_DATA = frozenset(
    (
        *("per_device_train_batch_size", "per_device_eval_batch_size", "accelerator_config", "seed", "data_seed"),
        *("dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
        *("dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order"),
        *("remove_unused_columns", "train_sampling_strategy", "length_column_name", "sortish_sampler"),
        *("group_by_length", "ignore_data_skip"),
    )
)
# Read by scripts, or about files that a Trainer writes.
OF_SCRIPTS = frozenset(("output_dir", "do_train", "do_eval", "do_predict", "resume_from_checkpoint", "local_rank"))

NOTED = WarningCache()  # What this process has been told of once.

CHECKPOINTS = "callbacks=[ModelCheckpoint(...)]"
LOGGERS = "logger=..."
STRATEGY = 'strategy="ddp", or an object such as DDPStrategy(...)'
# By itself it computes each layer in all devices of a machine together.
SHARDING = "strategy=ModelParallelStrategy(data_parallel_size=N, tensor_parallel_size=1)"
HUB = "export_pretrained(), and huggingface_hub"


class Instead(NamedTuple):
    """What is given in the place of an argument.

    Parameters:
        name: the keyword of lightning.Trainer, or what else does it.
        agrees: whether a lightning.Trainer does what the arguments ask for, where that can be read from it.
    """

    name: str
    agrees: Callable[[Any, Any], bool] = lambda args, trainer: False


def _saves(args: Any) -> bool:
    return args.save_strategy != "no"


def _sharded(args: Any, trainer: Any) -> bool:
    return type(trainer.strategy).__name__ in ("ModelParallelStrategy", "FSDPStrategy")


def _watches_as_asked(args: Any, trainer: Any) -> bool:
    mode = "max" if args.greater_is_better else "min"
    callbacks = trainer.checkpoint_callbacks
    return any(getattr(one, "monitor", None) and getattr(one, "mode", None) == mode for one in callbacks)


LEFT_TO_LIGHTNING: dict[str, Instead] = {
    "num_train_epochs": Instead(
        "max_epochs", lambda args, trainer: args.max_steps > 0 or trainer.max_epochs == math.ceil(args.num_train_epochs)
    ),
    "max_steps": Instead("max_steps", lambda args, trainer: trainer.max_steps == args.max_steps),
    "gradient_accumulation_steps": Instead(
        "accumulate_grad_batches",
        lambda args, trainer: trainer.accumulate_grad_batches == args.gradient_accumulation_steps,
    ),
    # Acted on where the other is None.
    "max_grad_norm": Instead(
        "gradient_clip_val", lambda args, trainer: trainer.gradient_clip_val in (None, args.max_grad_norm)
    ),
    "bf16": Instead('precision="bf16-mixed"', lambda args, trainer: trainer.precision == "bf16-mixed"),
    "fp16": Instead('precision="16-mixed"', lambda args, trainer: trainer.precision == "16-mixed"),
    "bf16_full_eval": Instead("module.bfloat16()"),
    "fp16_full_eval": Instead("module.half()"),
    "tf32": Instead("torch.set_float32_matmul_precision"),
    "torch_compile": Instead("torch.compile(model)"),
    "torch_compile_backend": Instead("torch.compile(model, backend=...)"),
    "torch_compile_mode": Instead("torch.compile(model, mode=...)"),
    "torch_empty_cache_steps": Instead("a callback that calls torch.cuda.empty_cache"),
    "auto_find_batch_size": Instead("callbacks=[BatchSizeFinder()]"),
    "full_determinism": Instead("deterministic", lambda args, trainer: bool(getattr(trainer, "_deterministic", False))),
    "use_cpu": Instead(
        'accelerator="cpu"', lambda args, trainer: type(trainer.accelerator).__name__ == "CPUAccelerator"
    ),
    "debug": Instead("detect_anomaly"),
    "skip_memory_metrics": Instead("callbacks=[DeviceStatsMonitor()]"),
    "lightning": Instead("its entries"),
    "disable_tqdm": Instead(
        "enable_progress_bar", lambda args, trainer: args.disable_tqdm is (trainer.progress_bar_callback is None)
    ),
    # Logs
    "logging_strategy": Instead(
        "log_every_n_steps", lambda args, trainer: args.logging_strategy == "no" and not trainer.loggers
    ),
    "logging_steps": Instead(
        "log_every_n_steps", lambda args, trainer: getattr(trainer, "log_every_n_steps", None) == args.logging_steps
    ),
    "logging_first_step": Instead("log_every_n_steps"),
    "log_on_each_node": Instead(LOGGERS),
    "include_num_input_tokens_seen": Instead("callbacks=[ThroughputMonitor(...)]"),
    "log_level": Instead("logging.getLogger('lightning.pytorch').setLevel"),
    "log_level_replica": Instead("logging.getLogger('lightning.pytorch').setLevel"),
    **dict.fromkeys(
        (
            *("report_to", "run_name", "project", "logging_dir"),
            *("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
        ),
        Instead(LOGGERS, lambda args, trainer: bool(trainer.loggers)),
    ),
    # Evaluation
    "eval_strategy": Instead(
        "val_check_interval, check_val_every_n_epoch and limit_val_batches",
        # By default Lightning validates in each epoch, where there is something to validate.
        lambda args, trainer: (
            args.eval_strategy == "epoch"
            and trainer.check_val_every_n_epoch == 1
            and trainer.val_check_interval in (1, 1.0)
        ),
    ),
    "eval_steps": Instead("val_check_interval, which counts batches"),
    "eval_delay": Instead("check_val_every_n_epoch"),
    "eval_on_start": Instead("trainer.validate() before trainer.fit()"),
    "eval_use_gather_object": Instead("outputs that are tensors"),
    "batch_eval_metrics": Instead("metrics of torchmetrics as compute_metrics"),
    # Checkpoints
    **dict.fromkeys(
        (
            *("save_strategy", "save_steps", "save_total_limit"),
            "restore_callback_states_from_checkpoint",
        ),
        Instead(CHECKPOINTS, lambda args, trainer: _saves(args) is bool(trainer.checkpoint_callbacks)),
    ),
    "save_only_model": Instead(
        "ModelCheckpoint(save_weights_only=True)",
        lambda args, trainer: any(getattr(one, "save_weights_only", False) for one in trainer.checkpoint_callbacks),
    ),
    # The last weights stay in the model.
    "load_best_model_at_end": Instead(
        'ckpt_path="best" for validate, test and predict, or load_from_checkpoint of the best_model_path'
    ),
    # It follows from others where nobody sets it.
    "greater_is_better": Instead(
        "ModelCheckpoint(mode=...)",
        lambda args, trainer: not args.load_best_model_at_end or _watches_as_asked(args, trainer),
    ),
    "save_on_each_node": Instead(CHECKPOINTS),
    "async_save": Instead("plugins=[AsyncCheckpointIO(...)]"),
    "enable_jit_checkpoint": Instead("plugins=[SLURMEnvironment(auto_requeue=True)]"),
    "jit_checkpoint_signals": Instead("plugins=[SLURMEnvironment(requeue_signal=...)]"),
    **dict.fromkeys(
        (
            *("push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push"),
            "hub_revision",
        ),
        Instead(HUB),
    ),
    # Processes
    "parallelism_config": Instead("strategy=ModelParallelStrategy(data_parallel_size=..., tensor_parallel_size=...)"),
    "ddp_find_unused_parameters": Instead('strategy="ddp_find_unused_parameters_true"'),
    **dict.fromkeys(
        (*("ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend", "ddp_timeout"),),
        Instead(STRATEGY),
    ),
    "fsdp": Instead(SHARDING, _sharded),
    "fsdp_config": Instead(SHARDING, _sharded),
    "deepspeed": Instead("strategy=DeepSpeedStrategy(config=...)"),
}


def warn_of_ignored_arguments(args: Any, trainer: Any) -> None:
    """Warn, once for a run, of arguments that ask for something and that neither module nor data module act on.

    Parameters:
        args: the module's arguments.
        trainer: the lightning.Trainer, which decides about most of them.
    """
    told: list[str] = []
    given = getattr(args, "given_names", None)
    for name, value in changed_arguments(args).items():
        if given is not None and name not in given:
            continue  # It follows from another one.
        if name in ABOUT_DATA and not hasattr(trainer.datamodule, "args"):
            told.append(f"{name}={value!r} (the loader's; TrainerDataModule acts on it)")
        instead = LEFT_TO_LIGHTNING.get(name)
        if instead is not None and not instead.agrees(args, trainer):
            told.append(f"{name}={value!r} (instead: {instead.name})")
    clips_itself = trainer.strategy.handles_gradient_accumulation
    asks = args.max_grad_norm > 0 and (clips_itself or "max_grad_norm" not in (given or ()))
    if trainer.gradient_clip_val is None and asks:
        (NOTED.warn if clips_itself else NOTED.info)(
            f"lightning.Trainer has no gradient_clip_val: gradients are {'not ' if clips_itself else ''}clipped to "
            f"max_grad_norm={args.max_grad_norm!r}. Set gradient_clip_val, or max_grad_norm in args (0 clips nothing)."
        )
    if told:
        rank_zero_warn(
            "TransformersModule does not act on these training arguments, about which lightning.Trainer decides: "
            f"{', '.join(told)}."
        )
