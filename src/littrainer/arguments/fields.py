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
    """Output folder, duration, learning rate and schedule."""

    # Normalization replaces None.
    output_dir: str = argument(
        cast("str", None),
        "Folder or URL, such as `s3://bucket/run`, for checkpoints and the model; default: `trainer_output`.",
    )
    per_device_train_batch_size: int = argument(8, "Samples per micro-batch on each device.")
    num_train_epochs: float = argument(3.0, "Epochs to train; a fraction ends within the last one.")
    max_steps: int = argument(-1, "Optimizer steps to train; above 0 it overrides `num_train_epochs`.")
    learning_rate: float = argument(5e-5, "Peak learning rate, after warmup.")
    lr_scheduler_type: SchedulerType | str = argument("linear", "Shape of the learning-rate curve after warmup.")
    lr_scheduler_kwargs: dict[str, Any] | str | None = argument(
        None, "Settings of the schedule, such as `num_cycles`, as a dict or JSON."
    )
    warmup_steps: float = argument(0, "Steps of linear warmup; below 1, a share of all steps.")


@dataclass
class OptimizationFields:
    """Optimizer, accumulation and clipping."""

    optim: OptimizerNames | str = argument("adamw_torch_fused", "Name of the optimizer.")
    optim_args: str | None = argument(None, "Settings of the optimizer, as `key=value,key=value`.")
    weight_decay: float = argument(0.0, "Weight decay, except for biases and normalization weights.")
    adam_beta1: float = argument(0.9, "AdamW's decay rate of the mean gradient.")
    adam_beta2: float = argument(0.999, "AdamW's decay rate of the mean squared gradient.")
    adam_epsilon: float = argument(1e-8, "AdamW's addend to the denominator, for stability.")
    optim_target_modules: list[str] | str | None = argument(
        None,
        "Modules that GaLore or APOLLO projects: names, a regular expression or `all-linear`.",
    )
    gradient_accumulation_steps: int = argument(1, "Micro-batches per optimizer step.")
    average_tokens_across_devices: bool = argument(True, "Weight target tokens equally across processes.")
    max_grad_norm: float = argument(
        1.0, "Maximum 2-norm, to which gradients are clipped; 0 or below disables clipping."
    )
    label_smoothing_factor: float = argument(0.0, "Probability mass moved from the true label to all labels.")


@dataclass
class PrecisionFields:
    """Precision, memory and compilation."""

    bf16: bool = argument(False, "Train in bfloat16 mixed precision.")
    fp16: bool = argument(False, "Train in float16 mixed precision with loss scaling.")
    bf16_full_eval: bool = argument(False, "Evaluate in bfloat16.")
    fp16_full_eval: bool = argument(False, "Evaluate in float16.")
    tf32: bool | None = argument(None, "Allow or forbid TF32 on NVIDIA GPUs; default: torch's setting.")
    activation_checkpointing: bool | None = argument(
        None,
        "Recompute activations in the backward pass, to save memory.",
        nargs="?",
        const=True,
    )
    activation_checkpointing_kwargs: dict[str, Any] | str | None = argument(
        None, "Settings of activation checkpointing, such as `use_reentrant`."
    )
    gradient_checkpointing: bool | None = argument(None, "Alias of `activation_checkpointing`.", nargs="?", const=True)
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = argument(
        None, "Alias of `activation_checkpointing_kwargs`."
    )
    torch_compile: bool = argument(False, "Compile the model with `torch.compile`.")
    torch_compile_backend: str | None = argument(None, "Backend of `torch.compile`; enables it.")
    torch_compile_mode: str | None = argument(None, "Mode of `torch.compile`; enables it.")
    use_liger_kernel: bool = argument(False, "Use Liger's Triton kernels.")
    liger_kernel_config: dict[str, bool] | None = argument(
        None, "Liger kernels to enable or disable, by name; default: the model's."
    )
    use_cache: bool = argument(False, "`model.config.use_cache` during training.")
    neftune_noise_alpha: float | None = argument(None, "Strength of NEFTune noise in embeddings during training.")
    torch_empty_cache_steps: int | None = argument(None, "Steps between releases of the device's cached memory.")
    auto_find_batch_size: bool = argument(False, "Restart with a smaller micro-batch when out of memory.")


@dataclass
class LoggingFields:
    """Logs, progress bars and experiment trackers."""

    logging_strategy: IntervalStrategy | str = argument("steps", "When to log: `no`, every `steps` or each `epoch`.")
    logging_steps: float = argument(500, "Steps between logs; below 1, a share of all steps.")
    logging_first_step: bool = argument(False, "Log the first optimizer step too.")
    log_on_each_node: bool = argument(True, "Log on each node, not only the first.")
    logging_nan_inf_filter: bool = argument(True, "Exclude non-finite losses from the logged mean, not from gradients.")
    include_num_input_tokens_seen: str | bool = argument(
        "no", "Log the number of input tokens: `all` (or true), `non_padding` or `no`."
    )
    log_level: str = argument(
        "passive", "Log level of the main process; `passive` keeps the application's.", choices=list(LOG_LEVELS)
    )
    log_level_replica: str = argument(
        "warning",
        "Log level of the other processes; `passive` keeps the application's.",
        choices=list(LOG_LEVELS),
    )
    disable_tqdm: bool | None = argument(
        None, "Hide progress bars; default: show them on a terminal that shows warnings."
    )
    report_to: list[str] | str | None = argument(
        "none", "Experiment trackers by name, `all` installed ones, or `none`."
    )
    run_name: str | None = argument(None, "Name of the run in trackers.")
    project: str = argument("huggingface", "Name of the project in trackers.")
    trackio_space_id: str | None = argument(None, "Hugging Face Space for Trackio.")
    trackio_bucket_id: str | None = argument(None, "Hugging Face storage bucket for Trackio.")
    trackio_static_space_id: Literal[False] | str | None = argument(
        None, "Static Space that Trackio publishes after training; false: none."
    )


@dataclass
class EvaluationFields:
    """Evaluation."""

    eval_strategy: IntervalStrategy | str = argument("no", "When to evaluate: `no`, every `steps` or each `epoch`.")
    eval_steps: float | None = argument(
        None, "Steps between evaluations; below 1, a share of all steps; default: `logging_steps`."
    )
    eval_delay: float = argument(0, "Epochs or steps, by `eval_strategy`, before the first evaluation.")
    per_device_eval_batch_size: int = argument(8, "Samples per evaluation batch on each device.")
    prediction_loss_only: bool = argument(False, "Evaluate only the loss.")
    eval_on_start: bool = argument(False, "Evaluate before the first training step.")
    eval_do_concat_batches: bool = argument(
        True, "Concatenate predictions; false passes a list of batches to `compute_metrics`."
    )
    eval_use_gather_object: bool = argument(
        False, "Gather predictions as Python objects, for outputs other than tensors."
    )
    eval_accumulation_steps: int | None = argument(
        None, "Evaluation batches after which predictions move to host memory; default: all."
    )
    include_for_metrics: list[str] = argument(
        help="Further values for `compute_metrics`: `inputs`, `loss`.",
        default_factory=list,
    )
    batch_eval_metrics: bool = argument(False, "Call `compute_metrics` for each batch, and store no predictions.")


@dataclass
class SavingFields:
    """Checkpoints and the Hub."""

    save_only_model: bool = argument(
        False, "Save no optimizer, schedule and random states; such checkpoints cannot be resumed."
    )
    save_strategy: SaveStrategy | str = argument(
        "steps", "When to save: `no`, every `steps`, each `epoch` or at each `best` metric."
    )
    save_steps: float = argument(500, "Steps between checkpoints; below 1, a share of all steps.")
    save_on_each_node: bool = argument(False, "Save on every node, if they share no disk.")
    save_total_limit: int | None = argument(
        None,
        "Maximum number of checkpoints, including the newest and the best; unset, 0 or below: no limit.",
    )
    enable_jit_checkpoint: bool = argument(False, "Save and end training on SIGTERM.")
    push_to_hub: bool = argument(False, "Push saved models to the Hub.")
    hub_token: str | None = argument(None, "Token for the Hub; default: that of `hf auth login`.")
    hub_private_repo: bool | None = argument(
        None, "Create a private Hub repository; default: the organisation's setting."
    )
    hub_model_id: str | None = argument(
        None, "Hub repository, `name` or `organisation/name`; default: the output folder's name."
    )
    hub_strategy: HubStrategy | str = argument(
        "every_save", "When and what to push: `end`, `every_save`, `checkpoint` or `all_checkpoints`."
    )
    hub_always_push: bool = argument(False, "Push while the previous push is running.")
    hub_revision: str | None = argument(None, "Branch of the Hub repository.")
    load_best_model_at_end: bool = argument(
        False, "Load the best checkpoint after training; needs an evaluation at each save."
    )
    metric_for_best_model: str | None = argument(
        None,
        "Metric that ranks checkpoints, with or without `eval_`; default: the loss, if needed.",
    )
    greater_is_better: bool | None = argument(
        None, "Whether a larger metric is better; default: unless its name ends in `loss`."
    )
    ignore_data_skip: bool = argument(False, "Resume at the epoch's first batch instead of skipping used batches.")
    restore_callback_states_from_checkpoint: bool = argument(
        None,
        "Restore callback states on resume; default: early stopping's only; false: none.",
    )


@dataclass
class EnvironmentFields:
    """Seeds, device and accelerate's settings."""

    full_determinism: bool = argument(False, "Use deterministic, slower kernels, for reproducible runs.")
    seed: int = argument(42, "Random seed.")
    data_seed: int | None = argument(None, "Random seed of the training sampler; default: `seed`.")
    use_cpu: bool = argument(False, "Run on the CPU even if there is a GPU.")
    accelerator_config: dict[str, Any] | str | AcceleratorConfig | None = argument(
        None,
        "Settings of batches, as a dict or JSON file; `split_batches`, `even_batches` and `sync_each_batch` need "
        "several processes.",
    )
    parallelism_config: Any | None = argument(
        None,
        "Layout of the processes: a dict with `dp_replicate_size`, `dp_shard_size`, `tp_size`, `sp_size` or `cp_size`, "
        "or accelerate's ParallelismConfig.",
    )


@dataclass
class DataFields:
    """Data loading."""

    dataloader_drop_last: bool = argument(False, "Drop an incomplete last batch of an epoch.")
    dataloader_num_workers: int = argument(0, "Loader processes; 0 loads in the training process.")
    dataloader_pin_memory: bool = argument(True, "Load into pinned memory, for faster copies to a GPU.")
    dataloader_persistent_workers: bool = argument(
        False, "Keep loader processes between epochs, for speed at the cost of memory."
    )
    dataloader_prefetch_factor: int | None = argument(
        None, "Batches that each loader process prefetches; needs loader processes."
    )
    dataloader_multiprocessing_context: str | None = argument(
        None, "Start method of loader processes; default: torch's.", choices=list(WORKER_START_METHODS)
    )
    dataloader_in_order: bool = argument(True, "Keep the order of batches; false returns the first that is ready.")
    remove_unused_columns: bool = argument(True, "Drop dataset columns that the model's forward does not accept.")
    label_names: list[str] | None = argument(None, "Names of the label inputs; default: from the model's forward.")
    train_sampling_strategy: str = argument(
        "random", "Order of training samples of datasets with a length.", choices=list(SAMPLING_STRATEGIES)
    )
    length_column_name: str = argument(
        "length",
        "Column of sample lengths, for an order by length; `remove_unused_columns=False` keeps it.",
    )


@dataclass
class DistributedFields:
    """DDP, FSDP and DeepSpeed."""

    ddp_find_unused_parameters: bool | None = argument(
        None, "Let DDP detect unused parameters; default: unless activations are checkpointed."
    )
    ddp_bucket_cap_mb: int | None = argument(None, "DDP's gradient buckets in MiB; default: torch's.")
    ddp_broadcast_buffers: bool | None = argument(None, "Let DDP broadcast buffers at each forward; default: yes.")
    ddp_static_graph: bool | None = argument(None, "Declare that DDP's graph of used parameters never changes.")
    ddp_backend: str | None = argument(
        None,
        "Communication backend; default: by device.",
        choices=list(PROCESS_GROUP_BACKENDS),
    )
    ddp_timeout: int = argument(1800, "Timeout of collective operations in seconds.")
    fsdp: str | None = argument(
        None, "Shard parameters, gradients and optimizer state over the processes.", nargs="?", const=True
    )
    fsdp_config: dict[str, Any] | str | None = argument(None, "Settings of `fsdp`, as a dict or JSON file.")
    deepspeed: dict[str, Any] | str | None = argument(
        None, "DeepSpeed configuration, as a dict or JSON file; enables it."
    )


@dataclass
class ScriptFields:
    """Debugging, and arguments for your script."""

    debug: str | list[DebugOption] = argument("", "Extra checks: `underflow_overflow`.")
    skip_memory_metrics: bool = argument(True, "Omit memory from the metrics; measuring it is slow.")
    do_train: bool = argument(False, "Whether your script trains; the Trainer ignores it.")
    do_eval: bool = argument(False, "Whether your script evaluates; true if `eval_strategy` is not `no`.")
    do_predict: bool = argument(False, "Whether your script predicts; the Trainer ignores it.")
    resume_from_checkpoint: str | None = argument(
        None,
        "Resume in `train()`: `auto` takes the newest intact checkpoint in `output_dir`, if any; scripts pass "
        "other values to `train()`.",
    )
    local_rank: int = argument(
        -1,
        "Rank on this node, for old scripts; read `local_process_index`.",
    )


# Keyword-only, so that positional arguments of subclasses do not shift.
@dataclass(kw_only=True)
class AdditionalFields:
    """Arguments of littrainer and of earlier releases."""

    warmup_ratio: float | None = argument(None, "Warmup as a share of all steps; above 0 it overrides `warmup_steps`.")
    logging_dir: str | None = argument(None, "Folder for TensorBoard files.")
    lightning: dict[str, Any] | str | None = argument(
        None, "Keywords of `lightning.Trainer`, such as `profiler` or `plugins`."
    )
    async_save: bool = argument(
        False,
        "Write checkpoints in the background, after a copy to host memory.",
    )
    jit_checkpoint_signals: list[str] | str | None = argument(
        None,
        "Signals on which to save and stop; enables `enable_jit_checkpoint`; default: SIGTERM.",
    )
    eval_loss_weighting: str = argument(
        EVAL_LOSS_WEIGHTINGS[0],
        "Weight of a batch's mean loss in `eval_loss`: `batches`, as in transformers; its `samples`; or its `labels`, "
        "exact if each token has a label.",
        choices=list(EVAL_LOSS_WEIGHTINGS),
    )
    save_minutes: float | None = argument(None, "Save after so many minutes without a checkpoint.")
    eval_minutes: float | None = argument(None, "Evaluate after so many minutes without an evaluation.")
    eval_at_end: bool = argument(
        False,
        "Evaluate after the last step, unless it was just evaluated; save it if it is the best and `save_strategy` "
        "is not `no`.",
    )
    max_minutes: float | None = argument(
        None,
        "Minutes after which each `train()` ends as at `max_steps`.",
    )
    hang_timeout: float | None = argument(
        None,
        "Seconds without progress after which training prints stacks and ends with an error.",
    )
    signature_columns: list[str] | None = argument(
        None, "Dataset columns to keep; default: the arguments of the model's forward, and the labels."
    )
    max_tokens_per_batch: int | None = argument(
        None, "Maximum tokens, with padding, of a batch of samples of similar length; in evaluation too."
    )
    pack_to_length: int | None = argument(
        None, "Tokens per row into which documents are packed for causal language models."
    )
    on_nonfinite: str = argument(
        ON_NONFINITE[0],
        "Policy for non-finite losses or gradients: `warn`; `skip` the optimizer step; `rollback` to the last finite "
        "checkpoint without that batch; `stop` with an error before the next save.",
        choices=list(ON_NONFINITE),
    )
    spike_factor: float | None = argument(
        None, "Multiple of the last 100 gradient norms' median above which a norm counts as non-finite."
    )
    save_total_limit_best: int | None = argument(
        None,
        "Best checkpoints by `metric_for_best_model` to keep, in addition to the newest `save_total_limit` "
        "(default 1).",
    )
    keep_optimizer_states: int | None = argument(
        None,
        "Newest checkpoints that keep optimizer states; older ones keep only weights. Default: all.",
    )
    loss_normalization: str = argument(
        LOSS_NORMALIZATIONS[0],
        "Divisor of an optimizer step's losses: as in `transformers`, or `exact`, its samples or labels in all "
        "processes, whatever the micro-batch size.",
        choices=list(LOSS_NORMALIZATIONS),
    )
    global_batch_size: int | None = argument(
        None,
        "Samples per optimizer step in all processes; sets `gradient_accumulation_steps`.",
    )
    log_speed: bool = argument(False, "Log seconds of each part of a step, throughput, padding and seconds left.")
    auto_micro_batch: bool = argument(
        False, "Repeat a step with smaller micro-batches when out of memory; the loss does not change."
    )
    ema_decay: float | None = argument(
        None, "Decay per optimizer step of an exponential moving average of the weights."
    )
    ema_use: str = argument(
        EMA_USES[0], "Use of the averaged weights: `evaluate`, `save` or `both`.", choices=list(EMA_USES)
    )
    chunked_loss: bool = argument(
        False, "Compute the loss of a language model over chunks of tokens, without the logits of a whole batch."
    )
    log_loss_terms: bool = argument(
        False, "Log the means of further scalar losses in the outputs of the model or of `compute_loss`, as `aux_loss`."
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
    """Sequence to sequence (`Seq2SeqTrainingArguments`)."""

    sortish_sampler: bool = argument(False, "Form batches of similar length, in random order.")
    predict_with_generate: bool = argument(False, "Predict generated tokens, not logits, for metrics such as ROUGE.")
    generation_max_length: int | None = argument(
        None, "Maximum tokens to generate, including the first; default: the generation config's."
    )
    generation_num_beams: int | None = argument(
        None, "Beams of the beam search, 1 for none; default: the generation config's."
    )
    generation_config: str | Path | GenerationConfig | None = argument(
        None, "Generation config: an object, a file, a folder with one, or a model id."
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
