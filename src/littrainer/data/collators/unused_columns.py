"""Dropping what the model does not take before samples reach another collator."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any


class RemoveColumnsCollator:
    """A collator around another one, which drops what the model's forward does not take.

    Parameters:
        data_collator: the collator that is called with the remaining columns.
        signature_columns: the names to keep.
        logger: told once which columns were dropped.
        model_name, description: named in that message.
    """

    def __init__(
        self,
        data_collator: Callable[[list[Any]], Any],
        signature_columns: Sequence[str],
        logger: logging.Logger | None = None,
        model_name: str | None = None,
        description: str | None = None,
    ):
        self.data_collator, self.signature_columns = data_collator, signature_columns
        self.logger, self.model_name, self.description = logger, model_name, description
        self.message_logged = False
        # In the order in which they were met.
        self.dropped: dict[str, None] = {}

    def __call__(self, features: Sequence[Any]) -> Any:
        """Drop the columns and collate."""
        kept = frozenset(self.signature_columns)
        rows = []
        for feature in features:
            if not isinstance(feature, dict):
                rows.append(feature)
            elif feature.keys() <= kept:
                # Copied here and below: collators take entries out of what they get.
                rows.append(dict(feature))
            else:
                rows.append(self._without_extra_columns(feature, kept))
        return self.data_collator(rows)

    def note_extra_columns(self, feature: Any) -> None:
        """Remember which columns of a sample are dropped, and log those of the first one that has any."""
        if not isinstance(feature, dict):
            return
        extra = [name for name in feature if name not in self.signature_columns]
        self.dropped.update(dict.fromkeys(extra))
        if extra and not self.message_logged and self.logger is not None:
            self.message_logged = True
            self.logger.info(dropped_columns_message(sorted(extra), self.description, self.model_name))

    def _without_extra_columns(self, feature: dict[str, Any], kept: frozenset[str]) -> dict[str, Any]:
        if not feature.keys() <= kept | self.dropped.keys():
            self.note_extra_columns(feature)
        return {name: value for name, value in feature.items() if name in kept}


def dropped_columns_message(dropped: Sequence[str], description: str | None, model_name: str | None) -> str:
    """One sentence on which columns are not passed to the model, and how to keep them."""
    where = f" of the {description} set" if description else ""
    return (
        f"Columns{where} that {model_name}.forward does not take are left out: {', '.join(dropped)}. "
        "Set remove_unused_columns=False to pass them to the collator."
    )
