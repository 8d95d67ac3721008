"""Files of the repository that lie outside docs/ and that pages link to, as pages of the site.

A link such as `../examples/lightning_module.py` works wherever the repository is looked at. The site has no repository
beside it: there, each file that is linked to is a page under `repository/`, Markdown as it is, anything else as text.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, InclusionLevel
from pymdownx.slugs import slugify

# A warning here fails a strict build.
logger = logging.getLogger("mkdocs.hooks.repository_pages")

ROOM = "repository"
# Pages that are in the navigation, whether or not another links to them.
IN_NAVIGATION = ("CHANGELOG.md", "CONTRIBUTING.md")
# What has a page of its own in docs/.
STANDS_FOR = {"README.md": "index.md", "examples": "examples.md", "docs": "index.md"}
LANGUAGES = {".py": "python", ".toml": "toml", ".txt": "text", ".json": "json", "": "text"}

LINK = re.compile(r"(\]\()([^)\s]+)((?:\s+\"[^\"]*\")?\))")
DEFINITION = re.compile(r"^(\[[^\]]+\]:\s+)(\S+)()", re.MULTILINE)
FENCE = re.compile(r"^[ ]*(```+|~~~+)[^\n]*\n.*?^[ ]*\1[ ]*$", re.MULTILINE | re.DOTALL)
SCHEME = re.compile(r"^[a-z][a-z+.-]*:", re.IGNORECASE)


def on_config(config: Any) -> Any:
    """Give headings the anchors that code hosts give them, so that a link works in both."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


# After the plugin for languages, which takes every file for one below docs/.
@event_priority(-100)
def on_files(files: Any, config: Any) -> Any:
    """Add a page for each file outside docs/ that a page leads to, also over another one that is added."""
    root, docs = _folders(config)
    for name in IN_NAVIGATION:
        _add(files, config, root / name)
    waiting = [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path]
    waiting += [root / name for name in IN_NAVIGATION]
    while waiting:
        source = waiting.pop()
        for target in _links(source.read_text("utf-8")):
            path = _path_of(target, source.parent)
            if path is None or path.is_relative_to(docs) or _stand_in(path, root) or not path.is_relative_to(root):
                continue
            if path.is_file() and _add(files, config, path) and path.suffix == ".md":
                waiting.append(path)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Let links lead to where the site has what they lead to in the repository."""
    root, docs = _folders(config)
    source = root / getattr(page.file, "of_repository", Path("docs") / page.file.src_uri)
    if source.suffix != ".md":
        page.meta.update(search={"exclude": True}, hide=["toc"])
        return markdown

    def led(target: str) -> str:
        path = _path_of(target, source.parent)
        if path is None:
            return target
        if path.is_relative_to(docs) and path != docs:
            place = path.relative_to(docs).as_posix()
        else:
            place = _stand_in(path, root) or _place_of(path, root) if path.is_relative_to(root) else ""
            if not place or files.get_file_from_path(place) is None:
                logger.warning("%s links to %s, which is no file of the repository.", source.relative_to(root), target)
                return target
        anchor = target[target.index("#") :] if "#" in target else ""
        return os.path.relpath(place, os.path.dirname(page.file.src_uri) or ".").replace(os.sep, "/") + anchor

    return _with_links(markdown, led)


# After the plugin for languages, which adds the pages of the others to the index.
@event_priority(-200)
def on_post_build(config: Any) -> None:
    """Write the index of the search as a script too: a page that is a file may load no other kind of file."""
    index = Path(config.site_dir, "search", "search_index.json")
    index.with_suffix(".js").write_text(f"var __index = {index.read_text('utf-8')}", "utf-8")


def _folders(config: Any) -> tuple[Path, Path]:
    return Path(config.config_file_path).resolve().parent, Path(config.docs_dir).resolve()


def _place_of(path: Path, root: Path) -> str:
    place = f"{ROOM}/{path.relative_to(root).as_posix()}"
    return place if path.suffix == ".md" else place + ".md"


def _stand_in(path: Path, root: Path) -> str | None:
    return STANDS_FOR.get(path.relative_to(root).as_posix()) if path.is_relative_to(root) else None


def _add(files: Any, config: Any, path: Path) -> bool:
    """Add the page of a file, unless it is there; whether it was added."""
    root, _ = _folders(config)
    place = _place_of(path, root)
    if files.get_file_from_path(place) is not None:
        return False
    text = path.read_text("utf-8")
    if path.suffix != ".md":
        name = path.relative_to(root).as_posix()
        text = f"# {name}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{text.rstrip()}\n````\n"
    is_shown = path.name in IN_NAVIGATION
    file = File.generated(
        config, place, content=text, inclusion=InclusionLevel.INCLUDED if is_shown else InclusionLevel.NOT_IN_NAV
    )
    file.of_repository = path.relative_to(root)
    files.append(file)
    return True


def _path_of(target: str, folder: Path) -> Path | None:
    """The file or folder that a link leads to; None where it is an address, or an anchor of the same page."""
    if SCHEME.match(target) or target.startswith(("#", "/")):
        return None
    return (folder / target.split("#")[0]).resolve()


def _links(markdown: str) -> list[str]:
    found: list[str] = []

    def noted(target: str) -> str:
        found.append(target)
        return target

    _with_links(markdown, noted)
    return found


def _with_links(markdown: str, led: Callable[[str], str]) -> str:
    """The text with each link led elsewhere; blocks of code stay as they are."""

    def changed(text: str) -> str:
        for pattern in (LINK, DEFINITION):
            text = pattern.sub(lambda found: found[1] + led(found[2]) + found[3], text)
        return text

    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [changed(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, changed(markdown[end:])])
