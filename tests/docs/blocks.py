"""The pages of the documentation, and the fenced blocks of code on them."""

from __future__ import annotations

import ast
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON = ("python", "py")
COMMANDS = ("bash", "sh", "shell", "console")
CONFIGURATION = ("yaml", "json", "toml")
OUTPUT = ("text", "output")
NOT_CODE = ("mermaid", "diff")
PROGRAMS = ("littrainer", "python", "python3", "torchrun", "accelerate", "make", "pip", "git", "cd")
"""A block without a language is one of commands where a line of it begins with one of these."""


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Parameters:
        page: its file, relative to the root of the repository.
        line: number of the first line of its code on the page.
        language: the info string of the fence, or a guess from the code if there is none.
        title: the file that the block is, where the fence names one: ```python title="train.py".
        code: without the indentation that it has as a whole.
    """

    page: str
    line: int
    language: str
    title: str | None
    code: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def pages(root: Path = ROOT) -> list[str]:
    """README, CONTRIBUTING and every page under docs/, as paths relative to the root."""
    results = [*sorted(root.glob("*.md")), *sorted(root.glob("docs/**/*.md"))]
    return [str(path.relative_to(root)) for path in results if not is_translation(path)]


def is_translation(path: Path) -> bool:
    """Return whether a page is a translation, as `index.ko.md`, whose code is the English page's."""
    return path.suffixes[:-1] != [] and path.with_suffix("").with_suffix(".md").exists()


def blocks_of(page: str, root: Path = ROOT) -> list[Block]:
    """The fenced blocks of a page, from top to bottom.

    Raises:
        ValueError: a fence is opened and not closed.
    """
    lines = (root / page).read_text(encoding="utf-8").splitlines()
    results: list[Block] = []
    opened: tuple[int, str, str] | None = None
    for number, line in enumerate(lines, start=1):
        fence = re.match(r"\s*(`{3,}|~{3,})(.*)$", line)
        if opened is None:
            if fence:
                opened = (number, fence[1], fence[2].strip())
        elif fence and fence[1].startswith(opened[1]) and not fence[2].strip():
            start, _, info = opened
            code = textwrap.dedent("\n".join(lines[start : number - 1]) + "\n")
            results.append(_block(page, start + 1, info, code))
            opened = None
    if opened is not None:
        raise ValueError(f"{page}:{opened[0]}: a fence without an end")
    return results


def _block(page: str, line: int, info: str, code: str) -> Block:
    language = info.split()[0].strip("{}.") if info.split() else ""
    titled = re.search(r'title="([^"]+)"', info)
    if not language:
        is_commands = any(_begins_with_a_program(text) for text in code.splitlines())
        language = "bash" if is_commands else "text"
    return Block(page, line, language, titled[1] if titled else None, code)


def _begins_with_a_program(line: str) -> bool:
    arguments = [word for word in line.strip().removeprefix("$ ").split() if not re.match(r"[A-Z_]+=", word)]
    return bool(arguments) and arguments[0] in PROGRAMS


def statements_of(block: Block) -> list[tuple[ast.stmt, str]]:
    """The statements of a block of Python with their text; their lines are numbered as on the page."""
    tree = ast.parse(block.code, filename=block.page)
    lines = block.code.splitlines()
    results = []
    for statement in tree.body:
        text = "\n".join(lines[statement.lineno - 1 : statement.end_lineno])
        ast.increment_lineno(statement, block.line - 1)
        results.append((statement, text))
    return results
