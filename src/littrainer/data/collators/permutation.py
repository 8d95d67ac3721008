"""The collator of permutation language modelling, as XLNet is trained."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from littrainer.data.collators.default import DataCollatorMixin
from littrainer.data.collators.token_rows import padded_token_rows

IGNORED_LABEL = -100
SEEN_BY_ALL = -1

# Smallest and largest number a draw may have -> the number.
DrawNumber = Callable[[int, int], int]


@dataclass
class DataCollatorForPermutationLanguageModeling(DataCollatorMixin):
    """Hides spans of tokens and draws, for each sample, the order in which the model has to find them.

    Parameters:
        tokenizer: a tokenizer with a mask token.
        plm_probability: share of tokens that are hidden: a span of n tokens stands in a context of n / share.
        max_span_length: most tokens in one span.
        return_tensors: `"pt"` or `"np"`.

    Batches have an even number of tokens, for each half is permuted on its own: XLNet reuses the first one as memory.
    """

    tokenizer: Any
    plm_probability: float = 1 / 6
    max_span_length: int = 5
    return_tensors: str = "pt"

    def torch_call(self, examples: Sequence[Any]) -> dict[str, Any]:
        """A batch of torch tensors."""
        return self._batch(examples, "pt")

    def numpy_call(self, examples: Sequence[Any]) -> dict[str, Any]:
        """A batch of NumPy arrays."""
        return self._batch(examples, "np")

    def torch_mask_tokens(self, inputs: Any) -> tuple[Any, Any, Any, Any]:
        """Hide spans of tokens, and draw an order for each sample.

        Parameters:
            inputs: token ids `(samples, tokens)`, with an even number of tokens.

        Returns:
            the ids with hidden tokens; what each position may not see and which position is predicted, of shape
            `(samples, tokens, tokens)`; and labels `(samples, tokens)`.
        """
        arrays = self._hide_spans(
            inputs.numpy(),
            draw=lambda least, most: int(torch.randint(least, most + 1, (1,)).item()),
            permutation=lambda count: torch.randperm(count).numpy(),
        )
        inputs, perm_mask, target_mapping, labels = map(torch.from_numpy, arrays)
        return inputs, perm_mask, target_mapping, labels

    def numpy_mask_tokens(self, inputs: Any) -> tuple[Any, Any, Any, Any]:
        """As `torch_mask_tokens`, of NumPy arrays.

        Parameters:
            inputs: token ids `(samples, tokens)`, with an even number of tokens.

        Returns:
            the four arrays.
        """
        # One more than with torch: transformers gives both the same upper bound, and only Python's draws include it.
        return self._hide_spans(
            inputs,
            draw=lambda least, most: random.randint(least, most + 1),
            permutation=_shuffled_numbers,
        )

    def _batch(self, examples: Sequence[Any], kind: str) -> dict[str, Any]:
        if isinstance(examples[0], Mapping):
            examples = [example["input_ids"] for example in examples]
        batch = padded_token_rows(examples, self.tokenizer, kind)
        hide = self.torch_mask_tokens if kind == "pt" else self.numpy_mask_tokens
        inputs, perm_mask, target_mapping, labels = hide(batch)
        return {"input_ids": inputs, "perm_mask": perm_mask, "target_mapping": target_mapping, "labels": labels}

    def _hide_spans(
        self, inputs: np.ndarray, draw: DrawNumber, permutation: Callable[[int], np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        if self.tokenizer.mask_token is None:
            raise ValueError(
                "Permutation language modelling needs a mask token, and the tokenizer "
                f"({type(self.tokenizer).__name__}) has none. Set tokenizer.mask_token."
            )
        samples, length = inputs.shape
        if length % 2:
            raise ValueError(
                f"Permutation language modelling splits samples in halves, and these have {length} tokens. Pad or cut "
                "them to an even length."
            )
        hidden = np.zeros(inputs.shape, dtype=bool)
        for row in hidden:
            self._mark_spans(row, draw)
        without_meaning = self._without_meaning(inputs)
        hidden &= ~without_meaning
        labels = np.where(hidden, inputs, IGNORED_LABEL)
        perm_mask = np.zeros((samples, length, length), dtype=np.float32)
        for number in range(samples):
            half = permutation(length // 2)
            ranks = np.concatenate([half, half + length // 2])
            ranks[~hidden[number] & ~without_meaning[number]] = SEEN_BY_ALL
            # A position may not see a hidden one that comes at the same time or later in the drawn order.
            perm_mask[number] = (ranks[:, None] <= ranks[None, :]) & hidden[number]
        target_mapping = np.tile(np.eye(length, dtype=np.float32), (samples, 1, 1))
        inputs = np.where(hidden, self.tokenizer.mask_token_id, inputs)
        return inputs.astype(np.int64), perm_mask, target_mapping, labels.astype(np.int64)

    def _mark_spans(self, row: np.ndarray, draw: DrawNumber) -> None:
        position = 0
        while position < len(row):
            span = draw(1, self.max_span_length)
            context = int(span / self.plm_probability)
            start = position + draw(0, context - span)
            row[start : start + span] = True
            position += context

    def _without_meaning(self, inputs: np.ndarray) -> np.ndarray:
        special = [
            self.tokenizer.get_special_tokens_mask(row, already_has_special_tokens=True) for row in inputs.tolist()
        ]
        marked = np.array(special, dtype=bool)
        if self.tokenizer.pad_token is not None:
            marked |= inputs == self.tokenizer.pad_token_id
        return marked


def _shuffled_numbers(count: int) -> np.ndarray:
    numbers = np.arange(count)
    np.random.shuffle(numbers)
    return numbers
