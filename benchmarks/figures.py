"""The figures of one benchmark, as tables and curves ask for them: medians, spreads, and comparisons within rounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

Row = Sequence[str]


class Figures:
    """What a record holds of one benchmark.

    Parameters:
        recorded: The benchmark's part of the record.
        versions: Of the libraries; tables name some sides with theirs.
    """

    def __init__(self, recorded: dict[str, Any], versions: dict[str, str]) -> None:
        self.cases: dict[str, dict[str, Any]] = {case["name"]: case for case in recorded["cases"]}
        self.versions = versions

    def __contains__(self, case: str) -> bool:
        return case in self.cases

    def of_curve(self, curve: str) -> list[str]:
        return [name for name, case in self.cases.items() if case["curve"] == curve]

    def title(self, case: str) -> str:
        return str(self.cases[case]["title"])

    def setting(self, case: str, name: str) -> Any:
        return self.cases[case]["settings"][name]

    def sides(self, case: str) -> list[str]:
        return list(self.cases[case]["rounds"])

    def shown(self, side: str) -> str:
        """A side's name in tables."""
        return f"{side} {self.versions[side]}" if side == "transformers" else side

    def number_of_rounds(self, case: str) -> int:
        return len(next(iter(self.cases[case]["rounds"].values())))

    def values(self, case: str, side: str, key: str) -> list[float]:
        """One for each round."""
        return [measured[key] for measured in self.cases[case]["rounds"][side]]

    def median(self, case: str, side: str, key: str) -> float:
        return statistics.median(self.values(case, side, key))

    def spread(self, case: str, side: str, key: str, shown: str = ".0f", times: float = 1.0) -> str:
        """The smallest and the largest, after multiplication."""
        values = self.values(case, side, key)
        return f"{min(values) * times:{shown}} to {max(values) * times:{shown}}"

    def difference(self, case: str, side: str, other: str, key: str) -> float:
        """The median over the rounds of what one side has more than another one of the same round."""
        return self._compared(case, side, other, key, lambda mine, theirs: mine - theirs)

    def ratio(self, case: str, side: str, other: str, key: str) -> float:
        """The median over the rounds of one side's value as a multiple of another one's of the same round."""
        return self._compared(case, side, other, key, lambda mine, theirs: mine / theirs)

    def _compared(self, case: str, side: str, other: str, key: str, compare: Callable[[float, float], float]) -> float:
        pairs = zip(self.values(case, side, key), self.values(case, other, key), strict=True)
        return statistics.median(compare(mine, theirs) for mine, theirs in pairs)


def share(part: float, whole: float) -> str:
    """A part of a whole; nothing where noise has left no whole, or a part below zero."""
    return f"{part / whole:.2f}" if whole > 0 and part >= 0 else ""


def markdown(columns: Row, rows: Sequence[Row], names: int = 1) -> str:
    """A table whose first columns are names and whose others are numbers."""
    rules = ["---"] * names + ["---:"] * (len(columns) - names)
    return "\n".join("| " + " | ".join(row) + " |" for row in [columns, rules, *rows]) + "\n"
