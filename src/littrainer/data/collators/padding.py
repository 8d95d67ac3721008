"""Padding samples to the longest one of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from littrainer.data.collators.default import LABEL_NAMES, default_data_collator
from littrainer.ecosystem import is_a

PADDING_OPTIONS = ("padding", "max_length", "pad_to_multiple_of", "return_tensors")
ADVICE_AGAINST_PAD = "Asking-to-pad-a-fast-tokenizer"


def default_collator_for(processing_class: Any) -> Callable[[list[Any]], Any]:
    """The collator of a Trainer that was given none: it pads where the processing class can, else it stacks."""
    if processing_class is not None and is_a(processing_class, "padding class"):
        return DataCollatorWithPadding(processing_class)
    return default_data_collator


def pad_quietly(tokenizer: Any, samples: Any, **options: Any) -> Any:
    """The tokenizer's own `pad`, without its advice.

    Fast tokenizers warn that calling them on text would be quicker than `pad`; in a collator there is only `pad`.
    """
    given_already = getattr(tokenizer, "deprecation_warnings", {})
    before = given_already.get(ADVICE_AGAINST_PAD, False)
    given_already[ADVICE_AGAINST_PAD] = True
    try:
        return tokenizer.pad(samples, **options)
    finally:
        given_already[ADVICE_AGAINST_PAD] = before


@dataclass
class DataCollatorWithPadding:
    """Pads tokenized samples to the longest one of the batch with the tokenizer's own `pad`.

    Parameters:
        tokenizer: anything with the `pad` method of transformers' tokenizers.
        padding: `True` or `"longest"`, `"max_length"`, or `False` for no padding.
        max_length: tokens to pad to with `"max_length"`.
        pad_to_multiple_of: round the padded length up to a multiple of this.
        return_tensors: `"pt"` or `"np"`.
    """

    tokenizer: Any
    padding: bool | str = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"

    def __call__(self, features: Sequence[dict[str, Any]]) -> Any:
        """Pad one batch; `label` and `label_ids` become `labels`."""
        options = {name: getattr(self, name) for name in PADDING_OPTIONS}
        batch = pad_quietly(self.tokenizer, list(features), **options)
        for name in LABEL_NAMES:
            if name in batch:
                batch["labels"] = batch.pop(name)
        return batch
