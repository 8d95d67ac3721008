"""Collators that make the labels of language modelling from the tokens themselves."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import get_worker_info

from littrainer.data.collators.default import DataCollatorMixin
from littrainer.data.collators.padding import pad_quietly
from littrainer.data.collators.random_draws import NumpyDraws, TorchDraws
from littrainer.data.collators.token_rows import padded_token_rows

IGNORED_LABEL = -100
NO_WORD = -1
# A number from 0 to 1.
Share: TypeAlias = float
PROBABILITIES = ("mask_replace_prob", "random_replace_prob")


@dataclass
class DataCollatorForLanguageModeling(DataCollatorMixin):
    """Pads token ids and makes their labels, for masked or for causal language modelling.

    Parameters:
        tokenizer: anything with the `pad` method and the special tokens of transformers' tokenizers.
        mlm: hide tokens at random, which the model has to find; false: each token is a label, for models that predict
            the next one.
        whole_word_mask: hide all tokens of a word or none; needs samples with `offset_mapping`.
        mlm_probability: share of tokens that become labels.
        mask_replace_prob: share of these that are replaced by the mask token.
        random_replace_prob: share of these that are replaced by any token; the rest stays as it is.
        pad_to_multiple_of: round the padded length up to a multiple of this.
        return_tensors: `"pt"` or `"np"`.
        seed: seed of the draws, the same for each epoch of a loader with workers; by default the global generator of
            torch or NumPy is drawn from. Worker `n` of a DataLoader takes `seed + n`.

    Samples with a `special_tokens_mask` spare the tokenizer from working it out.

    Raises:
        ValueError: the tokenizer has no mask token, or a probability is not one.
    """

    tokenizer: Any
    mlm: bool = True
    whole_word_mask: bool = False
    mlm_probability: Share | None = 0.15
    mask_replace_prob: Share = 0.8
    random_replace_prob: Share = 0.1
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"
    seed: int | None = None

    def __post_init__(self) -> None:
        """Refuse settings that contradict each other."""
        self.generator: Any = None
        if self.mlm and self.tokenizer.mask_token is None:
            raise ValueError(
                f"Masked language modelling needs a mask token, and this {type(self.tokenizer).__name__} has none. Set "
                "tokenizer.mask_token, or mlm=False for causal language modelling."
            )
        if self.whole_word_mask and not self.mlm:
            raise ValueError("whole_word_mask=True hides words, and mlm=False hides nothing; set mlm=True.")
        for name in (*PROBABILITIES, *(["mlm_probability"] if self.mlm else [])):
            value = getattr(self, name)
            if value is None or not 0 <= value <= 1:
                raise ValueError(f"{name}={value!r} is no probability; it has to lie between 0 and 1.")
            setattr(self, name, float(value))
        if self.mask_replace_prob + self.random_replace_prob > 1:
            raise ValueError(
                f"mask_replace_prob={self.mask_replace_prob} and random_replace_prob={self.random_replace_prob} are "
                "shares of the same tokens, and together exceed 1."
            )
        if self.whole_word_mask:
            self._settle_whole_words()

    def _settle_whole_words(self) -> None:
        if not getattr(self.tokenizer, "is_fast", False):
            warnings.warn(
                "whole_word_mask=True reads words from offset_mapping, which only fast tokenizers make.", stacklevel=4
            )
        if self.mask_replace_prob < 1:
            warnings.warn(
                "whole_word_mask=True replaces words by the mask token only: mask_replace_prob is taken as 1 and "
                "random_replace_prob as 0.",
                stacklevel=4,
            )
            self.mask_replace_prob, self.random_replace_prob = 1.0, 0.0

    def torch_call(self, examples: Sequence[Any]) -> Any:
        """A batch of torch tensors."""
        return self._batch(examples, "pt")

    def numpy_call(self, examples: Sequence[Any]) -> Any:
        """A batch of NumPy arrays."""
        return self._batch(examples, "np")

    def torch_mask_tokens(self, inputs: Any, special_tokens_mask: Any = None, offset_mapping: Any = None) -> Any:
        """Hide tokens of a torch tensor, in place; override to hide others.

        Parameters:
            inputs: token ids `(samples, tokens)`.
            special_tokens_mask: 1 where a token is never hidden, of the same shape; by default the tokenizer says so.
            offset_mapping: first and last character of each token `(samples, tokens, 2)`, for whole words.

        Returns:
            the ids, and labels of the same shape: -100 where nothing is to be found.
        """
        return self._hide_tokens(TorchDraws(self.generator), inputs, special_tokens_mask, offset_mapping)

    def numpy_mask_tokens(self, inputs: Any, special_tokens_mask: Any = None, offset_mapping: Any = None) -> Any:
        """Hide tokens of a NumPy array, in place; as `torch_mask_tokens`.

        Parameters:
            inputs, special_tokens_mask, offset_mapping: as there.

        Returns:
            the ids and labels.
        """
        return self._hide_tokens(NumpyDraws(self.generator), inputs, special_tokens_mask, offset_mapping)

    def create_rng(self) -> None:
        """Make the generator that `seed` asks for, one for each worker of a DataLoader."""
        assert self.seed is not None
        worker = get_worker_info()
        self.generator = self.get_generator(self.seed + (0 if worker is None else worker.id))

    def get_generator(self, seed: int) -> Any:
        """A generator of the library whose tensors the collator returns.

        Parameters:
            seed: with the worker's number added.
        """
        return torch.Generator().manual_seed(seed) if self.return_tensors == "pt" else np.random.default_rng(seed)

    def _batch(self, examples: Sequence[Any], kind: str) -> Any:
        if self.seed is not None and self.generator is None:
            self.create_rng()
        batch: Any
        if isinstance(examples[0], Mapping):
            batch = pad_quietly(
                self.tokenizer, examples, return_tensors=kind, pad_to_multiple_of=self.pad_to_multiple_of
            )
        else:
            batch = {"input_ids": padded_token_rows(examples, self.tokenizer, kind, self.pad_to_multiple_of)}
        special_tokens, offsets = batch.pop("special_tokens_mask", None), batch.pop("offset_mapping", None)
        inputs = batch["input_ids"]
        if self.mlm:
            hide = self.torch_mask_tokens if kind == "pt" else self.numpy_mask_tokens
            batch["input_ids"], batch["labels"] = hide(
                inputs, special_tokens_mask=special_tokens, offset_mapping=offsets
            )
        else:
            labels = inputs.clone() if kind == "pt" else inputs.copy()
            if self.tokenizer.pad_token_id is not None:
                labels[labels == self.tokenizer.pad_token_id] = IGNORED_LABEL
            batch["labels"] = labels
        return batch

    def _hide_tokens(
        self, draws: TorchDraws | NumpyDraws, inputs: Any, special_tokens_mask: Any, offset_mapping: Any
    ) -> tuple[Any, Any]:
        labels = draws.copy(inputs)
        if special_tokens_mask is None:
            special_tokens_mask = [
                self.tokenizer.get_special_tokens_mask(row, already_has_special_tokens=True) for row in labels.tolist()
            ]
        special = np.asarray(special_tokens_mask).astype(bool)
        words = self._words(offset_mapping, special) if self.whole_word_mask else None
        never = special if words is None else ~_starts_of_words(words)
        hidden = draws.yes_or_no(self.mlm_probability or 0.0, labels.shape, never)
        if words is not None:
            hidden = draws.truths(_whole_words(words, np.asarray(hidden)))
        labels[~hidden] = IGNORED_LABEL
        masked = draws.yes_or_no(self.mask_replace_prob, labels.shape) & hidden
        inputs[masked] = self.tokenizer.mask_token_id
        if self.mask_replace_prob == 1 or self.random_replace_prob == 0:
            return inputs, labels
        share_of_the_others = self.random_replace_prob / (1 - self.mask_replace_prob)
        replaced = draws.yes_or_no(share_of_the_others, labels.shape) & hidden & ~masked
        inputs[replaced] = draws.tokens(len(self.tokenizer), replaced)
        return inputs, labels

    def _words(self, offset_mapping: Any, special: np.ndarray) -> np.ndarray:
        if offset_mapping is None:
            raise ValueError(
                "whole_word_mask=True needs samples with `offset_mapping`: call the tokenizer with "
                "return_offsets_mapping=True, and set remove_unused_columns=False to keep that column."
            )
        return _numbered_words(np.asarray(offset_mapping), special)


def _numbered_words(offsets: np.ndarray, special: np.ndarray) -> np.ndarray:
    # A token begins a word unless it follows the one before without a gap; a special token belongs to no word.
    starts, ends = offsets[:, :, 0], offsets[:, :, 1]
    begins = np.ones_like(special)
    begins[:, 1:] = (starts[:, 1:] != ends[:, :-1]) | special[:, :-1]
    return np.where(special, NO_WORD, np.cumsum(begins & ~special, axis=1))


def _starts_of_words(words: np.ndarray) -> np.ndarray:
    starts = words != NO_WORD
    starts[:, 1:] &= words[:, 1:] != words[:, :-1]
    return starts


def _whole_words(words: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    rows = [np.isin(row, row[chosen]) for row, chosen in zip(words, hidden, strict=True)]
    return np.stack(rows) & (words != NO_WORD)


class DataCollatorForWholeWordMask(DataCollatorForLanguageModeling):
    """Earlier releases' name for `DataCollatorForLanguageModeling` that hides whole words.

    It replaces some words by random tokens, as it did then; `whole_word_mask=True` replaces all by the mask token.

    Parameters:
        args, kwargs: as there.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        warnings.warn(
            "DataCollatorForWholeWordMask is gone from transformers; use DataCollatorForLanguageModeling with "
            "whole_word_mask=True.",
            FutureWarning,
            stacklevel=2,
        )
        super().__init__(*args, **kwargs)
        self.mlm = self.whole_word_mask = True
