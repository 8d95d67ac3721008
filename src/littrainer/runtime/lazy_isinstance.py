"""Kinds of objects of other libraries, recognized without importing the library.

An object can only be an instance of a library's class if that library is loaded already, so looking into `sys.modules`
answers the question and costs nothing where the library is absent.
"""

from __future__ import annotations

import sys
from typing import Any

# Kind of object -> (module, class) pairs; being an instance of any of them makes it that kind.
CLASSES: dict[str, tuple[tuple[str, str], ...]] = {
    "datasets.Dataset": (("datasets.arrow_dataset", "Dataset"),),
    "datasets.IterableDataset": (("datasets.iterable_dataset", "IterableDataset"),),
    "pretrained model": (("transformers.modeling_utils", "PreTrainedModel"), ("peft.peft_model", "PeftModel")),
    "model of transformers": (("transformers.modeling_utils", "PreTrainedModel"),),
    "peft model": (("peft.peft_model", "PeftModel"), ("peft.mixed_model", "PeftMixedModel")),
    "padding class": (
        ("transformers.tokenization_utils_base", "PreTrainedTokenizerBase"),
        ("transformers.feature_extraction_sequence_utils", "SequenceFeatureExtractor"),
    ),
    "tokenizer": (("transformers.tokenization_utils_base", "PreTrainedTokenizerBase"),),
    "processor": (("transformers.processing_utils", "ProcessorMixin"),),
    "greedy schedule": (("transformers.optimization", "GreedyLR"),),
    "rebalancing sampler": (("transformers.trainer_pt_utils", "BatchRebalanceSampler"),),
    "sharded module": (
        ("torch.distributed.fsdp", "FSDPModule"),
        ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    ),
    "resharding module": (("torch.distributed.fsdp", "FSDPModule"),),
    "flat sharded module": (("torch.distributed.fsdp", "FullyShardedDataParallel"),),
    "sharded tensor": (("torch.distributed.tensor", "DTensor"),),
    "lightning callback": (
        ("lightning.pytorch.callbacks.callback", "Callback"),
        ("pytorch_lightning.callbacks.callback", "Callback"),
    ),
    "accelerator": (("accelerate.accelerator", "Accelerator"),),
    "default flow": (("transformers.trainer_callback", "DefaultFlowCallback"),),
    "pruned trial": (("optuna.exceptions", "TrialPruned"),),
    "storage error": (("sqlalchemy.exc", "SQLAlchemyError"), ("optuna.exceptions", "StorageInternalError")),
    "lightning logger": (
        ("lightning.fabric.loggers.logger", "Logger"),
        ("lightning_fabric.loggers.logger", "Logger"),
    ),
    "torchmetrics metric": (("torchmetrics.metric", "Metric"), ("torchmetrics.collections", "MetricCollection")),
}


def loaded_classes(kind: str) -> tuple[type, ...]:
    """The classes of a kind that are loaded."""
    found = []
    for module, name in CLASSES[kind]:
        known = getattr(sys.modules.get(module), name, None)
        if isinstance(known, type):
            found.append(known)
    return tuple(found)


def is_a(candidate: Any, kind: str) -> bool:
    """Whether an object is of one of the kinds that `CLASSES` lists."""
    return isinstance(candidate, loaded_classes(kind))
