"""Tables of docs/api/compatibility.md."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "api" / "compatibility.md"


def table(first_cells: str) -> dict[str, str]:
    """Return the table whose heading begins so, as name in the first cell -> second cell."""
    rows = PAGE.read_text(encoding="utf-8").partition(f"\n| {first_cells} |")[2].partition("\n\n")[0].splitlines()
    matches = [re.fullmatch(r"\| `([\w.]+)` \| (.*) \|", row) for row in rows]
    return {match[1]: match[2] for match in matches if match}


def names_by_module(first_cells: str, releases: tuple[str, ...]) -> dict[str, dict[str, list[str]]]:
    """Return a table of names as module -> name -> releases that have the name."""
    result: dict[str, dict[str, list[str]]] = {}
    for module, names in table(first_cells).items():
        marked = re.findall(r"`(\w+)`(?: \(([^)]*)\))?", names)
        result[module] = {name: list(releases) if not mark else mark.split(", ") for name, mark in marked}
    return result
