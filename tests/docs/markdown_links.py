"""Links and headings of a Markdown file, as code hosts and the site read them."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

FENCED = re.compile(r"^ *(```+|~~~+)[^\n]*\n.*?^ *\1 *$", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"(?<!\\)\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
DEFINITION = re.compile(r"^\[[^\]]+\]:\s+<?(\S+?)>?\s*$", re.MULTILINE)
ATTRIBUTE = re.compile(r"<[a-z][^>]*?\s(?:src|href|srcset)=\"([^\"]+)\"", re.IGNORECASE)
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)
EXPLICIT_ANCHOR = re.compile(r"\{ #([\w-]+) \}$")
MARKUP = re.compile(r"!?\[([^\]]*)\]\([^)]*\)|[`*]|<[^>]+>")


def prose(path: Path) -> str:
    """The text of a file without blocks of code, in which nothing is a link or a heading."""
    return FENCED.sub("", path.read_text(encoding="utf-8"))


def links_of(path: Path) -> list[str]:
    """Return the targets of a file's links and images, as written."""
    text = INLINE_CODE.sub("", prose(path))
    return [target for pattern in (LINK, DEFINITION, ATTRIBUTE) for target in pattern.findall(text)]


def anchors_of(path: Path) -> set[str]:
    """The anchors of a file's headings; a second heading with the same text has a number after it."""
    records: Counter[str] = Counter()
    anchors = set()
    for heading in HEADING.findall(prose(path)):
        if given := EXPLICIT_ANCHOR.search(heading):
            anchors.add(given[1])
            continue
        text = MARKUP.sub(lambda match: match[1] or "", heading).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        anchors.add(f"{anchor}-{records[anchor]}" if records[anchor] else anchor)
        records[anchor] += 1
    return anchors
