"""Arguments by topic, with defaults and help texts, in their documented positional order."""

# ruff: noqa: RUF009 (`argument` returns a dataclass field)

from __future__ import annotations

import dataclasses
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, cast, runtime_checkable

from littrainer.arguments.accelerator_config import AcceleratorConfig
from littrainer.arguments.choices import (
    DebugOption,
    HubStrategy,
    IntervalStrategy,
    OptimizerNames,
    SaveStrategy,
    SchedulerType,
)

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")

LOG_LEVELS = ("detail", "debug", "info", "warning", "error", "critical", "passive")

SAMPLING_STRATEGIES = ("random", "sequential", "group_by_length", "batch_rebalance")
WORKER_START_METHODS = ("fork", "spawn", "forkserver")

PROCESS_GROUP_BACKENDS = ("nccl", "gloo", "mpi", "xccl", "hccl", "cncl", "mccl")

# Signals that announce the end of a process.
ANNOUNCING_SIGNALS = tuple(
    name
    for name in ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU", "SIGINT")
    if name in signal.Signals.__members__
)
DEFAULT_ANNOUNCING_SIGNAL = "SIGTERM"

# Choices, the default first.
ON_NONFINITE = ("warn", "skip", "rollback", "stop")
EVAL_LOSS_WEIGHTINGS = ("batches", "samples", "labels")
LOSS_NORMALIZATIONS = ("transformers", "exact")
EMA_USES = ("both", "evaluate", "save")


def argument(
    default: Any = dataclasses.MISSING,
    help: str = "",
    default_factory: Any = dataclasses.MISSING,
    **parser_options: Any,
) -> Any:
    """Return the dataclass field of an argument.

    Parameters:
        help: effect in a line, with its unit, for parsers and the documentation.
        parser_options: options of a command-line parser, such as `choices` or `nargs`.
    """
    metadata = {"help": help, **parser_options}
    return dataclasses.field(default=default, default_factory=default_factory, metadata=metadata)


@dataclass
class ScheduleFields:
    """Output folder, micro-batch size, duration, learning rate and its schedule."""

    # Normalization replaces None.
    output_dir: str = argument(
        cast("str", None),
        "Folder or URL, such as `s3://bucket/run`, for checkpoints and the final model; unset, `trainer_output`.",
    )
    per_device_train_batch_size: int = argument(8, "Samples in one training micro-batch on each device.")
    num_train_epochs: float = argument(3.0, "Epochs to train for; a fraction ends within the last epoch.")
    max_steps: int = argument(-1, "Optimizer steps to train for; a positive number overrides `num_train_epochs`.")
    learning_rate: float = argument(5e-5, "Peak learning rate, after the warmup.")
    lr_scheduler_type: SchedulerType | str = argument("linear", "Shape of the learning-rate curve after warmup.")
    lr_scheduler_kwargs: dict[str, Any] | str | None = argument(
        None, "Settings of the schedule, such as `num_cycles`: a dict, or JSON on the command line."
    )
    warmup_steps: float = argument(0, "Optimizer steps of the linear warmup; below 1, a share of all steps.")


@dataclass
class OptimizationFields:
    """Optimizer, weight decay, gradient accumulation, clipping and label smoothing."""

    optim: OptimizerNames | str = argument("adamw_torch_fused", "Name of the optimizer.")
    optim_args: str | None = argument(None, "Settings of the optimizer, written as `key=value,key=value`.")
    weight_decay: float = argument(0.0, "Weight decay, except for biases and normalization weights.")
    adam_beta1: float = argument(0.9, "AdamW's decay rate for the running mean of gradients.")
    adam_beta2: float = argument(0.999, "AdamW's decay rate for the running mean of squared gradients.")
    adam_epsilon: float = argument(1e-8, "AdamW's addend to the denominator, for numerical stability.")
    optim_target_modules: list[str] | str | None = argument(
        None,
        "Modules that a low-rank optimizer (GaLore, APOLLO) projects: names, a regular expression or `all-linear`.",
    )
    gradient_accumulation_steps: int = argument(1, "Micro-batches whose gradients are summed for one optimizer step.")
    average_tokens_across_devices: bool = argument(
        True, "Weight each target token equally by counting the tokens of all processes."
    )
    max_grad_norm: float = argument(
        1.0, "Maximum 2-norm of the gradient, which is clipped before an optimizer step; 0 or below disables clipping."
    )
    label_smoothing_factor: float = argument(
        0.0, "Probability mass moved from the true label to all labels; 0 disables smoothing."
    )


@dataclass
class PrecisionFields:
    """Mixed precision, activation checkpointing, compilation, fused kernels and memory pressure."""

    bf16: bool = argument(False, "Train in bfloat16 mixed precision.")
    fp16: bool = argument(False, "Train in float16 mixed precision with loss scaling.")
    bf16_full_eval: bool = argument(False, "Convert the model to bfloat16 for evaluation.")
    fp16_full_eval: bool = argument(False, "Convert the model to float16 for evaluation.")
    tf32: bool | None = argument(
        None, "Allow (true) or forbid (false) TF32 matrix products on NVIDIA GPUs; unset keeps torch's setting."
    )
    activation_checkpointing: bool | None = argument(
        None,
        "Recompute activations in the backward pass to save memory at the cost of time.",
        nargs="?",
        const=True,
    )
    activation_checkpointing_kwargs: dict[str, Any] | str | None = argument(
        None, "Settings of activation checkpointing, such as `use_reentrant`."
    )
    gradient_checkpointing: bool | None = argument(
        None, "Other name of `activation_checkpointing`.", nargs="?", const=True
    )
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = argument(
        None, "Other name of `activation_checkpointing_kwargs`."
    )
    torch_compile: bool = argument(False, "Compile the model with `torch.compile`.")
    torch_compile_backend: str | None = argument(None, "Backend of `torch.compile`; setting it enables compilation.")
    torch_compile_mode: str | None = argument(None, "Mode of `torch.compile`; setting it enables compilation.")
    use_liger_kernel: bool = argument(False, "Replace layers of the model by Liger's Triton kernels.")
    liger_kernel_config: dict[str, bool] | None = argument(
        None, "Liger kernels to enable or disable, by name; unset enables the model's defaults."
    )
    use_cache: bool = argument(False, "Value of `model.config.use_cache` during training.")
    neftune_noise_alpha: float | None = argument(
        None, "Strength of NEFTune noise in embeddings during training; unset disables it."
    )
    torch_empty_cache_steps: int | None = argument(
        None, "Optimizer steps between releases of the device's cached memory; unset disables them."
    )
    auto_find_batch_size: bool = argument(False, "Restart training with a smaller micro-batch when out of memory.")


@dataclass
class LoggingFields:
    """Logged values, log levels, progress bars and experiment trackers."""

    logging_strategy: IntervalStrategy | str = argument("steps", "When to log: `no`, every `steps` or each `epoch`.")
    logging_steps: float = argument(500, "Optimizer steps between two logs; below 1, a share of all steps.")
    logging_first_step: bool = argument(False, "Log after the first optimizer step too.")
    log_on_each_node: bool = argument(True, "Log in the first process of each node, not only of the first node.")
    logging_nan_inf_filter: bool = argument(
        True, "Exclude nan and infinite losses from the logged mean; gradients do not change."
    )
    include_num_input_tokens_seen: str | bool = argument(
        "no", "Count input tokens in the logs: `all`, `non_padding` or `no`; true means `all`."
    )
    log_level: str = argument(
        "passive", "Log level of the main process; `passive` keeps the application's level.", choices=list(LOG_LEVELS)
    )
    log_level_replica: str = argument(
        "warning",
        "Log level of the other processes; `passive` keeps the application's level.",
        choices=list(LOG_LEVELS),
    )
    disable_tqdm: bool | None = argument(
        None, "Hide progress bars; false always shows them, unset only on a terminal that shows warnings."
    )
    report_to: list[str] | str | None = argument(
        "none", "Experiment trackers, by name; `all` selects the installed ones, `none` disables them."
    )
    run_name: str | None = argument(None, "Name of the run in experiment trackers.")
    project: str = argument("huggingface", "Name of the project in experiment trackers.")
    trackio_space_id: str | None = argument(None, "Hugging Face Space for Trackio.")
    trackio_bucket_id: str | None = argument(None, "Hugging Face storage bucket for Trackio.")
    trackio_static_space_id: Literal[False] | str | None = argument(
        None, "Static Space that Trackio publishes at the end of training; false disables it."
    )


@dataclass
class EvaluationFields:
    """Time, batches and metrics of evaluations."""

    eval_strategy: IntervalStrategy | str = argument(
        "no", "When to evaluate during training: `no`, every `steps` or each `epoch`."
    )
    eval_steps: float | None = argument(
        None, "Optimizer steps between two evaluations; below 1, a share of all steps; unset, `logging_steps`."
    )
    eval_delay: float = argument(0, "Epochs or steps, by `eval_strategy`, before the first evaluation.")
    per_device_eval_batch_size: int = argument(8, "Samples in one evaluation batch on each device.")
    prediction_loss_only: bool = argument(False, "Compute only the loss in evaluation, no predictions and metrics.")
    eval_on_start: bool = argument(False, "Evaluate before the first training step.")
    eval_do_concat_batches: bool = argument(
        True, "Concatenate the predictions of all batches; false passes a list of batches to `compute_metrics`."
    )
    eval_use_gather_object: bool = argument(
        False, "Gather predictions of all processes as Python objects, for outputs other than tensors."
    )
    eval_accumulation_steps: int | None = argument(
        None, "Evaluation batches after which predictions are moved to host memory; unset, at the end."
    )
    include_for_metrics: list[str] = argument(
        help="Values for `compute_metrics` in addition to predictions and labels: `inputs`, `loss`.",
        default_factory=list,
    )
    batch_eval_metrics: bool = argument(
        False, "Call `compute_metrics` for each batch, so that predictions are not stored."
    )


@dataclass
class SavingFields:
    """Checkpoints, pushes to the Hub, the best checkpoint, resuming."""

    save_only_model: bool = argument(
        False, "Save checkpoints without optimizer, schedule and random states; they cannot be resumed from."
    )
    save_strategy: SaveStrategy | str = argument(
        "steps", "When to save checkpoints: `no`, every `steps`, each `epoch` or at each `best` metric."
    )
    save_steps: float = argument(500, "Optimizer steps between two checkpoints; below 1, a share of all steps.")
    save_on_each_node: bool = argument(False, "Save on every node, for nodes without a shared disk.")
    save_total_limit: int | None = argument(
        None,
        "Maximum number of checkpoints, including the newest and the best; unset, 0 or below, none is deleted.",
    )
    enable_jit_checkpoint: bool = argument(False, "Save a checkpoint and end training on SIGTERM.")
    push_to_hub: bool = argument(False, "Push saved models to the Hub.")
    hub_token: str | None = argument(None, "Token for the Hub; unset, the token of `hf auth login`.")
    hub_private_repo: bool | None = argument(None, "Create a private Hub repository; unset, the organisation decides.")
    hub_model_id: str | None = argument(
        None, "Hub repository, `name` or `organisation/name`; unset, the name of the output folder."
    )
    hub_strategy: HubStrategy | str = argument(
        "every_save", "Contents and time of pushes: `end`, `every_save`, `checkpoint` or `all_checkpoints`."
    )
    hub_always_push: bool = argument(False, "Push while the previous push is still running.")
    hub_revision: str | None = argument(None, "Branch of the Hub repository.")
    load_best_model_at_end: bool = argument(
        False, "Load the best checkpoint at the end of training; needs an evaluation at each save."
    )
    metric_for_best_model: str | None = argument(
        None,
        "Evaluation metric that ranks checkpoints, with or without `eval_`; unset, the loss if a metric is needed.",
    )
    greater_is_better: bool | None = argument(
        None, "Whether a larger metric is better; unset, true unless its name ends in `loss`."
    )
    ignore_data_skip: bool = argument(
        False, "Resume with the first batch of the epoch instead of skipping the batches already used."
    )
    restore_callback_states_from_checkpoint: bool = argument(
        None,
        "Restore callback states on resume; unset, only that of early stopping; false, none.",
    )


@dataclass
class EnvironmentFields:
    """Determinism, seeds, device and accelerate's settings."""

    full_determinism: bool = argument(False, "Use deterministic kernels, so that runs are reproducible, but slower.")
    seed: int = argument(42, "Random seed.")
    data_seed: int | None = argument(None, "Random seed of the training sampler; unset, `seed`.")
    use_cpu: bool = argument(False, "Run on the CPU even if there is a GPU.")
    accelerator_config: dict[str, Any] | str | AcceleratorConfig | None = argument(
        None,
        "Settings of batches: a dict or the path of a JSON file; `split_batches`, `even_batches` and "
        "`sync_each_batch` need several processes.",
    )
    parallelism_config: Any | None = argument(
        None,
        "Layout of the processes: a dict with `dp_replicate_size`, `dp_shard_size` or `tp_size`, or accelerate's "
        "ParallelismConfig.",
    )


@dataclass
class DataFields:
    """Loader processes, columns, order of training samples."""

    dataloader_drop_last: bool = argument(False, "Drop the last batch of an epoch if it is incomplete.")
    dataloader_num_workers: int = argument(0, "Processes that load data; 0 loads in the training process.")
    dataloader_pin_memory: bool = argument(True, "Load batches into pinned memory, for faster copies to a GPU.")
    dataloader_persistent_workers: bool = argument(
        False, "Keep loader processes between epochs; epochs start faster, with more memory."
    )
    dataloader_prefetch_factor: int | None = argument(
        None, "Batches that each loader process prefetches; needs `dataloader_num_workers` above 0."
    )
    dataloader_multiprocessing_context: str | None = argument(
        None, "Start method of loader processes; unset, torch's default.", choices=list(WORKER_START_METHODS)
    )
    dataloader_in_order: bool = argument(
        True, "Keep the order of batches; false returns the first batch that is ready."
    )
    remove_unused_columns: bool = argument(True, "Drop dataset columns that the model's forward does not accept.")
    label_names: list[str] | None = argument(
        None, "Names of the inputs that are labels; unset derives them from the model's forward."
    )
    train_sampling_strategy: str = argument(
        "random", "Order of training samples of datasets with a length.", choices=list(SAMPLING_STRATEGIES)
    )
    length_column_name: str = argument(
        "length",
        "Column of sample lengths, for an order by length; `remove_unused_columns=False` keeps it if the model does "
        "not accept it.",
    )


@dataclass
class DistributedFields:
    """Distributed data parallel, fully sharded data parallel and DeepSpeed."""

    ddp_find_unused_parameters: bool | None = argument(
        None, "Let DDP detect parameters without a gradient; unset, yes unless activations are checkpointed."
    )
    ddp_bucket_cap_mb: int | None = argument(None, "Size of DDP's gradient buckets in MiB; unset, torch's default.")
    ddp_broadcast_buffers: bool | None = argument(
        None, "Let DDP broadcast the main process's buffers at each forward; unset, yes."
    )
    ddp_static_graph: bool | None = argument(
        None, "Declare to DDP that each step uses the same parameters in the same order."
    )
    ddp_backend: str | None = argument(
        None,
        "Communication backend of the processes; unset, by the device.",
        choices=list(PROCESS_GROUP_BACKENDS),
    )
    ddp_timeout: int = argument(1800, "Timeout of collective operations in seconds.")
    fsdp: str | None = argument(
        None, "Shard parameters, gradients and optimizer state over the processes.", nargs="?", const=True
    )
    fsdp_config: dict[str, Any] | str | None = argument(
        None, "Settings of `fsdp` as a dict or the path of a JSON file."
    )
    deepspeed: dict[str, Any] | str | None = argument(
        None, "DeepSpeed configuration as a dict or the path of a JSON file; setting it enables DeepSpeed."
    )


@dataclass
class ScriptFields:
    """Debug switches, tasks of a script, and its checkpoint."""

    debug: str | list[DebugOption] = argument(
        "", "Extra checks, separated by spaces: `underflow_overflow`, `tpu_metrics_debug`."
    )
    skip_memory_metrics: bool = argument(True, "Omit memory use from the metrics; measuring it slows training down.")
    do_train: bool = argument(False, "Whether a script trains; for your script, the Trainer ignores it.")
    do_eval: bool = argument(False, "Whether a script evaluates; true if `eval_strategy` is not `no`.")
    do_predict: bool = argument(False, "Whether a script predicts test data; for your script, the Trainer ignores it.")
    resume_from_checkpoint: str | None = argument(
        None,
        "`auto`: `train()` resumes from the newest intact checkpoint in `output_dir`, if there is one. Scripts pass "
        "other values to `train(resume_from_checkpoint=...)`.",
    )
    local_rank: int = argument(
        -1,
        "Rank on this node, for old launchers and scripts; read `local_process_index` instead.",
    )


# Keyword-only, so that positional arguments of subclasses do not shift.
@dataclass(kw_only=True)
class AdditionalFields:
    """Arguments that only littrainer has, and earlier arguments of transformers."""

    warmup_ratio: float | None = argument(
        None, "Warmup as a share of all steps; above 0 it overrides `warmup_steps`, which accepts a share too."
    )
    logging_dir: str | None = argument(None, "Folder for TensorBoard files.")
    lightning: dict[str, Any] | str | None = argument(
        None, "Keywords of `lightning.Trainer`, such as `profiler` or `plugins`."
    )
    async_save: bool = argument(
        False,
        "Write checkpoints in the background; training waits for a copy of model and optimizer to host memory.",
    )
    jit_checkpoint_signals: list[str] | str | None = argument(
        None,
        "Names of signals on which to save and stop; setting them enables `enable_jit_checkpoint`; unset, SIGTERM.",
    )
    eval_loss_weighting: str = argument(
        EVAL_LOSS_WEIGHTINGS[0],
        "Weight of a batch's mean loss in the evaluation loss: `batches`, the batch size, as in transformers, or the "
        "number of samples in the last batch of a dataset with a length; `samples`, its samples; `labels`, its labels "
        "other than -100, which is exact if each token has a label.",
        choices=list(EVAL_LOSS_WEIGHTINGS),
    )
    save_minutes: float | None = argument(None, "Minutes after the last checkpoint at which to save.")
    eval_minutes: float | None = argument(None, "Minutes after the last evaluation at which to evaluate.")
    eval_at_end: bool = argument(
        False,
        "Evaluate after the last step, unless that step was evaluated, and save if the metric is the best (with "
        "`save_strategy` other than `no`).",
    )
    max_minutes: float | None = argument(
        None,
        "Minutes after which a call of `train()`, also a resumed one, ends as at `max_steps`.",
    )
    hang_timeout: float | None = argument(
        None,
        "Seconds without progress after which training prints the stacks of all threads and ends with an error.",
    )
    signature_columns: list[str] | None = argument(
        None, "Dataset columns to keep, instead of the arguments of the model's forward and the labels."
    )
    max_tokens_per_batch: int | None = argument(
        None, "Maximum tokens, with padding, of a batch of samples of similar length; in evaluation too."
    )
    pack_to_length: int | None = argument(
        None, "Tokens per row into which documents are packed for a causal language model; rows are samples."
    )
    on_nonfinite: str = argument(
        ON_NONFINITE[0],
        "Policy for non-finite losses or gradients: `warn` logs the first non-finite value, at the next log at the "
        "latest; `skip` skips the optimizer step; `rollback` resumes from the last finite checkpoint without that "
        "batch; `stop` ends training with an error before the next save.",
        choices=list(ON_NONFINITE),
    )
    spike_factor: float | None = argument(
        None, "Treat a gradient norm above this multiple of the median of the last 100 as non-finite."
    )
    save_total_limit_best: int | None = argument(
        None,
        "Best checkpoints by `metric_for_best_model` to keep, in addition to the newest `save_total_limit` (unset, 1).",
    )
    keep_optimizer_states: int | None = argument(
        None,
        "Newest checkpoints that keep optimizer states; older checkpoints keep only weights. Unset, all keep them.",
    )
    loss_normalization: str = argument(
        LOSS_NORMALIZATIONS[0],
        "Divisor of the losses of an optimizer step: `transformers`, as there; `exact`, its samples or labels in all "
        "micro-batches and processes, so that loss and gradients do not depend on the micro-batch size.",
        choices=list(LOSS_NORMALIZATIONS),
    )
    global_batch_size: int | None = argument(
        None,
        "Samples of an optimizer step in all processes; sets `gradient_accumulation_steps` on any number of devices.",
    )
    log_speed: bool = argument(False, "Log the seconds of each part of a step, throughput, padding and seconds left.")
    auto_micro_batch: bool = argument(
        False, "Repeat an optimizer step with smaller micro-batches when out of memory; samples and loss do not change."
    )
    ema_decay: float | None = argument(
        None, "Decay per optimizer step of an exponential moving average of the weights; unset disables it."
    )
    ema_use: str = argument(
        EMA_USES[0], "Use of the averaged weights: `evaluate`, `save` or `both`.", choices=list(EMA_USES)
    )


@runtime_checkable
class GenerationConfig(Protocol):
    """Protocol of transformers' GenerationConfig, which may not be installed."""

    def validate(self, strict: bool = False) -> Any: ...

    def to_dict(self) -> dict[str, Any]: ...

    def from_model_config(self, model_config: Any) -> Any: ...


# A generated representation would show tokens.
@dataclass(repr=False)
class GenerationFields:
    """Batches of similar length, and generation in evaluation (`Seq2SeqTrainingArguments`)."""

    sortish_sampler: bool = argument(
        False, "Form batches of samples of similar length, in random order, to save padding."
    )
    predict_with_generate: bool = argument(
        False, "Predict generated tokens instead of logits, for metrics such as ROUGE."
    )
    generation_max_length: int | None = argument(
        None, "Maximum tokens to generate, including the first; unset, the generation config decides."
    )
    generation_num_beams: int | None = argument(
        None, "Beams of the beam search, 1 for none; unset, the generation config decides."
    )
    generation_config: str | Path | GenerationConfig | None = argument(
        None, "Generation config: an object, a file, a folder with such a file, or a model id."
    )


# In reverse order, since a dataclass takes the fields of its last base first. In optional unions `str` is second:
# transformers' HfArgumentParser parses values as the second member, and fails on `None` or `list[str]` there.
@dataclass
class ArgumentFields(
    AdditionalFields,
    ScriptFields,
    DistributedFields,
    DataFields,
    EnvironmentFields,
    SavingFields,
    EvaluationFields,
    LoggingFields,
    PrecisionFields,
    OptimizationFields,
    ScheduleFields,
):
    """Fields of TrainingArguments."""


def list_topics(cls: type) -> list[type]:
    """Return the topics of an argument class in positional order."""
    topics = list(reversed(ArgumentFields.__bases__)) if issubclass(cls, ArgumentFields) else []
    return [*topics, GenerationFields] if issubclass(cls, GenerationFields) else topics


def get_default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
