from __future__ import annotations

from typing import Any

import datasets
import pytest


@pytest.fixture
def rows_decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows of an Arrow table `datasets` has made values of, at each call."""
    counts: list[int] = []
    real = datasets.arrow_dataset.format_table

    def counted(table: Any, *args: Any, formatter: Any, **kwargs: Any) -> Any:
        if not isinstance(formatter, datasets.formatting.ArrowFormatter):
            counts.append(len(table))
        return real(table, *args, formatter=formatter, **kwargs)

    monkeypatch.setattr(datasets.arrow_dataset, "format_table", counted)
    return counts
