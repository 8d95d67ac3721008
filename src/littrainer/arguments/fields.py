"""All arguments by topic, each with its default and its help, and their documented positional order."""

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

# Signals with which schedulers and users announce the end of a process, as far as this platform has them.
ANNOUNCING_SIGNALS = tuple(
    name
    for name in ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU", "SIGINT")
    if name in signal.Signals.__members__
)
DEFAULT_ANNOUNCING_SIGNAL = "SIGTERM"

# The first one is the default.
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
    """Return the dataclass field of an argument, which describes itself.

    Parameters:
        default, default_factory: as in `dataclasses.field`.
        help: one line that says what the argument does, with its unit; parsers and the documentation read it.
        parser_options: further options of a command-line parser, such as `choices`, `nargs` or `const`.
    """
    metadata = {"help": help, **parser_options}
    return dataclasses.field(default=default, default_factory=default_factory, metadata=metadata)


@dataclass
class ScheduleFields:
    """Output folder, micro-batch size, duration, learning rate and its schedule."""

    # None becomes the default folder at construction, so readers find a string.
    output_dir: str = argument(
        cast("str", None),
        "Folder for checkpoints and the final model, or an address such as `s3://bucket/run`; `trainer_output` if none "
        "is given.",
    )
    per_device_train_batch_size: int = argument(8, "Samples in one training micro-batch on each device.")
    num_train_epochs: float = argument(
        3.0, "Passes over the training data; a fraction stops part of the way through the last pass."
    )
    max_steps: int = argument(
        -1, "Optimizer steps to train for; when positive it decides instead of `num_train_epochs`."
    )
    learning_rate: float = argument(5e-5, "Peak learning rate, reached when warmup is over.")
    lr_scheduler_type: SchedulerType | str = argument("linear", "Shape of the learning-rate curve after warmup.")
    lr_scheduler_kwargs: dict[str, Any] | str | None = argument(
        None, "Further settings of the schedule, such as `num_cycles`; a dict, or JSON on the command line."
    )
    warmup_steps: float = argument(
        0, "Length of the linear warmup: from 1 up in optimizer steps, below 1 as a share of all steps."
    )


@dataclass
class OptimizationFields:
    """Optimizer, weight decay, gradient accumulation, clipping and label smoothing."""

    optim: OptimizerNames | str = argument("adamw_torch_fused", "Name of the optimizer.")
    optim_args: str | None = argument(
        None, "Further settings for optimizers that take some, written as `key=value,key=value`."
    )
    weight_decay: float = argument(
        0.0, "Decay applied to weights by the optimizer; biases and normalisation weights are left out."
    )
    adam_beta1: float = argument(0.9, "AdamW's decay rate for the running mean of gradients.")
    adam_beta2: float = argument(0.999, "AdamW's decay rate for the running mean of squared gradients.")
    adam_epsilon: float = argument(1e-8, "AdamW's addend to the denominator, which keeps the division stable.")
    optim_target_modules: list[str] | str | None = argument(
        None,
        "Modules that a low-rank optimizer (GaLore, APOLLO) projects: names, a regular expression or `all-linear`.",
    )
    gradient_accumulation_steps: int = argument(1, "Micro-batches whose gradients are summed for one optimizer step.")
    average_tokens_across_devices: bool = argument(
        True, "Count the target tokens of an optimizer step over all processes, so that each token weighs the same."
    )
    max_grad_norm: float = argument(
        1.0, "Clip the gradient to this 2-norm before an optimizer step; 0 or below never clips."
    )
    label_smoothing_factor: float = argument(
        0.0, "Probability mass taken from the true label and spread over all labels; 0 leaves labels as they are."
    )


@dataclass
class PrecisionFields:
    """Mixed precision, activation checkpointing, compilation, fused kernels and memory pressure."""

    bf16: bool = argument(False, "Train in bfloat16 mixed precision.")
    fp16: bool = argument(False, "Train in float16 mixed precision with loss scaling.")
    bf16_full_eval: bool = argument(False, "Hold the model wholly in bfloat16 during evaluation.")
    fp16_full_eval: bool = argument(False, "Hold the model wholly in float16 during evaluation.")
    tf32: bool | None = argument(
        None, "Allow (true) or forbid (false) TF32 matrix products on NVIDIA GPUs; unset leaves torch's setting alone."
    )
    activation_checkpointing: bool | None = argument(
        None,
        "Recompute activations in the backward pass instead of storing them: less memory, more time.",
        nargs="?",
        const=True,
    )
    activation_checkpointing_kwargs: dict[str, Any] | str | None = argument(
        None, "Further settings of activation checkpointing, such as `use_reentrant`."
    )
    gradient_checkpointing: bool | None = argument(
        None, "Other name of `activation_checkpointing`.", nargs="?", const=True
    )
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = argument(
        None, "Other name of `activation_checkpointing_kwargs`."
    )
    torch_compile: bool = argument(False, "Compile the model with `torch.compile`.")
    torch_compile_backend: str | None = argument(
        None, "Backend for `torch.compile`; naming one switches compilation on."
    )
    torch_compile_mode: str | None = argument(None, "Mode for `torch.compile`; naming one switches compilation on.")
    use_liger_kernel: bool = argument(False, "Replace layers of the model by Liger's fused Triton kernels.")
    liger_kernel_config: dict[str, bool] | None = argument(
        None, "Which Liger kernels to apply, by name; unset applies the usual ones for the model."
    )
    use_cache: bool = argument(False, "Value of `model.config.use_cache` during training.")
    neftune_noise_alpha: float | None = argument(
        None, "Strength of the NEFTune noise added to embeddings in training; unset adds none."
    )
    torch_empty_cache_steps: int | None = argument(
        None, "Return the accelerator's cached memory every so many optimizer steps; unset never does."
    )
    auto_find_batch_size: bool = argument(
        False, "Start over with a smaller micro-batch when memory runs out, until it fits."
    )


@dataclass
class LoggingFields:
    """Logged values, log levels, progress bars and experiment trackers."""

    logging_strategy: IntervalStrategy | str = argument("steps", "When to log: `no`, every `steps` or each `epoch`.")
    logging_steps: float = argument(500, "Optimizer steps between two logs; below 1 it is a share of all steps.")
    logging_first_step: bool = argument(False, "Log after the first optimizer step too.")
    log_on_each_node: bool = argument(True, "Let the first process of each node log, not only that of the first node.")
    logging_nan_inf_filter: bool = argument(
        True, "Leave nan and infinite losses out of the logged mean; gradients are not touched."
    )
    include_num_input_tokens_seen: str | bool = argument(
        "no", "Count input tokens in the logs: `all`, `non_padding` or `no`; true means `all`."
    )
    log_level: str = argument(
        "passive", "Log level of the main process; `passive` leaves the application's level.", choices=list(LOG_LEVELS)
    )
    log_level_replica: str = argument(
        "warning",
        "Log level of the other processes; `passive` leaves the application's level.",
        choices=list(LOG_LEVELS),
    )
    disable_tqdm: bool | None = argument(
        None, "Show no progress bars; unset shows them on a terminal if warnings are shown, false anywhere."
    )
    report_to: list[str] | str | None = argument(
        "none", "Experiment trackers to report to, by name; `none` reports to none."
    )
    run_name: str | None = argument(None, "Name of this run in the experiment trackers.")
    project: str = argument("huggingface", "Name of the project in the experiment trackers that group runs.")
    trackio_space_id: str | None = argument(None, "Hugging Face Space to which Trackio sends the run.")
    trackio_bucket_id: str | None = argument(None, "Hugging Face storage bucket in which Trackio keeps the run.")
    trackio_static_space_id: Literal[False] | str | None = argument(
        None, "Static Space that Trackio publishes at the end of training; false publishes none."
    )


@dataclass
class EvaluationFields:
    """When to evaluate, on how much at a time, and what metrics are computed from."""

    eval_strategy: IntervalStrategy | str = argument(
        "no", "When to evaluate during training: `no`, every `steps` or each `epoch`."
    )
    eval_steps: float | None = argument(
        None, "Optimizer steps between two evaluations (below 1 a share of all steps); unset follows `logging_steps`."
    )
    eval_delay: float = argument(0, "Epochs or steps, by `eval_strategy`, before the first evaluation may happen.")
    per_device_eval_batch_size: int = argument(8, "Samples in one evaluation batch on each device.")
    prediction_loss_only: bool = argument(False, "Keep only the loss in evaluation, no predictions and no metrics.")
    eval_on_start: bool = argument(False, "Evaluate once before the first training step.")
    eval_do_concat_batches: bool = argument(
        True, "Join predictions of all batches to one array; false hands `compute_metrics` a list of batches."
    )
    eval_use_gather_object: bool = argument(
        False, "Gather predictions between processes as Python objects, for outputs that are not tensors."
    )
    eval_accumulation_steps: int | None = argument(
        None, "Evaluation batches after which predictions move to host memory; unset moves them at the end."
    )
    include_for_metrics: list[str] = argument(
        help="What `compute_metrics` gets with predictions and labels: `inputs`, `loss`.",
        default_factory=list,
    )
    batch_eval_metrics: bool = argument(
        False, "Call `compute_metrics` batch by batch and let it sum up, so that predictions are not kept."
    )


@dataclass
class SavingFields:
    """What is written and when, what is pushed, which checkpoint is best, how a resume behaves."""

    save_only_model: bool = argument(
        False, "Write the model without optimizer, schedule and random states; such a checkpoint cannot resume."
    )
    save_strategy: SaveStrategy | str = argument(
        "steps", "When to write a checkpoint: `no`, every `steps`, each `epoch` or at each `best` metric."
    )
    save_steps: float = argument(500, "Optimizer steps between two checkpoints; below 1 it is a share of all steps.")
    save_on_each_node: bool = argument(
        False, "Write on every node, for nodes that share no disk; on a shared disk leave it off."
    )
    save_total_limit: int | None = argument(
        None,
        "Checkpoints to keep, the newest and the best among them; older ones are deleted, with 0 or below none is.",
    )
    enable_jit_checkpoint: bool = argument(False, "Write a checkpoint and end training when the process gets SIGTERM.")
    push_to_hub: bool = argument(False, "Push the model to the Hub when it is saved.")
    hub_token: str | None = argument(None, "Token for pushing to the Hub; unset takes the one of `hf auth login`.")
    hub_private_repo: bool | None = argument(
        None, "Create the Hub repository as private; unset leaves it to the organisation."
    )
    hub_model_id: str | None = argument(
        None, "Hub repository, `name` or `organisation/name`; unset takes the name of the output folder."
    )
    hub_strategy: HubStrategy | str = argument(
        "every_save", "What to push and when: `end`, `every_save`, `checkpoint` or `all_checkpoints`."
    )
    hub_always_push: bool = argument(False, "Push even while the previous push is still running.")
    hub_revision: str | None = argument(None, "Branch of the Hub repository to push to.")
    load_best_model_at_end: bool = argument(
        False, "Load the best checkpoint when training ends; evaluation and saving must then happen together."
    )
    metric_for_best_model: str | None = argument(
        None,
        "Evaluation metric that ranks checkpoints, with or without `eval_`; unset, the loss if one is needed.",
    )
    greater_is_better: bool | None = argument(
        None, "Whether a larger metric is better; unset it is true for names that do not end in `loss`."
    )
    ignore_data_skip: bool = argument(
        False, "On resume start with the first batch of the epoch again instead of skipping those already seen."
    )
    restore_callback_states_from_checkpoint: bool = argument(
        None,
        "On resume give callbacks back the state they had when the checkpoint was written; unset, early stopping alone "
        "goes on with the evaluations it has counted, and false gives nothing back.",
    )


@dataclass
class EnvironmentFields:
    """Determinism, seeds, device and the settings users know from accelerate."""

    full_determinism: bool = argument(
        False, "Use deterministic kernels throughout, so that two runs are equal; slower, meant for debugging."
    )
    seed: int = argument(42, "Random seed set before training.")
    data_seed: int | None = argument(None, "Random seed of the training sampler; unset takes `seed`.")
    use_cpu: bool = argument(False, "Run on the CPU even if there is a GPU.")
    accelerator_config: dict[str, Any] | str | AcceleratorConfig | None = argument(
        None,
        "Settings of batches as a dict or the path of a JSON file; `split_batches`, `even_batches` and "
        "`sync_each_batch` are about several processes and change nothing in one.",
    )
    parallelism_config: Any | None = argument(
        None,
        "Layout of the processes: a dict with some of `dp_replicate_size`, `dp_shard_size` and `tp_size`, or "
        "accelerate's ParallelismConfig.",
    )


@dataclass
class DataFields:
    """Loader workers, which columns the model gets, how training samples are ordered."""

    dataloader_drop_last: bool = argument(False, "Leave out the last batch of an epoch if it is not full.")
    dataloader_num_workers: int = argument(0, "Processes that load data; 0 loads in the training process.")
    dataloader_pin_memory: bool = argument(True, "Load batches into page-locked memory, for faster copies to a GPU.")
    dataloader_persistent_workers: bool = argument(
        False, "Keep loader processes alive between epochs: a faster start of an epoch for more memory."
    )
    dataloader_prefetch_factor: int | None = argument(
        None, "Batches each loader process prepares ahead; needs `dataloader_num_workers` above 0."
    )
    dataloader_multiprocessing_context: str | None = argument(
        None, "How loader processes are started; unset takes torch's way.", choices=list(WORKER_START_METHODS)
    )
    dataloader_in_order: bool = argument(
        True, "Hand out batches in the order they were asked for; false hands out whichever is ready first."
    )
    remove_unused_columns: bool = argument(True, "Drop dataset columns that the model's forward does not take.")
    label_names: list[str] | None = argument(
        None, "Keys of the inputs that are labels; unset finds them in the model's forward."
    )
    train_sampling_strategy: str = argument(
        "random", "Order of training samples for datasets that have a length.", choices=list(SAMPLING_STRATEGIES)
    )
    length_column_name: str = argument(
        "length",
        "Column with sample lengths, for an order by length; `remove_unused_columns=False` keeps one that the model "
        "does not take.",
    )


@dataclass
class DistributedFields:
    """Distributed data parallel, fully sharded data parallel and DeepSpeed."""

    ddp_find_unused_parameters: bool | None = argument(
        None, "DDP searches for parameters that got no gradient; unset does unless activations are checkpointed."
    )
    ddp_bucket_cap_mb: int | None = argument(None, "Size of DDP's gradient buckets in MiB; unset takes torch's.")
    ddp_broadcast_buffers: bool | None = argument(
        None, "DDP copies the main process's buffers at each forward; unset does too."
    )
    ddp_static_graph: bool | None = argument(
        None, "Tell DDP that each step uses the same parameters in the same order."
    )
    ddp_backend: str | None = argument(
        None, "Communication library of the processes; unset fits the device.", choices=list(PROCESS_GROUP_BACKENDS)
    )
    ddp_timeout: int = argument(1800, "Seconds after which a collective operation gives up.")
    fsdp: str | None = argument(
        None, "Shard parameters, gradients and optimizer state over the processes.", nargs="?", const=True
    )
    fsdp_config: dict[str, Any] | str | None = argument(
        None, "Settings of `fsdp` as a dict or the path of a JSON file."
    )
    deepspeed: dict[str, Any] | str | None = argument(
        None, "DeepSpeed configuration as a dict or the path of a JSON file; giving one switches DeepSpeed on."
    )


@dataclass
class ScriptFields:
    """Debug switches, what a script is to do, and the checkpoint it starts from."""

    debug: str | list[DebugOption] = argument(
        "", "Extra checks, by name and separated by blanks: `underflow_overflow`, `tpu_metrics_debug`."
    )
    skip_memory_metrics: bool = argument(True, "Leave memory use out of the metrics; measuring it slows training down.")
    do_train: bool = argument(False, "For scripts: whether to train. The Trainer does not read it.")
    do_eval: bool = argument(False, "For scripts: whether to evaluate; becomes true when `eval_strategy` is not `no`.")
    do_predict: bool = argument(False, "For scripts: whether to predict on test data. The Trainer does not read it.")
    resume_from_checkpoint: str | None = argument(
        None,
        "`auto`: `train()` goes on from the newest intact checkpoint in `output_dir`, or begins if there is none. Any "
        "other value is for scripts, to hand to `train(resume_from_checkpoint=...)`.",
    )
    local_rank: int = argument(
        -1,
        "Kept for old launchers that pass it. A launcher's rank on this machine is written here, as in "
        "transformers 4; read `local_process_index` instead.",
    )


# By keyword only, so that they shift no argument of a subclass that is given by position.
@dataclass(kw_only=True)
class AdditionalFields:
    """Warmup as a ratio, the TensorBoard folder, keywords for Lightning, how checkpoints are saved, losses averaged."""

    warmup_ratio: float | None = argument(
        None, "Share of all steps to warm up for; above 0 it replaces `warmup_steps`, which takes a share as well."
    )
    logging_dir: str | None = argument(None, "Folder for TensorBoard files.")
    lightning: dict[str, Any] | str | None = argument(
        None, "Further keywords for `lightning.Trainer`, such as `profiler` or `plugins`."
    )
    async_save: bool = argument(
        False,
        "Write checkpoints in the background; training waits only for a copy of model and optimizer in host memory.",
    )
    jit_checkpoint_signals: list[str] | str | None = argument(
        None,
        "Signals on which `enable_jit_checkpoint` saves and stops, one or several by name, which set it; unset, "
        "SIGTERM.",
    )
    eval_loss_weighting: str = argument(
        EVAL_LOSS_WEIGHTINGS[0],
        "What a batch's mean loss counts for in the evaluation loss: `batches`, as in transformers, for the batch "
        "size, or for its samples if it is the last one of a dataset with a length; `samples` for the samples "
        "in it; `labels` for its labels other than -100, which is exact if each token has one.",
        choices=list(EVAL_LOSS_WEIGHTINGS),
    )
    save_minutes: float | None = argument(None, "Save a checkpoint if the last one is so many minutes old.")
    eval_minutes: float | None = argument(None, "Evaluate if the last evaluation is so many minutes past.")
    max_minutes: float | None = argument(
        None,
        "End training after so many minutes of this call of `train()`, as at `max_steps`; a resumed one has as many.",
    )
    hang_timeout: float | None = argument(
        None,
        "End a training that has not moved for so many seconds, with an error, after printing the Python stacks of all "
        "threads.",
    )
    max_tokens_per_batch: int | None = argument(
        None, "Tokens, with padding, up to which batches of samples of similar length are formed; in evaluation too."
    )
    pack_to_length: int | None = argument(
        None, "Tokens of a row up to which documents are packed to train a causal language model; rows are samples."
    )
    on_nonfinite: str = argument(
        ON_NONFINITE[0],
        "What happens if loss or gradients are not finite: `warn` tells what came first, at the latest at the next "
        "log; `skip` leaves the optimizer step out; `rollback` goes back to the last healthy checkpoint and leaves "
        "that batch out; `stop` ends the training with an error, before anything sick is saved.",
        choices=list(ON_NONFINITE),
    )
    spike_factor: float | None = argument(
        None, "Treat a gradient norm of more than so many times the median of the last 100 as one that is not finite."
    )
    save_total_limit_best: int | None = argument(
        None,
        "Checkpoints to keep for their `metric_for_best_model`, besides the newest `save_total_limit` (1 if unset).",
    )
    keep_optimizer_states: int | None = argument(
        None,
        "Newest checkpoints that can be resumed from; older ones are thinned to their weights. Unset, none is thinned.",
    )
    loss_normalization: str = argument(
        LOSS_NORMALIZATIONS[0],
        "What the losses of an optimizer step are divided by: `transformers`, as there; `exact`, by its samples or "
        "labels in all micro-batches and processes, so that loss and gradients do not depend on how they are split.",
        choices=list(LOSS_NORMALIZATIONS),
    )
    global_batch_size: int | None = argument(
        None,
        "Samples of an optimizer step in all processes together; sets `gradient_accumulation_steps`, so that they stay "
        "as many on other machines.",
    )
    log_speed: bool = argument(
        False, "Log where the time goes: seconds of each part of the steps, rates, padding, seconds left."
    )
    auto_micro_batch: bool = argument(
        False, "Do an optimizer step again in smaller micro-batches if memory runs out; its samples and loss stay."
    )
    ema_decay: float | None = argument(
        None, "Keep an average of the weights; it keeps this share of itself at each optimizer step."
    )
    ema_use: str = argument(
        EMA_USES[0], "What has the averaged weights: to `evaluate`, to `save`, or `both`.", choices=list(EMA_USES)
    )


@runtime_checkable
class GenerationConfig(Protocol):
    """The part of transformers' class of this name that is read; it may not be installed."""

    def validate(self, strict: bool = False) -> Any:
        """Refuse settings that contradict each other."""

    def to_dict(self) -> dict[str, Any]:
        """The settings by name."""

    def from_model_config(self, model_config: Any) -> Any:
        """Settings that an older model's configuration holds."""


# A generated representation would show tokens.
@dataclass(repr=False)
class GenerationFields:
    """Batches of similar length, and what `Seq2SeqTrainer` generates in evaluation (`Seq2SeqTrainingArguments`)."""

    sortish_sampler: bool = argument(
        False, "Train on batches of samples of similar length, in random order, which saves padding."
    )
    predict_with_generate: bool = argument(
        False, "Predictions are what the model generates, not its logits; for metrics such as ROUGE."
    )
    generation_max_length: int | None = argument(
        None, "Tokens to generate at most, with the first one; unset leaves it to the generation config."
    )
    generation_num_beams: int | None = argument(
        None, "Beams to search with, 1 for no beam search; unset leaves it to the generation config."
    )
    generation_config: str | Path | GenerationConfig | None = argument(
        None, "Generation config of the model: an object, a file, a folder that holds one, or a model id."
    )


# A dataclass takes the fields of its last base first, so the topics stand here from last to first.
#
# In the annotations of optional unions `str` stands second: transformers' HfArgumentParser reads a value from the
# command line as the second member of such a union, and fails on `None` or `list[str]` in the other places.
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
    """The fields of TrainingArguments with their defaults and nothing else."""


def list_topics(cls: type) -> list[type]:
    """The classes that hold an argument class's documented fields, one for each topic, in their positional order."""
    topics = list(reversed(ArgumentFields.__bases__)) if issubclass(cls, ArgumentFields) else []
    return [*topics, GenerationFields] if issubclass(cls, GenerationFields) else topics


def get_default(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a dataclass field, `dataclasses.MISSING` if it has none."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
