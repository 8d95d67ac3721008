"""What an object that a user hands in comes from, asked without importing that library.

An object can only be an instance of a library's class if that library is loaded already, so looking into `sys.modules`
answers the question and costs nothing where the library is absent.
"""

from __future__ import annotations

import sys
from typing import Any

# Kind of object -> (module, class) pairs; being an instance of any of them makes it that kind.
CLASSES: dict[str, tuple[tuple[str, str], ...]] = {
    "datasets.Dataset": (("datasets.arrow_dataset", "Dataset"),),
    "pretrained model": (("transformers.modeling_utils", "PreTrainedModel"), ("peft.peft_model", "PeftModel")),
    "peft model": (("peft.peft_model", "PeftModel"), ("peft.mixed_model", "PeftMixedModel")),
    "padding class": (
        ("transformers.tokenization_utils_base", "PreTrainedTokenizerBase"),
        ("transformers.feature_extraction_sequence_utils", "SequenceFeatureExtractor"),
    ),
    "tokenizer": (("transformers.tokenization_utils_base", "PreTrainedTokenizerBase"),),
    "processor": (("transformers.processing_utils", "ProcessorMixin"),),
    "lightning callback": (
        ("lightning.pytorch.callbacks.callback", "Callback"),
        ("pytorch_lightning.callbacks.callback", "Callback"),
    ),
}


def is_a(candidate: Any, kind: str) -> bool:
    """Whether an object is of one of the kinds that `CLASSES` lists."""
    for module_name, class_name in CLASSES[kind]:
        known_class = getattr(sys.modules.get(module_name), class_name, None)
        if known_class is not None and isinstance(candidate, known_class):
            return True
    return False
