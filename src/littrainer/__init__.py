"""The Transformers Trainer API, trained by Lightning.

The public names below are loaded when they are first used, so that `import littrainer` costs next to nothing: neither
torch nor lightning nor transformers is imported for it.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False
"""What type checkers take to be true; importing it from `typing` would double the cost of this package."""

__version__ = "0.1.0"

_HOMES = {
    "littrainer.arguments.choices": ("IntervalStrategy", "OptimizerNames", "SaveStrategy", "SchedulerType"),
    "littrainer.arguments.training_arguments": ("TrainingArguments",),
    "littrainer.callbacks.base": ("TrainerCallback",),
    "littrainer.callbacks.early_stopping": ("EarlyStoppingCallback",),
    "littrainer.callbacks.flow": ("DefaultFlowCallback",),
    "littrainer.callbacks.progress": ("PrinterCallback", "ProgressCallback"),
    "littrainer.callbacks.state": ("ExportableState", "TrainerControl", "TrainerState"),
    "littrainer.checkpoint.layout": ("get_last_checkpoint",),
    "littrainer.data.collators": ("DataCollatorWithPadding", "default_data_collator"),
    "littrainer.evaluation.results": ("EvalLoopOutput", "EvalPrediction", "PredictionOutput", "TrainOutput"),
    "littrainer.seeds": ("set_seed",),
    "littrainer.trainer": ("Trainer",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "DataCollatorWithPadding",
    "DefaultFlowCallback",
    "EarlyStoppingCallback",
    "EvalLoopOutput",
    "EvalPrediction",
    "ExportableState",
    "IntervalStrategy",
    "OptimizerNames",
    "PredictionOutput",
    "PrinterCallback",
    "ProgressCallback",
    "SaveStrategy",
    "SchedulerType",
    "TrainOutput",
    "Trainer",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
    "TrainingArguments",
    "__version__",
    "default_data_collator",
    "get_last_checkpoint",
    "set_seed",
]

if TYPE_CHECKING:
    from typing import Any

    from littrainer.arguments.choices import IntervalStrategy, OptimizerNames, SaveStrategy, SchedulerType
    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.callbacks.base import TrainerCallback
    from littrainer.callbacks.early_stopping import EarlyStoppingCallback
    from littrainer.callbacks.flow import DefaultFlowCallback
    from littrainer.callbacks.progress import PrinterCallback, ProgressCallback
    from littrainer.callbacks.state import ExportableState, TrainerControl, TrainerState
    from littrainer.checkpoint.layout import get_last_checkpoint
    from littrainer.data.collators import DataCollatorWithPadding, default_data_collator
    from littrainer.evaluation.results import EvalLoopOutput, EvalPrediction, PredictionOutput, TrainOutput
    from littrainer.seeds import set_seed
    from littrainer.trainer import Trainer


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'littrainer' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
