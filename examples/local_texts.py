"""Real texts that are on this machine already, for the examples beside this file. Nothing is downloaded.

- `read_documentation`: the modules, classes and functions of Python's standard library that have a docstring;
  `read_docstrings`: these docstrings as (text, package), `read_summaries`: as (body, first paragraph)
- `read_sources`: the standard library's own source code, file by file
- `read_prose`: the paragraphs of Python's reference manual that the standard library carries for `help()`
- `read_translations`: (English, other language), from the message catalogues of the programs installed here; where
  there are none, syllables in Latin letters and in Korean ones, from Python's table of Unicode names

Each gives the same rows in the same order in every run on a machine. What another machine has may differ, and with it
the numbers that an example ends with.
"""

import ast
import gettext
import struct
import sys
import sysconfig
import unicodedata
import warnings
from collections import Counter, deque
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
MIN_CHARACTERS = 40
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

# ---------------------------------------------------------------- the standard library


class Documented(NamedTuple):
    """A module, class or function of the standard library that has a docstring."""

    package: str  # email
    name: str  # email.message.Message.get_payload
    signature: str  # get_payload(self, i=None, decode=False); without parentheses if it is no function
    docstring: str  # with its line breaks, without the indentation of the source

    @property
    def text(self):
        """The whole docstring in one line."""
        return " ".join(self.docstring.split())

    @property
    def summary(self):
        """Its first paragraph in one line."""
        return " ".join(self.docstring.partition("\n\n")[0].split())

    @property
    def body(self):
        """What follows the first paragraph, in one line; empty if nothing does."""
        return " ".join(self.docstring.partition("\n\n")[2].split())


def source_files():
    """(file, name of its module) of the standard library, without its tests and its internal packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if not parts[0].startswith("_") and not SKIPPED_FOLDERS.intersection(parts):
            yield path, ".".join(part for part in parts if part != "__init__")


def unless_empty(found):
    """What has been found in the source files, or an end of the script with the reason why there is nothing."""
    if not found:
        root = sysconfig.get_paths()["stdlib"]
        raise SystemExit(f"No Python sources under {root}: use an interpreter that is installed with its .py files.")
    return found


def documented_in(path, module):
    """What has a docstring in one source file: the module, then its classes and functions, outer before inner ones."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    to_visit = deque([(tree, module)])
    while to_visit:
        node, name = to_visit.popleft()
        signature = name.rpartition(".")[2]
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            signature = f"{signature}({ast.unparse(node.args)})"
        if isinstance(node, (ast.Module, *DEFINITIONS)):
            docstring = ast.get_docstring(node)
            if docstring:
                yield Documented(module.partition(".")[0], name, signature, docstring)
        for child in ast.iter_child_nodes(node):
            # Nothing is defined within an expression, and there are many.
            if isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)):
                to_visit.append((child, f"{name}.{child.name}" if isinstance(child, DEFINITIONS) else name))


@lru_cache(maxsize=1)
def read_documentation():
    """Every `Documented` of the standard library, in the order of its files."""
    found = tuple(entry for path, module in source_files() for entry in documented_in(path, module))
    return unless_empty(found)


def read_docstrings():
    """(text, package) of every docstring that is long enough to say something; equal texts count once."""
    package_of = {}
    for entry in read_documentation():
        if len(entry.text) >= MIN_CHARACTERS:
            package_of.setdefault(entry.text, entry.package)
    return list(package_of.items())


def read_summaries():
    """(body, first paragraph) of every docstring that has both, each body once."""
    summary_of = {}
    for entry in read_documentation():
        if len(entry.body) >= MIN_CHARACTERS:
            summary_of.setdefault(entry.body, entry.summary)
    return list(summary_of.items())


def read_sources():
    """(name of the module, source code) of every file of the standard library that is UTF-8, as most are."""
    found = []
    for path, module in source_files():
        try:
            found.append((module, path.read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            continue
    return unless_empty(found)


def read_prose():
    """(topic, paragraphs) of the reference manual, by the names under which `help()` shows them.

    Tables, grammar and code are left out: a paragraph is what begins and ends as sentences do.
    """
    from pydoc_data.topics import topics

    found = []
    for topic in sorted(topics):
        blocks = [" ".join(block.split()) for block in topics[topic].split("\n\n")]
        paragraphs = [text for text in blocks if len(text) >= MIN_CHARACTERS and text[0].isupper() and text[-1] in ".:"]
        if paragraphs:
            found.append((topic, paragraphs))
    return found


# ---------------------------------------------------------------- translations

CATALOGUE_FOLDERS = (
    "/usr/share/locale",
    "/usr/local/share/locale",
    "/usr/share/locale-langpack",
    "/opt/homebrew/share/locale",
)
MIN_MESSAGES = 5000


class Translations(NamedTuple):
    """Texts in two languages."""

    language: str  # as the catalogues name it, such as fr
    source: str  # where they are from, for a line of output
    pairs: list  # of (English, other language)


def catalogues():
    """The message catalogues (.mo files) on this machine by language, without those for English."""
    by_language = {}
    for folder in dict.fromkeys((*CATALOGUE_FOLDERS, f"{sys.base_prefix}/share/locale")):
        for path in sorted(Path(folder).glob("*/LC_MESSAGES/*.mo")):
            language = path.parts[-3]
            if not language.startswith("en"):
                by_language.setdefault(language, []).append(path)
    return by_language


def messages_in(path):
    """How many messages a catalogue says it has: the third number of its head."""
    head = path.read_bytes()[:12]
    if len(head) < 12:
        return 0
    order = "<" if head.startswith(b"\xde\x12\x04\x95") else ">"
    return struct.unpack(f"{order}I", head[8:])[0]


def pairs_in(path):
    """(English, other language) of one catalogue: each message and what stands for it, in one line each."""
    try:
        with path.open("rb") as file:
            catalogue = gettext.GNUTranslations(file)._catalog
    except (OSError, UnicodeDecodeError, ValueError, struct.error):
        return
    for message, translation in catalogue.items():
        # Messages with plural forms have a tuple as their key, and the head of the file an empty text.
        if isinstance(message, str) and message and translation:
            # Before an end-of-transmission character stands where a program shows the message.
            yield " ".join(message.rpartition("\x04")[2].split()), " ".join(translation.split())


def read_translations(language=None, min_characters=4, max_characters=60):
    """Messages that this machine's programs show, as `Translations`; each English text once.

    Parameters:
        language: such as "de"; None takes the language with the most messages here.
        min_characters, max_characters: of the English text, and of its translation up to one and a half times as many.
    """
    by_language = catalogues()
    if language is None:
        counts = Counter({name: sum(map(messages_in, paths)) for name, paths in by_language.items()})
        language, count = max(counts.items(), key=lambda item: (item[1], item[0]), default=(None, 0))
        if count < MIN_MESSAGES:
            return romanised_syllables()
    translation_of = {}
    for path in by_language.get(language, ()):
        for english, other in pairs_in(path):
            if (
                english != other
                and min_characters <= len(english) <= max_characters
                and len(other) <= 1.5 * max_characters
                and any(character.isalpha() for character in english)
            ):
                translation_of.setdefault(english, other)
    source = f"message catalogues of this machine, {language}"
    return Translations(language, source, list(translation_of.items()))


def romanised_syllables():
    """Each Korean syllable as Latin letters spell it and as its Korean letters, one after the other."""
    first, last = 0xAC00, 0xD7A3
    pairs = []
    for number in range(first, last + 1):
        latin = unicodedata.name(chr(number)).rpartition(" ")[2].lower()
        pairs.append((latin, unicodedata.normalize("NFD", chr(number))))
    return Translations("ko", "Unicode names of Korean syllables (no message catalogues here)", pairs)
