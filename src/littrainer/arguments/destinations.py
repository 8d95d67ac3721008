"""Where each argument goes: the one table that the engine, `littrainer explain` and docs/arguments.md read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple


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
    DEVICE = "device"
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


class Destination(NamedTuple):
    """Where one argument goes.

    Parameters:
        place: the part of a run that reads it.
        sentence: what happens with it there.
        keywords: keyword of `lightning.Trainer` -> how its value follows from the arguments.
    """

    place: Place
    sentence: str
    keywords: Mapping[str, Callable[[Any], Any]] = MappingProxyType({})


def _accelerator(args: Any) -> str:
    return "gpu" if args.device.type == "cuda" else args.device.type


# Value of `mixed_precision` -> Lightning's name for it.
LIGHTNING_PRECISIONS = {"bf16": "bf16-mixed", "fp16": "16-mixed"}
FULL_PRECISION = "32-true"


def lightning_precision(args: Any) -> str:
    """Return the `precision` of `lightning.Trainer` for bf16 and fp16.

    float16 needs its losses scaled, for which torch has nothing on a CPU, so there fp16 trains in full precision.
    """
    if args.mixed_precision == "fp16" and args.device.type == "cpu":
        return FULL_PRECISION
    return LIGHTNING_PRECISIONS.get(args.mixed_precision, FULL_PRECISION)


DESTINATIONS: dict[str, Destination] = {
    # Schedule and length of the run
    "output_dir": Destination(Place.CHECKPOINT, "Checkpoints, the final model and metrics files are written below it."),
    "per_device_train_batch_size": Destination(Place.LOADER, "`batch_size` of the training DataLoader."),
    "num_train_epochs": Destination(Place.PLAN, "Times the optimizer steps of an epoch; rounded up, `max_epochs`."),
    "max_steps": Destination(Place.FLOW, "Training stops after this optimizer step."),
    "learning_rate": Destination(Place.OPTIMIZER, "`lr` of each parameter group."),
    "lr_scheduler_type": Destination(Place.SCHEDULE, "Chooses the schedule, which Lightning steps with the optimizer."),
    "lr_scheduler_kwargs": Destination(Place.SCHEDULE, "Further settings of the schedule's formula."),
    "warmup_steps": Destination(Place.SCHEDULE, "Optimizer steps of the rise from 0, or their share of all steps."),
    # Optimizer and optimizer step
    "optim": Destination(Place.OPTIMIZER, "Chooses the optimizer class."),
    "optim_args": Destination(Place.OPTIMIZER, "Further settings of the optimizer class, if it takes some."),
    "weight_decay": Destination(Place.OPTIMIZER, "`weight_decay` of the group without biases and norms."),
    "adam_beta1": Destination(Place.OPTIMIZER, "First of `betas`, for optimizers of the Adam family."),
    "adam_beta2": Destination(Place.OPTIMIZER, "Second of `betas`, for optimizers of the Adam family."),
    "adam_epsilon": Destination(Place.OPTIMIZER, "`eps`, for optimizers of the Adam family."),
    "optim_target_modules": Destination(
        Place.OPTIMIZER, "Chooses the modules whose weights a low-rank optimizer projects."
    ),
    "gradient_accumulation_steps": Destination(
        Place.KEYWORD,
        "`accumulate_grad_batches`; set for each micro-batch, since the last window of an epoch may be shorter.",
        {"accumulate_grad_batches": lambda args: args.gradient_accumulation_steps},
    ),
    "average_tokens_across_devices": Destination(
        Place.STEP, "The label tokens that the loss is divided by are summed over the processes."
    ),
    "max_grad_norm": Destination(
        Place.STEP, "Clips in `configure_gradient_clipping`; Lightning's own `gradient_clip_val` stays unset."
    ),
    "label_smoothing_factor": Destination(Place.STEP, "The loss is computed from the logits with smoothed labels."),
    # Number formats, memory and compilation
    "bf16": Destination(
        Place.KEYWORD,
        "`precision`; the model's forward runs under autocast to bfloat16 and returns float32.",
        {"precision": lightning_precision},
    ),
    "fp16": Destination(
        Place.KEYWORD,
        "`precision`; the model's forward runs under autocast to float16 and returns float32, with loss scaling.",
        {"precision": lightning_precision},
    ),
    "bf16_full_eval": Destination(Place.EVALUATION, "The model is cast to bfloat16 for evaluation outside training."),
    "fp16_full_eval": Destination(Place.EVALUATION, "The model is cast to float16 for evaluation outside training."),
    "tf32": Destination(Place.PRECISION, "Sets torch's switches for TF32 matrix products and convolutions."),
    "activation_checkpointing": Destination(Place.MODEL, "Calls the model's `activation_checkpointing_enable`."),
    "activation_checkpointing_kwargs": Destination(
        Place.MODEL, "Handed to the model's `activation_checkpointing_enable`."
    ),
    "gradient_checkpointing": Destination(Place.MODEL, "As `activation_checkpointing`, which decides."),
    "gradient_checkpointing_kwargs": Destination(Place.MODEL, "As `activation_checkpointing_kwargs`, which decides."),
    "torch_compile": Destination(Place.MODEL, "The model's forward is compiled with `torch.compile`."),
    "torch_compile_backend": Destination(Place.MODEL, "`backend` of `torch.compile`."),
    "torch_compile_mode": Destination(Place.MODEL, "`mode` of `torch.compile`."),
    "use_liger_kernel": Destination(Place.MODEL, "Liger's kernels are put into the model before training."),
    "liger_kernel_config": Destination(Place.MODEL, "Which of Liger's kernels are put into the model."),
    "use_cache": Destination(Place.MODEL, "Written to `model.config.use_cache`."),
    "neftune_noise_alpha": Destination(Place.MODEL, "A forward hook adds noise to the embeddings while training."),
    "torch_empty_cache_steps": Destination(
        Place.STEP, "The accelerator's cache is emptied every so many optimizer steps, before the backward pass."
    ),
    "auto_find_batch_size": Destination(Place.LOADER, "Training restarts with a smaller batch when memory runs out."),
    # Logs, console and trackers
    "logging_strategy": Destination(Place.FLOW, "Says when `on_log` is due."),
    "logging_steps": Destination(Place.FLOW, "Optimizer steps between two logs."),
    "logging_first_step": Destination(Place.FLOW, "A log is due after the first optimizer step."),
    "log_on_each_node": Destination(Place.PROCESSES, "Decides `should_log` of each process."),
    "logging_nan_inf_filter": Destination(
        Place.LOGS, "A loss that is not finite is replaced by the running mean in the logged sum."
    ),
    "include_num_input_tokens_seen": Destination(Place.LOGS, "Tokens are counted per micro-batch and logged."),
    "log_level": Destination(Place.LOGS, "Level of the littrainer and transformers loggers in the main process."),
    "log_level_replica": Destination(Place.LOGS, "Level of the same loggers in the other processes."),
    "disable_tqdm": Destination(
        Place.CONSOLE, "Chooses PrinterCallback instead of ProgressCallback; false draws bars off a terminal too."
    ),
    "report_to": Destination(
        Place.TRACKER, "Names the trackers, each a callback; Lightning loggers are taken too (see tracking.md)."
    ),
    "run_name": Destination(Place.TRACKER, "Name of the run in Weights & Biases, MLflow, Comet, Trackio and others."),
    **dict.fromkeys(
        ("project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
        Destination(Place.TRACKER, "Read by the Trackio callback."),
    ),
    # Evaluation
    "eval_strategy": Destination(Place.FLOW, "Says when an evaluation is due; it runs inside fit."),
    "eval_steps": Destination(Place.FLOW, "Optimizer steps between two evaluations."),
    "eval_delay": Destination(Place.FLOW, "No evaluation is due before this step or epoch."),
    "per_device_eval_batch_size": Destination(Place.LOADER, "`batch_size` of the evaluation DataLoader."),
    "prediction_loss_only": Destination(Place.EVALUATION, "Logits and labels are not kept."),
    "eval_on_start": Destination(Place.EVALUATION, "One evaluation runs before the first optimizer step."),
    "eval_do_concat_batches": Destination(Place.EVALUATION, "Whether kept batches are joined to one array."),
    "eval_use_gather_object": Destination(Place.PROCESSES, "Outputs are gathered between processes as objects."),
    "eval_accumulation_steps": Destination(Place.EVALUATION, "Kept batches move to host memory after so many."),
    "include_for_metrics": Destination(Place.EVALUATION, "Adds inputs or losses to what `compute_metrics` gets."),
    "batch_eval_metrics": Destination(Place.EVALUATION, "`compute_metrics` is called for each batch."),
    # Checkpoints and the Hub
    "save_only_model": Destination(Place.CHECKPOINT, "Optimizer, schedule and random states are left out."),
    "save_strategy": Destination(Place.FLOW, "Says when a checkpoint is due."),
    "save_steps": Destination(Place.FLOW, "Optimizer steps between two checkpoints."),
    "save_on_each_node": Destination(Place.PROCESSES, "Decides `should_save` of each process."),
    "save_total_limit": Destination(Place.CHECKPOINT, "Older checkpoint folders are deleted after each save."),
    "enable_jit_checkpoint": Destination(
        Place.CHECKPOINT, "A signal makes training save at the next optimizer step, and stop."
    ),
    "push_to_hub": Destination(Place.HUB, "Saved models are uploaded."),
    **dict.fromkeys(
        ("hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision"),
        Destination(Place.HUB, "Read when `push_to_hub` is on."),
    ),
    "load_best_model_at_end": Destination(Place.CHECKPOINT, "The best checkpoint's weights are loaded after training."),
    "metric_for_best_model": Destination(Place.CHECKPOINT, "The evaluation metric that ranks checkpoints."),
    "greater_is_better": Destination(Place.CHECKPOINT, "Which of two metrics is the better one."),
    "ignore_data_skip": Destination(Place.LOADER, "A resumed epoch starts with its first batch."),
    "restore_callback_states_from_checkpoint": Destination(
        Place.CHECKPOINT, "Callbacks get their state from trainer_state.json on resume."
    ),
    # Seeds and device
    "full_determinism": Destination(Place.SEED, "Switches torch to deterministic algorithms before seeding."),
    "seed": Destination(Place.SEED, "Seeds Python, NumPy and torch when the Trainer is made and at `model_init`."),
    "data_seed": Destination(Place.SAMPLER, "Seed of the random training sampler."),
    "use_cpu": Destination(
        Place.KEYWORD, "`accelerator` is the CPU, even if there is a GPU.", {"accelerator": _accelerator}
    ),
    "accelerator_config": Destination(Place.LOADER, "How batches are drawn and dispatched."),
    "parallelism_config": Destination(
        Place.PROCESSES, "The dimensions of the processes' mesh, for DDP, FSDP and tensor parallelism."
    ),
    # Data
    "dataloader_drop_last": Destination(Place.LOADER, "`drop_last` of the DataLoader."),
    "dataloader_num_workers": Destination(Place.LOADER, "`num_workers` of the DataLoader."),
    "dataloader_pin_memory": Destination(Place.LOADER, "`pin_memory` of the DataLoader, if the device is no CPU."),
    "dataloader_persistent_workers": Destination(Place.LOADER, "`persistent_workers` of the DataLoader."),
    "dataloader_prefetch_factor": Destination(Place.LOADER, "`prefetch_factor` of the DataLoader."),
    "dataloader_multiprocessing_context": Destination(Place.LOADER, "`multiprocessing_context` of the DataLoader."),
    "dataloader_in_order": Destination(Place.LOADER, "`in_order` of the DataLoader."),
    "remove_unused_columns": Destination(Place.COLUMNS, "Columns that forward does not take are dropped."),
    "label_names": Destination(Place.COLUMNS, "These inputs are kept as labels in evaluation."),
    "train_sampling_strategy": Destination(Place.SAMPLER, "Chooses the training sampler."),
    "length_column_name": Destination(Place.SAMPLER, "Where grouping by length reads lengths."),
    # Several processes
    "ddp_find_unused_parameters": Destination(Place.PROCESSES, "`find_unused_parameters` of DDP."),
    "ddp_bucket_cap_mb": Destination(Place.PROCESSES, "`bucket_cap_mb` of DDP."),
    "ddp_broadcast_buffers": Destination(Place.PROCESSES, "`broadcast_buffers` of DDP."),
    "ddp_static_graph": Destination(Place.PROCESSES, "`static_graph` of DDP."),
    "ddp_backend": Destination(Place.PROCESSES, "Backend of the process group."),
    "ddp_timeout": Destination(Place.PROCESSES, "Timeout of the process group."),
    "fsdp": Destination(Place.PROCESSES, "Chooses a sharding strategy."),
    "fsdp_config": Destination(Place.PROCESSES, "Settings of the sharding strategy."),
    "deepspeed": Destination(Place.PROCESSES, "Chooses the DeepSpeed strategy and configures it."),
    # Debugging and scripts
    "debug": Destination(Place.MODEL, "Hooks watch the model's outputs for overflow."),
    "skip_memory_metrics": Destination(Place.LOGS, "Memory use is measured and added to the metrics."),
    **dict.fromkeys(("do_train", "do_eval", "do_predict"), Destination(Place.SCRIPT, "The Trainer does not read it.")),
    "resume_from_checkpoint": Destination(
        Place.SCRIPT, "`train()` takes it as a parameter; of the arguments it reads `auto` alone."
    ),
    "local_rank": Destination(Place.SCRIPT, "The Trainer does not read it; ranks come from the environment."),
    # Generation
    "sortish_sampler": Destination(Place.SAMPLER, "Training samples are grouped by length, as `group_by_length` does."),
    "predict_with_generate": Destination(Place.EVALUATION, "Predictions are what the model's `generate` returns."),
    "generation_max_length": Destination(Place.EVALUATION, "`max_length` of `generate`, if a call gives no length."),
    "generation_num_beams": Destination(Place.EVALUATION, "`num_beams` of `generate`, if a call gives none."),
    "generation_config": Destination(Place.MODEL, "Becomes `model.generation_config` when the Trainer is made."),
    # Additional
    "warmup_ratio": Destination(Place.SCHEDULE, "Becomes `warmup_steps`."),
    "logging_dir": Destination(Place.TRACKER, "Folder of the TensorBoard callback, before TENSORBOARD_LOGGING_DIR."),
    "lightning": Destination(
        Place.KEYWORD,
        "Its entries are further keywords of `lightning.Trainer`; those that arguments decide are refused.",
    ),
    "async_save": Destination(
        Place.CHECKPOINT, "A thread writes files; the next save, and the end of train(), wait for it."
    ),
    "jit_checkpoint_signals": Destination(Place.CHECKPOINT, "The signals whose handler asks for a checkpoint."),
    "eval_loss_weighting": Destination(Place.EVALUATION, "How the losses of batches are weighted in their mean."),
    "save_minutes": Destination(Place.CHECKPOINT, "Looked at after each optimizer step, on the first process's clock."),
    "eval_minutes": Destination(Place.EVALUATION, "Looked at after each optimizer step, on the first process's clock."),
    "loss_normalization": Destination(
        Place.STEP, "`exact` weighs the mean of a micro-batch by its samples or labels among those of the window."
    ),
    "global_batch_size": Destination(
        Place.STEP,
        "`gradient_accumulation_steps` is this, divided by `per_device_train_batch_size` and the processes.",
    ),
    "max_minutes": Destination(Place.FLOW, "Looked at after each optimizer step, on the first process's clock."),
    "hang_timeout": Destination(
        Place.FLOW, "A thread looks whether steps, evaluation batches and files that are written move on."
    ),
    "max_tokens_per_batch": Destination(Place.LOADER, "Forms batches by length; results are put back in order."),
    "pack_to_length": Destination(Place.LOADER, "A sampler draws rows, which a collator around `data_collator` joins."),
    "on_nonfinite": Destination(
        Place.FLOW,
        "Losses and gradient norms are read together at logs and saves; for `skip`, `rollback` at each step.",
    ),
    "spike_factor": Destination(Place.FLOW, "Compared with the norms since the training began, from the 20th on."),
    "save_total_limit_best": Destination(
        Place.CHECKPOINT, "Older checkpoints that are not among the best are deleted."
    ),
    "keep_optimizer_states": Destination(
        Place.CHECKPOINT, "After a save, files that only a resume needs are deleted from older checkpoints."
    ),
    "log_speed": Destination(Place.LOGS, "Times are taken in each micro-batch, and logged with the loss."),
    "auto_micro_batch": Destination(
        Place.STEP, "Micro-batches are split by rows; processes average gradients once for each optimizer step."
    ),
    "ema_decay": Destination(Place.STEP, "Decay of a `WeightAveraging` callback of Lightning."),
    "ema_use": Destination(Place.CHECKPOINT, "Read when `ema_decay` is set."),
}


def derived_keywords() -> dict[str, Callable[[Any], Any]]:
    """Return the keywords of `lightning.Trainer` that follow from arguments, each with a function for its value."""
    return {name: find for destination in DESTINATIONS.values() for name, find in destination.keywords.items()}
