"""The Transformers Trainer API, trained by Lightning.

The public names below are loaded when they are first used, so that `import littrainer` costs next to nothing: neither
torch nor lightning nor transformers is imported for it.
"""

from __future__ import annotations

import importlib

from littrainer.errors.version import __version__

TYPE_CHECKING = False
"""What type checkers take to be true; importing it from `typing` would double the cost of this package."""


_HOMES = {
    "littrainer.arguments.choices": ("IntervalStrategy", "OptimizerNames", "SaveStrategy", "SchedulerType"),
    "littrainer.arguments.parser": ("HfArg", "HfArgumentParser"),
    "littrainer.arguments.training_arguments": ("Seq2SeqTrainingArguments", "TrainingArguments"),
    "littrainer.callbacks.base": ("TrainerCallback",),
    "littrainer.callbacks.early_stopping": ("EarlyStoppingCallback",),
    "littrainer.callbacks.handler": ("DefaultFlowCallback",),
    "littrainer.callbacks.progress": ("PrinterCallback", "ProgressCallback"),
    "littrainer.callbacks.state": ("ExportableState", "TrainerControl", "TrainerState"),
    "littrainer.checkpoint.lightning_io": ("TransformersCheckpointIO",),
    "littrainer.checkpoint.verification": ("get_last_checkpoint",),
    "littrainer.data.collators": ("DataCollator", "DefaultDataCollator", "default_data_collator"),
    "littrainer.data.transformers_collators": ("DataCollatorForWholeWordMask",),
    "littrainer.evaluation.results": ("EvalLoopOutput", "EvalPrediction", "PredictionOutput", "TrainOutput"),
    "littrainer.evaluation.streaming": ("StreamingMetrics",),
    "littrainer.keras.trainer": ("TFTrainer",),
    "littrainer.keras.arguments": ("TFTrainingArguments",),
    "littrainer.optim.schedules": (
        "get_constant_schedule",
        "get_constant_schedule_with_warmup",
        "get_cosine_schedule_with_warmup",
        "get_linear_schedule_with_warmup",
        "get_reduce_on_plateau_schedule",
        "get_scheduler",
    ),
    "littrainer.lightning.conversion": ("checkpoint_from_lightning", "checkpoint_to_lightning"),
    "littrainer.lightning.data_module": ("TrainerDataModule",),
    "littrainer.lightning.module": ("TransformersModule",),
    "littrainer.search.record": ("BestRun",),
    "littrainer.errors.seeds": ("set_seed",),
    "littrainer.seq2seq": ("Seq2SeqTrainer",),
    "littrainer.trainer": ("Trainer",),
    "littrainer.training.health": ("UnhealthyTrainingError",),
    "littrainer.training.tracked_means": ("track",),
    # transformers' own, which need not be installed for the others.
    "transformers.data.data_collator": (
        "DataCollatorForLanguageModeling",
        "DataCollatorForMultipleChoice",
        "DataCollatorForPermutationLanguageModeling",
        "DataCollatorForSeq2Seq",
        "DataCollatorForTokenClassification",
        "DataCollatorWithFlattening",
        "DataCollatorWithPadding",
    ),
    "transformers.optimization": (
        "Adafactor",
        "GreedyLR",
        "get_cosine_with_hard_restarts_schedule_with_warmup",
        "get_cosine_with_min_lr_schedule_with_warmup",
        "get_cosine_with_min_lr_schedule_with_warmup_lr_rate",
        "get_greedy_schedule",
        "get_inverse_sqrt_schedule",
        "get_polynomial_decay_schedule_with_warmup",
        "get_wsd_schedule",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Adafactor",
    "BestRun",
    "DataCollator",
    "DataCollatorForLanguageModeling",
    "DataCollatorForMultipleChoice",
    "DataCollatorForPermutationLanguageModeling",
    "DataCollatorForSeq2Seq",
    "DataCollatorForTokenClassification",
    "DataCollatorForWholeWordMask",
    "DataCollatorWithFlattening",
    "DataCollatorWithPadding",
    "DefaultDataCollator",
    "DefaultFlowCallback",
    "EarlyStoppingCallback",
    "EvalLoopOutput",
    "EvalPrediction",
    "ExportableState",
    "GreedyLR",
    "HfArg",
    "HfArgumentParser",
    "IntervalStrategy",
    "OptimizerNames",
    "PredictionOutput",
    "PrinterCallback",
    "ProgressCallback",
    "SaveStrategy",
    "SchedulerType",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "StreamingMetrics",
    "TFTrainer",
    "TFTrainingArguments",
    "TrainOutput",
    "Trainer",
    "TrainerCallback",
    "TrainerControl",
    "TrainerDataModule",
    "TrainerState",
    "TrainingArguments",
    "TransformersCheckpointIO",
    "TransformersModule",
    "UnhealthyTrainingError",
    "__version__",
    "checkpoint_from_lightning",
    "checkpoint_to_lightning",
    "default_data_collator",
    "get_constant_schedule",
    "get_constant_schedule_with_warmup",
    "get_cosine_schedule_with_warmup",
    "get_cosine_with_hard_restarts_schedule_with_warmup",
    "get_cosine_with_min_lr_schedule_with_warmup",
    "get_cosine_with_min_lr_schedule_with_warmup_lr_rate",
    "get_greedy_schedule",
    "get_inverse_sqrt_schedule",
    "get_last_checkpoint",
    "get_linear_schedule_with_warmup",
    "get_polynomial_decay_schedule_with_warmup",
    "get_reduce_on_plateau_schedule",
    "get_scheduler",
    "get_wsd_schedule",
    "set_seed",
    "track",
]

if TYPE_CHECKING:
    from typing import Any

    from transformers.data import data_collator as _collators
    from transformers.optimization import (
        Adafactor,
        GreedyLR,
        get_cosine_with_hard_restarts_schedule_with_warmup,
        get_cosine_with_min_lr_schedule_with_warmup,
        get_cosine_with_min_lr_schedule_with_warmup_lr_rate,
        get_greedy_schedule,
        get_inverse_sqrt_schedule,
        get_polynomial_decay_schedule_with_warmup,
        get_wsd_schedule,
    )

    from littrainer.arguments.choices import IntervalStrategy, OptimizerNames, SaveStrategy, SchedulerType
    from littrainer.arguments.parser import HfArg, HfArgumentParser
    from littrainer.arguments.training_arguments import Seq2SeqTrainingArguments, TrainingArguments
    from littrainer.callbacks.base import TrainerCallback
    from littrainer.callbacks.early_stopping import EarlyStoppingCallback
    from littrainer.callbacks.handler import DefaultFlowCallback
    from littrainer.callbacks.progress import PrinterCallback, ProgressCallback
    from littrainer.callbacks.state import ExportableState, TrainerControl, TrainerState
    from littrainer.checkpoint.lightning_io import TransformersCheckpointIO
    from littrainer.checkpoint.verification import get_last_checkpoint
    from littrainer.data.collators import DataCollator, DefaultDataCollator, default_data_collator
    from littrainer.data.transformers_collators import DataCollatorForWholeWordMask
    from littrainer.errors.seeds import set_seed
    from littrainer.evaluation.results import EvalLoopOutput, EvalPrediction, PredictionOutput, TrainOutput
    from littrainer.evaluation.streaming import StreamingMetrics
    from littrainer.keras.arguments import TFTrainingArguments
    from littrainer.keras.trainer import TFTrainer
    from littrainer.lightning.conversion import checkpoint_from_lightning, checkpoint_to_lightning
    from littrainer.lightning.data_module import TrainerDataModule
    from littrainer.lightning.module import TransformersModule
    from littrainer.optim.schedules import (
        get_constant_schedule,
        get_constant_schedule_with_warmup,
        get_cosine_schedule_with_warmup,
        get_linear_schedule_with_warmup,
        get_reduce_on_plateau_schedule,
        get_scheduler,
    )
    from littrainer.search.record import BestRun
    from littrainer.seq2seq import Seq2SeqTrainer
    from littrainer.trainer import Trainer
    from littrainer.training.health import UnhealthyTrainingError
    from littrainer.training.tracked_means import track

    DataCollatorForLanguageModeling = _collators.DataCollatorForLanguageModeling
    DataCollatorForMultipleChoice = _collators.DataCollatorForMultipleChoice
    DataCollatorForPermutationLanguageModeling = _collators.DataCollatorForPermutationLanguageModeling
    DataCollatorForSeq2Seq = _collators.DataCollatorForSeq2Seq
    DataCollatorForTokenClassification = _collators.DataCollatorForTokenClassification
    DataCollatorWithFlattening = _collators.DataCollatorWithFlattening
    DataCollatorWithPadding = _collators.DataCollatorWithPadding


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'littrainer' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(home), name)
    except (ImportError, AttributeError) as error:
        if "transformers" not in home:
            raise
        raise ImportError(
            f"{name} is transformers' own, which is not installed or has none: pip install -U transformers."
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
