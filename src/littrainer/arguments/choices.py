"""The named choices that arguments take: strategies, schedules, optimizers, debug switches, search backends."""

from __future__ import annotations

import enum
import os
import sys
import warnings
from enum import Enum
from types import FrameType
from typing import Any

from littrainer.arguments.did_you_mean import nearest_name

PACKAGE_FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
# Constructors of dataclasses, enumerations that look for what a text means, and parsers that ask them.
BETWEEN = frozenset({"<string>", enum.__file__, os.path.join(os.path.dirname(os.__file__), "argparse.py")})

# The module that the parser of command lines, dicts and files derives from.
PARSER_MODULE = "transformers.hf_argparser"


def get_script_stacklevel() -> int:
    """Return the `stacklevel` for `warnings.warn` in the calling function: the first frame outside littrainer."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None:
        path, module = frame.f_code.co_filename, frame.f_globals.get("__name__")
        if path not in BETWEEN and module != PARSER_MODULE and not path.startswith(PACKAGE_FOLDER):
            return level
        frame = frame.f_back
        level += 1
    return 1


class ExplicitEnum(str, Enum):
    """Base of the choices that stand for a string: a member equals its string and serialises to JSON as that string."""

    @classmethod
    def _missing_(cls, value: object) -> Any:
        values = [member.value for member in cls]
        meant = nearest_name(value, values) if isinstance(value, str) else None
        hint = "" if meant is None else f" (did you mean {meant!r}?)"
        raise ValueError(
            f"{value!r} is not a valid {cls.__name__}{hint}; choose one of {', '.join(map(repr, values))}."
        )


class IntervalStrategy(ExplicitEnum):
    """When something that recurs during training happens."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"


# The name in transformers 4.
EvaluationStrategy = IntervalStrategy


class SaveStrategy(ExplicitEnum):
    """When a checkpoint is written; `best` writes one each time the watched metric improves."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"
    BEST = "best"


class HubStrategy(ExplicitEnum):
    """The files that are pushed to the Hub, and when."""

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
    # Schedules that follow an evaluation metric.
    REDUCE_ON_PLATEAU = "reduce_lr_on_plateau"
    GREEDY = "greedy"


class OptimizerNames(ExplicitEnum):
    """Optimizers by name, grouped by the library that implements them and sorted within a group."""

    # torch
    ADAGRAD = "adagrad"
    ADAMW_TORCH = "adamw_torch"
    ADAMW_TORCH_FUSED = "adamw_torch_fused"
    # An alias: transformers 5.3 lists the name by itself, and it is read so.
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


# Name in transformers 4 -> the optimizer of today that follows the same formula.
EARLIER_OPTIMIZERS = {"adamw_hf": "adamw_torch", "adamw_apex_fused": "adamw_torch_fused"}


class FSDPOption(ExplicitEnum):
    """The words that `fsdp` took as text in transformers 4."""

    AUTO_WRAP = "auto_wrap"
    FULL_SHARD = "full_shard"
    HYBRID_SHARD = "hybrid_shard"
    HYBRID_SHARD_ZERO2 = "hybrid_shard_zero2"
    NO_SHARD = "no_shard"
    OFFLOAD = "offload"
    SHARD_GRAD_OP = "shard_grad_op"


class DebugOption(ExplicitEnum):
    """Extra checks a run can switch on."""

    UNDERFLOW_OVERFLOW = "underflow_overflow"
    TPU_METRICS_DEBUG = "tpu_metrics_debug"


class HPSearchBackend(ExplicitEnum):
    """Libraries that drive a hyperparameter search."""

    OPTUNA = "optuna"
    RAY = "ray"
    WANDB = "wandb"


class ParallelMode(Enum):
    """The way in which processes share the work; a plain enumeration, its members do not equal strings."""

    DISTRIBUTED = "distributed"
    NOT_DISTRIBUTED = "not_distributed"
    NOT_PARALLEL = "not_parallel"
    TPU = "tpu"
    SAGEMAKER_DATA_PARALLEL = "sagemaker_data_parallel"
    SAGEMAKER_MODEL_PARALLEL = "sagemaker_model_parallel"
