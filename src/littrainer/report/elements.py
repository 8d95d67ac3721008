"""HTML elements that the parts of a page share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from littrainer.report.labels import as_html, name_as_html, shortened
from littrainer.report.tables import ABSENT, Cell, Table


def breakable(name: str) -> str:
    """A name that may go on in the next line behind an underscore or a slash."""
    return re.sub(r"([_/])(?=\w)", r"\1<wbr>", as_html(shortened(name)))


def tiles_of(tiles: Iterable[tuple[str, str, str]]) -> str:
    """The foremost figures: for each its name, its value and a remark."""
    cells = [
        f"<div><dt>{breakable(name)}</dt><dd>{as_html(value)}</dd><dd class=remark>{as_html(remark)}</dd></div>"
        for name, value, remark in tiles
    ]
    return f"<dl class=tiles>{''.join(cells)}</dl>"


def section(title: str, content: str) -> str:
    """A part of the page under a heading."""
    return f"<section><h2>{as_html(title)}</h2>{content}</section>"


def table_of(table: Table, emphasise_first: bool = False, none: str = "None.") -> str:
    """A table; `none` is said where it has no rows."""
    if not table.rows:
        return f"<p>{as_html(none)}</p>"
    head = "".join(f"<th scope=col>{_heading(heading)}</th>" for heading in table.headings)
    kind = "results" if emphasise_first else "arguments"
    rows = "".join(
        f"<tr><th scope=row>{_cell(name, name_as_html)}</th>{''.join(f'<td>{_cell(cell)}</td>' for cell in cells)}</tr>"
        for name, *cells in table.rows
    )
    return f"<div class=scroll><table class={kind}><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"


def _heading(name: str) -> str:
    return breakable(name) if shortened(name) == name else name_as_html(name)


def _cell(cell: Cell, shown: Callable[[str], str] = as_html) -> str:
    if cell.text == ABSENT:
        return f"<span class=absent>{ABSENT}</span>"
    return shown(cell.text) + (f"<small>{breakable(cell.remark)}</small>" if cell.remark else "")
