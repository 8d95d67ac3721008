"""The collators that are transformers' own, under their public names here; loaded when one of them is first used."""

from __future__ import annotations

import warnings
from typing import Any

try:
    from transformers.data.data_collator import (
        DataCollatorForLanguageModeling,
        DataCollatorForMultipleChoice,
        DataCollatorForPermutationLanguageModeling,
        DataCollatorForSeq2Seq,
        DataCollatorForTokenClassification,
        DataCollatorWithFlattening,
    )
except ImportError as error:
    raise ImportError(
        "The collators for language modelling, sequence-to-sequence models, token classification and multiple choice, "
        "and DataCollatorWithFlattening, are transformers' own, which is not installed: pip install transformers."
    ) from error

__all__ = [
    "DataCollatorForLanguageModeling",
    "DataCollatorForMultipleChoice",
    "DataCollatorForPermutationLanguageModeling",
    "DataCollatorForSeq2Seq",
    "DataCollatorForTokenClassification",
    "DataCollatorForWholeWordMask",
    "DataCollatorWithFlattening",
]


class DataCollatorForWholeWordMask(DataCollatorForLanguageModeling):
    """Hide all tokens of a word or none; an earlier name, which newer releases of transformers do not have.

    Parameters:
        args, kwargs: those of `DataCollatorForLanguageModeling`.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        warnings.warn(
            "DataCollatorForWholeWordMask is an earlier name: use DataCollatorForLanguageModeling with "
            "whole_word_mask=True.",
            FutureWarning,
            stacklevel=2,
        )
        super().__init__(*args, **kwargs)
        self.mlm = self.whole_word_mask = True
