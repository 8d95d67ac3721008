"""The texts and tokenizers of the examples: real, the same in every run, and there on a machine with little on it."""

from __future__ import annotations

import struct
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with nothing that an earlier test has read."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import local_texts

    local_texts.read_documentation.cache_clear()
    yield local_texts
    local_texts.read_documentation.cache_clear()


SOURCE = '''"""About the module."""

class Shelf:
    """A shelf for books."""

    if True:
        async def put(self, book, *, place: int = 0):
            """Put a book on it.

            The place counts from the left,
            and from zero on.
            """
            def inner(): "Nothing but a name."
'''


def test_each_docstring_comes_with_its_name_its_signature_and_its_parts(
    texts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shelves.py").write_text(SOURCE)
    monkeypatch.setattr(texts, "source_files", lambda: [(tmp_path / "shelves.py", "library.shelves")])
    found = {entry.name: entry for entry in texts.read_documentation()}
    assert list(found) == [
        f"library.shelves{name}" for name in ("", ".Shelf", ".Shelf.put", ".Shelf.put.inner")
    ]  # outer ones before inner ones
    put = found["library.shelves.Shelf.put"]
    assert put.signature == "put(self, book, *, place: int=0)" and put.package == "library"
    assert put.summary == "Put a book on it."
    assert put.body == "The place counts from the left, and from zero on."
    assert texts.read_docstrings() == [(f"{put.summary} {put.body}", "library")]
    assert texts.read_summaries() == [(put.body, put.summary)]


def test_the_manual_has_sentences_on_every_topic_that_it_lists(texts: Any) -> None:
    topics = dict(texts.read_prose())
    assert len(topics) > 50 and "while" in topics
    assert all(text[0].isupper() and text[-1] in ".:" for paragraphs in topics.values() for text in paragraphs)


def write_catalogue(path: Path, messages: dict[str, str]) -> None:
    """A catalogue as msgfmt writes it: a head, two tables of lengths and places, and the texts."""
    keys = sorted(messages)
    chunks = [text.encode() + b"\0" for text in (*keys, *(messages[key] for key in keys))]
    places = [28 + 8 * len(chunks) + sum(map(len, chunks[:number])) for number in range(len(chunks))]
    head = struct.pack("<7I", 0x950412DE, 0, len(keys), 28, 28 + 8 * len(keys), 0, 0)
    table = b"".join(struct.pack("<2I", len(chunk) - 1, place) for chunk, place in zip(chunks, places, strict=True))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head + table + b"".join(chunks))


def test_translations_are_those_of_the_language_with_most_messages(
    texts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = {"": "Content-Type: text/plain; charset=UTF-8\n"}
    messages = {
        "menu\x04Open file": "Ouvrir\nun fichier",
        "one file\0%d files": "un fichier\0%d fichiers",
        "GNU!": "GNU!",
    }
    write_catalogue(tmp_path / "fr/LC_MESSAGES/first.mo", {**head, **messages})
    write_catalogue(tmp_path / "fr/LC_MESSAGES/second.mo", {**head, "Open file": "Ouvrir", "x": "y", "Close": "Fermer"})
    write_catalogue(tmp_path / "de/LC_MESSAGES/first.mo", {**head, "Open file": "Datei öffnen"})
    write_catalogue(tmp_path / "en_GB/LC_MESSAGES/first.mo", {f"color {n}": f"colour {n}" for n in range(20)})
    monkeypatch.setattr(texts, "CATALOGUE_FOLDERS", [str(tmp_path)])
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / "nowhere"))
    monkeypatch.setattr(texts, "MIN_MESSAGES", 5)
    found = texts.read_translations()
    assert (found.language, found.pairs) == ("fr", [("Open file", "Ouvrir un fichier"), ("Close", "Fermer")])
    assert texts.read_translations("de").pairs == [("Open file", "Datei öffnen")]


def test_where_there_are_no_catalogues_korean_syllables_are_spelt(texts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "catalogues", dict)
    found = texts.read_translations()
    assert found.language == "ko" and len(found.pairs) == 11172
    assert unicodedata.normalize("NFC", dict(found.pairs)["han"]) == "한"


def test_a_vocabulary_is_the_same_whenever_it_is_learnt(texts: Any) -> None:
    from small_tokenizers import train_byte_level_bpe, train_wordpiece

    paragraphs = [text for _, found in texts.read_prose() for text in found]
    for train in (train_wordpiece, train_byte_level_bpe):
        # The hash maps of the library that learns are seeded anew each time.
        first, second = (train(paragraphs, vocab_size=600).get_vocab() for _ in range(2))
        assert first == second and len(first) == 600


def test_byte_level_tokens_give_any_text_back_and_end_it_where_that_is_asked_for(texts: Any) -> None:
    from small_tokenizers import train_byte_level_bpe

    tokenizer = train_byte_level_bpe(["a few words"], vocab_size=300, ends_texts=True)
    tokens = tokenizer("naïve\n\t한")["input_ids"]
    assert tokens[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "naïve\n\t한"
