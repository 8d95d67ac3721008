"""Text that comes from files, made fit to be shown: names may be of any length and hold any letters."""

from __future__ import annotations

import html
from typing import Any

# A longer name fills more than a chart is wide.
LONGEST_LABEL = 80


def shortened(text: str) -> str:
    """A name that is not longer than a chart is wide: beginning and end of a longer one."""
    if len(text) <= LONGEST_LABEL:
        return text
    half = (LONGEST_LABEL - 3) // 2
    return f"{text[: LONGEST_LABEL - 3 - half]}...{text[-half:]}"


def writable(text: str) -> str:
    """Text that UTF-8 can write: JSON may hold halves of letters."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def as_html(value: Any) -> str:
    """Text that comes from outside, made harmless: it can neither end its place nor be unwritable as UTF-8."""
    return html.escape(writable(str(value)), quote=True)


def name_as_html(name: str) -> str:
    """A name as HTML, shortened where it is long; the whole of it is shown under the pointer."""
    short = shortened(name)
    return as_html(name) if short == name else f'<span title="{as_html(name)}">{as_html(short)}</span>'
