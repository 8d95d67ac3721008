from __future__ import annotations

from typing import Any

import datasets
import pytest


@pytest.fixture
def rows_decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of Arrow rows that `datasets` decodes in each call."""
    counts: list[int] = []
    real = datasets.arrow_dataset.format_table

    def count_rows(table: Any, *args: Any, formatter: Any, **kwargs: Any) -> Any:
        if not isinstance(formatter, datasets.formatting.ArrowFormatter):
            counts.append(len(table))
        return real(table, *args, formatter=formatter, **kwargs)

    monkeypatch.setattr(datasets.arrow_dataset, "format_table", count_rows)
    return counts
