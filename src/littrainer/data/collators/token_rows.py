"""Token ids of several samples in one padded array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def padded_token_rows(samples: Sequence[Any], tokenizer: Any, kind: str, pad_to_multiple_of: int | None = None) -> Any:
    """Token ids, padded to the longest sample on the side that the tokenizer pads.

    Parameters:
        samples: the token ids of each sample, as list, array or tensor.
        tokenizer: says the padding token and its side; needed only where there is something to pad.
        kind: `"pt"` for a torch tensor, `"np"` for a NumPy array.
        pad_to_multiple_of: round the padded length up to a multiple of this.

    Raises:
        ValueError: samples have to be padded, and the tokenizer has no padding token.
    """
    rows = [_row(sample, kind) for sample in samples]
    length = max(len(row) for row in rows)
    if pad_to_multiple_of is not None:
        length += -length % pad_to_multiple_of
    if all(len(row) == length for row in rows):
        return torch.stack(rows) if kind == "pt" else np.stack(rows)
    if tokenizer.pad_token is None:
        raise ValueError(
            f"Samples of different length have to be padded, and the tokenizer ({type(tokenizer).__name__}) has no "
            "padding token. Set one, such as tokenizer.pad_token = tokenizer.eos_token."
        )
    shape = (len(rows), length)
    if kind == "pt":
        batch: Any = rows[0].new_full(shape, tokenizer.pad_token_id)
    else:
        batch = np.full(shape, tokenizer.pad_token_id, dtype=rows[0].dtype)
    for number, row in enumerate(rows):
        start = 0 if tokenizer.padding_side == "right" else length - len(row)
        batch[number, start : start + len(row)] = row
    return batch


def _row(sample: Any, kind: str) -> Any:
    if kind == "np":
        return np.array(sample, dtype=np.int64) if isinstance(sample, (list, tuple)) else np.asarray(sample)
    return sample if isinstance(sample, torch.Tensor) else torch.tensor(sample, dtype=torch.long)
