"""Which columns of a dataset the model takes."""

from __future__ import annotations

import logging
from typing import Any

from littrainer.data.collators import dropped_columns_message

logger = logging.getLogger(__name__)


def without_extra_columns(dataset: Any, accepted: list[str], model_name: str, description: str | None) -> Any:
    """A `datasets.Dataset` without the columns that the model's forward does not take.

    Raises:
        ValueError: no column is left.
    """
    dropped = [name for name in dataset.column_names if name not in accepted]
    if dropped and len(dropped) == len(dataset.column_names):
        where = f" of the {description.lower()} set" if description else ""
        raise ValueError(
            f"No column{where} is an argument of {model_name}.forward: the data has {', '.join(dropped)}, the model "
            f"takes {', '.join(accepted)}. Tokenize or rename the columns, or set remove_unused_columns=False to hand "
            "them to your data_collator."
        )
    if not dropped:
        return dataset
    logger.info(dropped_columns_message(dropped, description, model_name))
    return dataset.remove_columns(dropped)
