"""Sources and tests use the field's words; CONTRIBUTING.md has the rules and the glossary."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# How a comment or docstring may not begin, and words that have a plainer one.
PROSE = {
    "begins without its subject": r"\A(what|where|which|whether|ones?|its?|that|those|they|these|of|but)\b",
    "machines as people": r"\b(tells?|told|telling|hears?|heard|hearing|answer(s|ed|ing)?|brings?|brought|bringing)\b",
    "things that stand and lie": r"\b(stands?|stood|standing|lies|lay|lying|go(es)? on|going on|went on)\b",
    "a pronoun instead of the noun": r"\b(the|an?|this|each|every|that|another|no) ones?\b",
    "foreign words": r"\b(anew|besides?|behind|but for|likewise|thereof|therein|whereby|sick|own one|at hand)\b",
}
NAMES = {
    "a participle or preposition as a function": (
        r"_*(fitted|gathered|padded|made|taken|kept|given|found|told|seen|asked|drawn|known|carried|brought|of|by|from|as|in"
        r"|to|with|without|before|after|until|for)_"
    ),
    "private words": (
        r".*(?<![a-z])(tells?|told|hears?|brings?|brought|sick|behind|beside|ahead|given|found|others|stands?|taken|took|told"
        r"|known|seen|broken|carried|judged|anew|meant)(?![a-z])"
    ),
}
# These may shrink: places in a thousand functions.
MAX_PLACES = {"src": 60, "tests": 90}
# A symptom or wish -> a part of the name of a function or class, in the file that a reader looks for.
SEARCHES = {
    "all_gather": "distributed/collectives",
    "broadcast": "distributed/collectives",
    "barrier": "distributed/collectives",
    "prefetch": "data/",
    "heartbeat": "distributed/",
    "rollback": "loop/health",
    "nonfinite": "loop/health",
    "clip_grad": "hooks",
    "gradscaler": "optim/stepping",
    "rotate_checkpoints": "checkpoint/retention",
    "manifest": "checkpoint/",
    "dataposition": "data/resume/position",
    "seed_worker": "runtime/seeds",
    "progress": "callbacks/progress",
    "throughput": "loop/speed",
    "out_of_memory": "loop/out_of_memory",
    "watchdog": "loop/watchdog",
    "restart": "commands/restarts",
    "upload": "checkpoint/",
    "tokenizer": "checkpoint/writer",
}


def texts_of(source: str) -> Iterator[str]:
    """The docstrings and comments of a file; comments on consecutive lines are one text."""
    lines: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("#: ")
            if lines and lines[-1][0] == token.start[0] - 1 and token.line.lstrip().startswith("#"):
                text = f"{lines.pop()[1]} {text}"
            lines.append((token.start[0], text))
    yield from (text for _, text in lines)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            yield ast.get_docstring(node) or ""


def names_of(source: str) -> Iterator[tuple[str, bool]]:
    """Each name that a file defines or assigns, and whether it is a function's."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name, isinstance(node, ast.FunctionDef)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, False


def places(root: Path) -> tuple[Counter[str], int]:
    """How often each rule is broken below a folder, and the number of functions there."""
    broken: Counter[str] = Counter()
    functions = 0
    for path in root.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        for text in texts_of(source):
            bare = re.sub(r"`[^`]*`|\"[^\"]*\"", "", text)
            broken.update({rule: len(re.findall(pattern, bare, re.IGNORECASE)) for rule, pattern in PROSE.items()})
        for name, is_function in names_of(source):
            functions += is_function
            participle, private = NAMES
            broken[participle] += is_function and re.match(NAMES[participle], name) is not None
            broken[private] += re.match(NAMES[private], name, re.IGNORECASE) is not None
    return broken, functions


@pytest.mark.parametrize("folder", MAX_PLACES)
def test_rules_are_broken_as_rarely_as_today(folder: str) -> None:
    broken, functions = places(ROOT / folder)
    assert 1000 * broken.total() <= MAX_PLACES[folder] * functions, broken


def test_a_search_for_a_term_finds_its_file() -> None:
    sources = ROOT / "src" / "littrainer"
    defined = [
        (path.relative_to(sources).as_posix(), node.name.lower())
        for path in sources.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    ]
    for term, file in SEARCHES.items():
        assert any(term in name and path.startswith(file) for path, name in defined), f"{term} is not in {file}"
