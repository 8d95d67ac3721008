"""The Transformers Trainer API, trained by Lightning.

The public names are imported at first use, so that `import littrainer` is fast: it imports neither torch nor lightning
nor transformers.
"""

from __future__ import annotations

import importlib

from littrainer.runtime.version import __version__ as __version__

TYPE_CHECKING = False
"""Importing this from `typing` would double the import time of this package."""


_HOMES = {
    "littrainer.arguments.choices": ("IntervalStrategy", "OptimizerNames", "SaveStrategy", "SchedulerType"),
    "littrainer.arguments.parser": ("HfArgumentParser",),
    "littrainer.arguments.training_arguments": ("Seq2SeqTrainingArguments", "TrainingArguments"),
    "littrainer.callbacks.base": ("TrainerCallback",),
    "littrainer.callbacks.early_stopping": ("EarlyStoppingCallback",),
    "littrainer.callbacks.handler": ("DefaultFlowCallback",),
    "littrainer.callbacks.progress": ("PrinterCallback", "ProgressCallback"),
    "littrainer.callbacks.state": ("ExportableState", "TrainerControl", "TrainerState"),
    "littrainer.checkpoint.lightning_io": ("TransformersCheckpointIO",),
    "littrainer.checkpoint.manager": ("get_last_checkpoint",),
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
    "littrainer.runtime.seeds": ("set_seed",),
    "littrainer.seq2seq": ("Seq2SeqTrainer",),
    "littrainer.trainer": ("Trainer",),
    "littrainer.loop.health": ("UnhealthyTrainingError",),
    "littrainer.loop.tracked_means": ("track",),
    # Names of transformers, which is optional.
    "transformers.hf_argparser": ("HfArg",),
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

__all__ = sorted([*_HOME_OF, "__version__"])

# Type checkers treat aliases as public.
if TYPE_CHECKING:
    from typing import Any

    from transformers.data.data_collator import DataCollatorForLanguageModeling as DataCollatorForLanguageModeling
    from transformers.data.data_collator import DataCollatorForMultipleChoice as DataCollatorForMultipleChoice
    from transformers.data.data_collator import (
        DataCollatorForPermutationLanguageModeling as DataCollatorForPermutationLanguageModeling,
    )
    from transformers.data.data_collator import DataCollatorForSeq2Seq as DataCollatorForSeq2Seq
    from transformers.data.data_collator import DataCollatorForTokenClassification as DataCollatorForTokenClassification
    from transformers.data.data_collator import DataCollatorWithFlattening as DataCollatorWithFlattening
    from transformers.data.data_collator import DataCollatorWithPadding as DataCollatorWithPadding
    from transformers.hf_argparser import HfArg as HfArg
    from transformers.optimization import Adafactor as Adafactor
    from transformers.optimization import GreedyLR as GreedyLR
    from transformers.optimization import (
        get_cosine_with_hard_restarts_schedule_with_warmup as get_cosine_with_hard_restarts_schedule_with_warmup,
    )
    from transformers.optimization import (
        get_cosine_with_min_lr_schedule_with_warmup as get_cosine_with_min_lr_schedule_with_warmup,
    )
    from transformers.optimization import (
        get_cosine_with_min_lr_schedule_with_warmup_lr_rate as get_cosine_with_min_lr_schedule_with_warmup_lr_rate,
    )
    from transformers.optimization import get_greedy_schedule as get_greedy_schedule
    from transformers.optimization import get_inverse_sqrt_schedule as get_inverse_sqrt_schedule
    from transformers.optimization import (
        get_polynomial_decay_schedule_with_warmup as get_polynomial_decay_schedule_with_warmup,
    )
    from transformers.optimization import get_wsd_schedule as get_wsd_schedule

    from littrainer.arguments.choices import IntervalStrategy as IntervalStrategy
    from littrainer.arguments.choices import OptimizerNames as OptimizerNames
    from littrainer.arguments.choices import SaveStrategy as SaveStrategy
    from littrainer.arguments.choices import SchedulerType as SchedulerType
    from littrainer.arguments.parser import HfArgumentParser as HfArgumentParser
    from littrainer.arguments.training_arguments import Seq2SeqTrainingArguments as Seq2SeqTrainingArguments
    from littrainer.arguments.training_arguments import TrainingArguments as TrainingArguments
    from littrainer.callbacks.base import TrainerCallback as TrainerCallback
    from littrainer.callbacks.early_stopping import EarlyStoppingCallback as EarlyStoppingCallback
    from littrainer.callbacks.handler import DefaultFlowCallback as DefaultFlowCallback
    from littrainer.callbacks.progress import PrinterCallback as PrinterCallback
    from littrainer.callbacks.progress import ProgressCallback as ProgressCallback
    from littrainer.callbacks.state import ExportableState as ExportableState
    from littrainer.callbacks.state import TrainerControl as TrainerControl
    from littrainer.callbacks.state import TrainerState as TrainerState
    from littrainer.checkpoint.lightning_io import TransformersCheckpointIO as TransformersCheckpointIO
    from littrainer.checkpoint.manager import get_last_checkpoint as get_last_checkpoint
    from littrainer.data.collators import DataCollator as DataCollator
    from littrainer.data.collators import DefaultDataCollator as DefaultDataCollator
    from littrainer.data.collators import default_data_collator as default_data_collator
    from littrainer.data.transformers_collators import DataCollatorForWholeWordMask as DataCollatorForWholeWordMask
    from littrainer.evaluation.results import EvalLoopOutput as EvalLoopOutput
    from littrainer.evaluation.results import EvalPrediction as EvalPrediction
    from littrainer.evaluation.results import PredictionOutput as PredictionOutput
    from littrainer.evaluation.results import TrainOutput as TrainOutput
    from littrainer.evaluation.streaming import StreamingMetrics as StreamingMetrics
    from littrainer.keras.arguments import TFTrainingArguments as TFTrainingArguments
    from littrainer.keras.trainer import TFTrainer as TFTrainer
    from littrainer.lightning.conversion import checkpoint_from_lightning as checkpoint_from_lightning
    from littrainer.lightning.conversion import checkpoint_to_lightning as checkpoint_to_lightning
    from littrainer.lightning.data_module import TrainerDataModule as TrainerDataModule
    from littrainer.lightning.module import TransformersModule as TransformersModule
    from littrainer.loop.health import UnhealthyTrainingError as UnhealthyTrainingError
    from littrainer.loop.tracked_means import track as track
    from littrainer.optim.schedules import get_constant_schedule as get_constant_schedule
    from littrainer.optim.schedules import get_constant_schedule_with_warmup as get_constant_schedule_with_warmup
    from littrainer.optim.schedules import get_cosine_schedule_with_warmup as get_cosine_schedule_with_warmup
    from littrainer.optim.schedules import get_linear_schedule_with_warmup as get_linear_schedule_with_warmup
    from littrainer.optim.schedules import get_reduce_on_plateau_schedule as get_reduce_on_plateau_schedule
    from littrainer.optim.schedules import get_scheduler as get_scheduler
    from littrainer.runtime.seeds import set_seed as set_seed
    from littrainer.search.record import BestRun as BestRun
    from littrainer.seq2seq import Seq2SeqTrainer as Seq2SeqTrainer
    from littrainer.trainer import Trainer as Trainer


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
