"""The site's pages: all are in the navigation, and links lead somewhere.

`make docs` builds the site, which checks the same of what it has made; here nothing is built.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from tests.docs.blocks import blocks_of, is_translation
from tests.docs.markdown_links import FENCED, anchors_of, links_of, prose

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
# Files at the top of the repository are pages of the site under this name.
OF_REPOSITORY = "repository/"


def in_navigation(entries: Any) -> Iterator[str]:
    for entry in entries if isinstance(entries, list) else [entries]:
        if isinstance(entry, dict):
            yield from (page for below in entry.values() for page in in_navigation(below))
        else:
            yield entry


def test_the_navigation_has_each_page_once_and_nothing_else() -> None:
    pages = [page for page in in_navigation(SITE["nav"]) if not page.startswith(OF_REPOSITORY)]
    there = [page for page in DOCS.rglob("*.md") if not is_translation(page)]
    assert sorted(pages) == sorted(str(page.relative_to(DOCS)) for page in there)


@pytest.mark.parametrize("page", [page for page in PAGES if is_translation(page)], ids=lambda page: page.name)
def test_a_translation_has_the_code_the_links_and_the_anchors_of_the_english_page(page: Path) -> None:
    english = page.with_suffix("").with_suffix(".md")
    here, there = ([block.code for block in blocks_of(str(each.relative_to(ROOT)))] for each in (page, english))
    assert here == there
    assert Counter(links_of(page)) == Counter(links_of(english))
    # No link has the title as its target.
    assert len(anchors_of(english) - anchors_of(page)) <= 1


def test_pages_of_the_navigation_outside_docs_exist() -> None:
    pages = [page for page in in_navigation(SITE["nav"]) if page.startswith(OF_REPOSITORY)]
    assert pages and all((ROOT / page.removeprefix(OF_REPOSITORY)).is_file() for page in pages)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_each_link_of_a_page_leads_to_a_file_and_an_anchor_that_are_there(page: Path) -> None:
    lost = []
    for target in links_of(page):
        address = urlsplit(target)
        if address.scheme:
            # No request is sent; a URL only has to be valid.
            is_sound = address.scheme == "mailto" or (address.scheme in ("http", "https") and "." in address.netloc)
        else:
            file = (page.parent / address.path).resolve() if address.path else page
            is_sound = file.exists() and file.is_relative_to(ROOT)
            # A fragment that selects the light or dark picture.
            if is_sound and address.fragment and not address.fragment.endswith("-mode-only"):
                is_sound = file.suffix == ".md" and address.fragment in anchors_of(file)
        if not is_sound:
            lost.append(target)
    assert not lost


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_what_belongs_to_an_item_of_a_list_is_indented_by_four(page: Path) -> None:
    """With two or three spaces a code host takes a paragraph or a block into the item, and the site does not."""
    text = page.read_text(encoding="utf-8")
    fences = [fence[0].split("\n")[0] for fence in FENCED.finditer(text)]
    after_a_gap = re.findall(r"\n\n( {1,3}(?![-*\d ]).*)", prose(page))
    assert [line for line in [*fences, *after_a_gap] if re.match(r" {1,3}\S", line)] == []
