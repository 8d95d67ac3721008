"""Turning a list of samples into a batch, by family: stacking, padding, labels to pad, language modelling."""

from littrainer.data.collators.default import (
    DataCollator,
    DataCollatorMixin,
    DefaultDataCollator,
    default_data_collator,
)
from littrainer.data.collators.flattening import DataCollatorWithFlattening
from littrainer.data.collators.language_modeling import DataCollatorForLanguageModeling, DataCollatorForWholeWordMask
from littrainer.data.collators.padded_labels import (
    DataCollatorForMultipleChoice,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
)
from littrainer.data.collators.padding import DataCollatorWithPadding, default_collator_for
from littrainer.data.collators.permutation import DataCollatorForPermutationLanguageModeling
from littrainer.data.collators.unused_columns import RemoveColumnsCollator, dropped_columns_message

__all__ = [
    "DataCollator",
    "DataCollatorForLanguageModeling",
    "DataCollatorForMultipleChoice",
    "DataCollatorForPermutationLanguageModeling",
    "DataCollatorForSeq2Seq",
    "DataCollatorForTokenClassification",
    "DataCollatorForWholeWordMask",
    "DataCollatorMixin",
    "DataCollatorWithFlattening",
    "DataCollatorWithPadding",
    "DefaultDataCollator",
    "RemoveColumnsCollator",
    "default_collator_for",
    "default_data_collator",
    "dropped_columns_message",
]
