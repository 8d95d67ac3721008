"""isinstance checks without imports, since a library is in `sys.modules` if its classes have instances."""

from __future__ import annotations

import sys
from typing import Any

# Kind of object -> (module, class) pairs.
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
    "lightning module": (
        ("lightning.pytorch.core.module", "LightningModule"),
        ("pytorch_lightning.core.module", "LightningModule"),
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
    # No comprehension, whose frame would double the cost in Python 3.11.
    classes = []
    for module, name in CLASSES[kind]:
        cls = getattr(sys.modules.get(module), name, None)
        if isinstance(cls, type):
            classes.append(cls)
    return tuple(classes)


def is_a(candidate: Any, kind: str) -> bool:
    return isinstance(candidate, loaded_classes(kind))
