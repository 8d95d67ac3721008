"""The training arguments that a module uses or ignores, and Lightning's equivalents."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypedDict

from lightning.pytorch.utilities.rank_zero import WarningCache, rank_zero_warn

from littrainer.arguments.destinations import READERS
from littrainer.arguments.training_arguments import TrainingArguments
from littrainer.lightning.arguments import ModuleArguments, get_argument_types, get_changed_arguments

WARNINGS = WarningCache()

CHECKPOINTS = "callbacks=[ModelCheckpoint(...)]"
LOGGERS = "logger=..."
LOG_LEVEL = "logging.getLogger('lightning.pytorch').setLevel"
STRATEGY = 'strategy="ddp", or an object such as DDPStrategy(...)'
# The default sizes would mean tensor parallelism.
SHARDING = "strategy=ModelParallelStrategy(data_parallel_size=N, tensor_parallel_size=1)"
HUB = "export_pretrained(), and huggingface_hub"

LIGHTNING_EQUIVALENTS: dict[str, str] = {
    "num_train_epochs": "max_epochs",
    "max_steps": "max_steps",
    "gradient_accumulation_steps": "accumulate_grad_batches",
    "global_batch_size": "accumulate_grad_batches",
    # Used if the keyword is None.
    "max_grad_norm": "gradient_clip_val",
    "bf16": 'precision="bf16-mixed"',
    "fp16": 'precision="16-mixed"',
    "bf16_full_eval": "module.bfloat16()",
    "fp16_full_eval": "module.half()",
    "tf32": "torch.set_float32_matmul_precision",
    "torch_compile": "torch.compile(model)",
    "torch_compile_backend": "torch.compile(model, backend=...)",
    "torch_compile_mode": "torch.compile(model, mode=...)",
    "torch_empty_cache_steps": "a callback that calls torch.cuda.empty_cache",
    **dict.fromkeys(("auto_find_batch_size", "auto_micro_batch"), "callbacks=[BatchSizeFinder()]"),
    "max_tokens_per_batch": "a DataLoader with a batch_sampler",
    "pack_to_length": "transformers' DataCollatorWithFlattening as data_collator",
    "full_determinism": "deterministic",
    "use_cpu": 'accelerator="cpu"',
    "debug": "detect_anomaly",
    "skip_memory_metrics": "callbacks=[DeviceStatsMonitor()]",
    "lightning": "its entries",
    "disable_tqdm": "enable_progress_bar",
    **dict.fromkeys(("logging_strategy", "logging_steps", "logging_first_step"), "log_every_n_steps"),
    **dict.fromkeys(("report_to", "run_name", "project", "logging_dir", "log_on_each_node"), LOGGERS),
    **dict.fromkeys(("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"), LOGGERS),
    **dict.fromkeys(("include_num_input_tokens_seen", "log_speed"), "callbacks=[ThroughputMonitor(...)]"),
    **dict.fromkeys(("ema_decay", "ema_use"), "callbacks=[EMAWeightAveraging(decay=...)]"),
    "chunked_loss": "use_liger_kernel=True",
    "log_loss_terms": "self.log in an overridden compute_loss",
    **dict.fromkeys(("log_level", "log_level_replica"), LOG_LEVEL),
    "eval_strategy": "val_check_interval, check_val_every_n_epoch and limit_val_batches",
    "eval_steps": "val_check_interval, which counts batches",
    "eval_delay": "check_val_every_n_epoch",
    "eval_minutes": "val_check_interval",
    "eval_on_start": "trainer.validate() before trainer.fit()",
    "eval_at_end": "trainer.validate() after trainer.fit()",
    "eval_use_gather_object": "outputs that are tensors",
    "batch_eval_metrics": "metrics of torchmetrics as compute_metrics",
    **dict.fromkeys(("save_strategy", "save_steps", "save_total_limit", "save_on_each_node"), CHECKPOINTS),
    "restore_callback_states_from_checkpoint": CHECKPOINTS,
    "save_total_limit_best": CHECKPOINTS,
    "keep_optimizer_states": "a second ModelCheckpoint(save_weights_only=True)",
    "save_minutes": "ModelCheckpoint(train_time_interval=...)",
    "max_minutes": "Trainer(max_time=...)",
    "hang_timeout": "faulthandler.dump_traceback_later in a callback",
    "on_nonfinite": 'callbacks=[EarlyStopping("train_loss", check_finite=True)]',
    "spike_factor": "a callback with on_before_optimizer_step",
    "save_only_model": "ModelCheckpoint(save_weights_only=True)",
    # The model keeps its last weights.
    "load_best_model_at_end": 'ckpt_path="best" for validate, test and predict, or load_from_checkpoint of the '
    "best_model_path",
    "greater_is_better": "ModelCheckpoint(mode=...)",
    "async_save": "plugins=[AsyncCheckpointIO(...)]",
    "enable_jit_checkpoint": "plugins=[SLURMEnvironment(auto_requeue=True)]",
    "jit_checkpoint_signals": "plugins=[SLURMEnvironment(requeue_signal=...)]",
    **dict.fromkeys(("push_to_hub", "hub_token", "hub_private_repo", "hub_model_id"), HUB),
    **dict.fromkeys(("hub_strategy", "hub_always_push", "hub_revision"), HUB),
    "parallelism_config": "strategy=ModelParallelStrategy(data_parallel_size=..., tensor_parallel_size=...)",
    "ddp_find_unused_parameters": 'strategy="ddp_find_unused_parameters_true"',
    **dict.fromkeys(("ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"), STRATEGY),
    **dict.fromkeys(("ddp_backend", "ddp_timeout"), STRATEGY),
    **dict.fromkeys(("fsdp", "fsdp_config"), SHARDING),
    "deepspeed": "strategy=DeepSpeedStrategy(config=...)",
}


DATA_MODULE_ARGUMENTS = frozenset(
    name
    for name, reader in READERS.items()
    if reader in ("data loader", "sampler") or name in ("seed", "remove_unused_columns", "signature_columns")
) - set(LIGHTNING_EQUIVALENTS)
# Scripts read the others.
MODULE_ARGUMENTS = frozenset(
    name for name, reader in READERS.items() if reader != "the script" and name != "output_dir"
) - {
    *DATA_MODULE_ARGUMENTS,
    *LIGHTNING_EQUIVALENTS,
}


if TYPE_CHECKING:
    TrainingArgumentsDict = dict[str, Any]
    ArgumentsSource = dict[str, Any] | TrainingArguments | None
else:
    # LightningCLI lists the keys of a TypedDict, and parses their values by type.
    _used = sorted(DATA_MODULE_ARGUMENTS | MODULE_ARGUMENTS | {"max_grad_norm"})
    _hints = {**get_argument_types(), "generation_config": Any, "accelerator_config": Any}
    TrainingArgumentsDict = TypedDict("TrainingArgumentsDict", {name: _hints[name] for name in _used}, total=False)
    _help = {name: ModuleArguments.__dataclass_fields__[name].metadata["help"] for name in _used}
    TrainingArgumentsDict.__doc__ = "\n".join(
        ["Training arguments of a module and its data, by name.", "", "Args:"]
        + [f"    {name}: {text}" for name, text in _help.items()]
    )
    # Errors and warnings about other names are those of the module.
    ArgumentsSource = TrainingArgumentsDict | dict[str, Any] | None


def _matches_save_strategy(args: TrainingArguments, pl_trainer: Any) -> bool:
    return (args.save_strategy != "no") is bool(pl_trainer.checkpoint_callbacks)


def _matches_monitor_mode(args: TrainingArguments, pl_trainer: Any) -> bool:
    mode = "max" if args.greater_is_better else "min"
    modes = [saver.mode for saver in pl_trainer.checkpoint_callbacks if getattr(saver, "monitor", None)]
    return not args.load_best_model_at_end or mode in modes


# Argument -> whether a lightning.Trainer has its value.
MATCHES: dict[str, Callable[[Any, Any], bool]] = {
    "num_train_epochs": lambda args, run: args.max_steps > 0 or run.max_epochs == math.ceil(args.num_train_epochs),
    "max_steps": lambda args, run: run.max_steps == args.max_steps,
    "gradient_accumulation_steps": lambda args, run: run.accumulate_grad_batches == args.gradient_accumulation_steps,
    "max_grad_norm": lambda args, run: run.gradient_clip_val in (None, args.max_grad_norm),
    "bf16": lambda args, run: run.precision == "bf16-mixed",
    "fp16": lambda args, run: run.precision == "16-mixed",
    "full_determinism": lambda args, run: bool(getattr(run, "_deterministic", False)),
    "use_cpu": lambda args, run: type(run.accelerator).__name__ == "CPUAccelerator",
    "disable_tqdm": lambda args, run: args.disable_tqdm is (run.progress_bar_callback is None),
    "logging_strategy": lambda args, run: args.logging_strategy == "no" and not run.loggers,
    "logging_steps": lambda args, run: getattr(run, "log_every_n_steps", None) == args.logging_steps,
    **dict.fromkeys(
        [name for name, code in LIGHTNING_EQUIVALENTS.items() if code == LOGGERS and name != "log_on_each_node"],
        lambda args, run: bool(run.loggers),
    ),
    # Lightning's default.
    "eval_strategy": lambda args, run: (
        args.eval_strategy == "epoch" and run.check_val_every_n_epoch == 1 and run.val_check_interval in (1, 1.0)
    ),
    **dict.fromkeys(
        ("save_strategy", "save_steps", "save_total_limit", "restore_callback_states_from_checkpoint"),
        _matches_save_strategy,
    ),
    "save_only_model": lambda args, run: any(
        getattr(saver, "save_weights_only", False) for saver in run.checkpoint_callbacks
    ),
    "greater_is_better": _matches_monitor_mode,
    **dict.fromkeys(
        ("fsdp", "fsdp_config"),
        lambda args, run: type(run.strategy).__name__ in ("ModelParallelStrategy", "FSDPStrategy"),
    ),
}


# Arguments that are compared in spite of their default value, if a script names them.
COMPARED_DEFAULTS = ("num_train_epochs", "gradient_accumulation_steps", "max_grad_norm", "logging_steps")


def warn_of_ignored_arguments(args: TrainingArguments, pl_trainer: Any) -> None:
    """Warn once per run of arguments that neither module nor data module uses."""
    ignored: list[str] = []
    explicit_names = getattr(args, "explicit_names", None)
    defaults = {name: getattr(args, name) for name in COMPARED_DEFAULTS if name in (explicit_names or ())}
    for name, value in (defaults | get_changed_arguments(args)).items():
        if explicit_names is not None and name not in explicit_names:
            # The value follows from another argument.
            continue
        if name in DATA_MODULE_ARGUMENTS and not hasattr(pl_trainer.datamodule, "args"):
            ignored.append(f"{name}={value!r} (the loader's; TrainerDataModule uses it)")
        elif name in LIGHTNING_EQUIVALENTS and not (name in MATCHES and MATCHES[name](args, pl_trainer)):
            ignored.append(f"{name}={value!r} (instead: {LIGHTNING_EQUIVALENTS[name]})")
    strategy_clips = pl_trainer.strategy.handles_gradient_accumulation
    is_default = "max_grad_norm" not in (explicit_names or ())
    if pl_trainer.gradient_clip_val is None and args.max_grad_norm > 0 and (strategy_clips or is_default):
        (WARNINGS.warn if strategy_clips else WARNINGS.info)(
            f"lightning.Trainer has no gradient_clip_val: gradients are {'not ' if strategy_clips else ''}clipped to "
            f"max_grad_norm={args.max_grad_norm!r}. Set gradient_clip_val, or max_grad_norm in args (0 clips nothing)."
        )
    if ignored:
        rank_zero_warn(
            "TransformersModule ignores these training arguments, which lightning.Trainer decides: "
            f"{', '.join(ignored)}."
        )
