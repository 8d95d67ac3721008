"""A batch as the keywords with which a module calls its model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from littrainer.errors.notes import kind_of


def model_inputs(batch: Any) -> dict[str, Any]:
    """The entries of a batch.

    Raises:
        TypeError: the batch is no mapping.
    """
    if not isinstance(batch, Mapping):
        raise no_inputs(kind_of(batch))
    return dict(batch)


def no_inputs(what: str) -> TypeError:
    """The error for something that a model cannot be called with, described in words."""
    return TypeError(
        f"TransformersModule was handed {what} as a batch, and calls its model with the batch's entries "
        "as keywords: let the loader give dicts such as {'input_ids': ..., 'labels': ...}, for instance with "
        "DataLoader(..., collate_fn=littrainer.default_data_collator), or make it such a dict in the module's "
        "on_after_batch_transfer."
    )
