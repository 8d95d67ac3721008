"""Enumerations of argument values."""

from __future__ import annotations

import enum
import os
import sys
import warnings
from enum import Enum
from types import FrameType
from typing import Any

from littrainer.arguments.did_you_mean import find_nearest_name

PACKAGE_FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
# Files of generated constructors, enumerations and parsers.
SKIPPED_FILES = frozenset({"<string>", enum.__file__, os.path.join(os.path.dirname(os.__file__), "argparse.py")})
PARSER_MODULE = "transformers.hf_argparser"


def get_script_stacklevel() -> int:
    """Return the `stacklevel` of the first frame outside littrainer."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None:
        path, module = frame.f_code.co_filename, frame.f_globals.get("__name__")
        if path not in SKIPPED_FILES and module != PARSER_MODULE and not path.startswith(PACKAGE_FOLDER):
            return level
        frame = frame.f_back
        level += 1
    return 1


class ExplicitEnum(str, Enum):
    """Enumeration whose members equal their strings."""

    @classmethod
    def _missing_(cls, value: object) -> Any:
        values = [member.value for member in cls]
        nearest = find_nearest_name(value, values) if isinstance(value, str) else None
        hint = "" if nearest is None else f" (did you mean {nearest!r}?)"
        raise ValueError(
            f"{value!r} is not a valid {cls.__name__}{hint}; choose one of {', '.join(map(repr, values))}."
        )


class IntervalStrategy(ExplicitEnum):
    """Times of logs, evaluations and checkpoints."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"


# Name in transformers 4.
EvaluationStrategy = IntervalStrategy


class SaveStrategy(ExplicitEnum):
    """Times of checkpoints; `best` saves each time the watched metric improves."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"
    BEST = "best"


class HubStrategy(ExplicitEnum):
    """Files that are pushed to the Hub, and times of the pushes."""

    END = "end"
    EVERY_SAVE = "every_save"
    CHECKPOINT = "checkpoint"
    ALL_CHECKPOINTS = "all_checkpoints"


class SchedulerType(ExplicitEnum):
    """Learning-rate schedules by name."""

    CONSTANT = "constant"
    CONSTANT_WITH_WARMUP = "constant_with_warmup"
    WARMUP_STABLE_DECAY = "warmup_stable_decay"
    LINEAR = "linear"
    POLYNOMIAL = "polynomial"
    INVERSE_SQRT = "inverse_sqrt"
    COSINE = "cosine"
    COSINE_WITH_RESTARTS = "cosine_with_restarts"
    COSINE_WARMUP_WITH_MIN_LR = "cosine_warmup_with_min_lr"
    COSINE_WITH_MIN_LR = "cosine_with_min_lr"
    # Driven by an evaluation metric.
    REDUCE_ON_PLATEAU = "reduce_lr_on_plateau"
    GREEDY = "greedy"


class OptimizerNames(ExplicitEnum):
    """Optimizers by name, grouped by the library that implements them and sorted within a group."""

    # torch
    ADAGRAD = "adagrad"
    ADAMW_TORCH = "adamw_torch"
    ADAMW_TORCH_FUSED = "adamw_torch_fused"
    # Alias, since transformers 5.3 has this member.
    ADAMW_APEX_FUSED = "adamw_torch_fused"
    MUON = "muon"
    RMSPROP = "rmsprop"
    SGD = "sgd"
    # torch on other accelerators
    ADAMW_TORCH_NPU_FUSED = "adamw_torch_npu_fused"
    ADAMW_TORCH_XLA = "adamw_torch_xla"
    # transformers
    ADAFACTOR = "adafactor"
    # torchdistx and torchao
    ADAMW_ANYPRECISION = "adamw_anyprecision"
    ADAMW_TORCH_4BIT = "adamw_torch_4bit"
    ADAMW_TORCH_8BIT = "adamw_torch_8bit"
    # bitsandbytes, state in 8 bits
    ADAMW_8BIT = "adamw_8bit"
    ADAMW_BNB = "adamw_bnb_8bit"
    ADEMAMIX_8BIT = "ademamix_8bit"
    LION_8BIT = "lion_8bit"
    PAGED_ADAMW_8BIT = "paged_adamw_8bit"
    PAGED_ADEMAMIX_8BIT = "paged_ademamix_8bit"
    PAGED_LION_8BIT = "paged_lion_8bit"
    RMSPROP_8BIT = "rmsprop_bnb_8bit"
    # bitsandbytes, state in 32 bits
    ADEMAMIX = "ademamix"
    LION = "lion_32bit"
    PAGED_ADAMW = "paged_adamw_32bit"
    PAGED_ADEMAMIX = "paged_ademamix_32bit"
    PAGED_LION = "paged_lion_32bit"
    RMSPROP_32BIT = "rmsprop_bnb_32bit"
    RMSPROP_BNB = "rmsprop_bnb"
    # galore-torch
    GALORE_ADAFACTOR = "galore_adafactor"
    GALORE_ADAFACTOR_LAYERWISE = "galore_adafactor_layerwise"
    GALORE_ADAMW = "galore_adamw"
    GALORE_ADAMW_8BIT = "galore_adamw_8bit"
    GALORE_ADAMW_8BIT_LAYERWISE = "galore_adamw_8bit_layerwise"
    GALORE_ADAMW_LAYERWISE = "galore_adamw_layerwise"
    # lomo-optim, grokadamw, schedulefree, apollo-torch, torch-optimi
    ADALOMO = "adalomo"
    APOLLO_ADAMW = "apollo_adamw"
    APOLLO_ADAMW_LAYERWISE = "apollo_adamw_layerwise"
    GROKADAMW = "grokadamw"
    LOMO = "lomo"
    SCHEDULE_FREE_ADAMW = "schedule_free_adamw"
    SCHEDULE_FREE_RADAM = "schedule_free_radam"
    SCHEDULE_FREE_SGD = "schedule_free_sgd"
    STABLE_ADAMW = "stable_adamw"

    @classmethod
    def _missing_(cls, value: object) -> Any:
        today = EARLIER_OPTIMIZERS.get(value) if isinstance(value, str) else None
        if today is None:
            return super()._missing_(value)
        message = f"optim={value!r} is an earlier spelling: write {today!r}."
        warnings.warn(message, FutureWarning, stacklevel=get_script_stacklevel())
        return cls(today)


# Name in transformers 4 -> equivalent optimizer.
EARLIER_OPTIMIZERS = {"adamw_hf": "adamw_torch", "adamw_apex_fused": "adamw_torch_fused"}


class FSDPOption(ExplicitEnum):
    """Options of `fsdp` in transformers 4."""

    AUTO_WRAP = "auto_wrap"
    FULL_SHARD = "full_shard"
    HYBRID_SHARD = "hybrid_shard"
    HYBRID_SHARD_ZERO2 = "hybrid_shard_zero2"
    NO_SHARD = "no_shard"
    OFFLOAD = "offload"
    SHARD_GRAD_OP = "shard_grad_op"


class DebugOption(ExplicitEnum):
    UNDERFLOW_OVERFLOW = "underflow_overflow"
    TPU_METRICS_DEBUG = "tpu_metrics_debug"


class HPSearchBackend(ExplicitEnum):
    OPTUNA = "optuna"
    RAY = "ray"
    WANDB = "wandb"


class ParallelMode(Enum):
    """Modes of parallelism; members do not equal strings."""

    DISTRIBUTED = "distributed"
    NOT_DISTRIBUTED = "not_distributed"
    NOT_PARALLEL = "not_parallel"
    TPU = "tpu"
    SAGEMAKER_DATA_PARALLEL = "sagemaker_data_parallel"
    SAGEMAKER_MODEL_PARALLEL = "sagemaker_model_parallel"
