"""Collators that newer releases of transformers have removed."""

from __future__ import annotations

import warnings
from typing import Any

from transformers.data.data_collator import DataCollatorForLanguageModeling


class DataCollatorForWholeWordMask(DataCollatorForLanguageModeling):
    """Masking of whole words, under a name that newer releases of transformers have removed.

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
