"""The texts and tokenizers of the examples: real, the same in every run, and there on a machine with little on it."""

from __future__ import annotations

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
    results = {entry.name: entry for entry in texts.read_documentation()}
    assert list(results) == [
        f"library.shelves{name}" for name in ("", ".Shelf", ".Shelf.put", ".Shelf.put.inner")
    ]  # outer before inner
    put = results["library.shelves.Shelf.put"]
    assert put.signature == "put(self, book, *, place: int=0)" and put.package == "library"
    assert put.summary == "Put a book on it."
    assert put.body == "The place counts from the left, and from zero on."
    assert texts.read_docstrings() == [(f"{put.summary} {put.body}", "library")]
    assert texts.read_summaries() == [(put.body, put.summary)]


def test_a_vocabulary_is_the_same_whenever_it_is_learnt(texts: Any) -> None:
    from small_tokenizers import train_byte_level_bpe, train_wordpiece

    paragraphs = [text for _, results in texts.read_prose() for text in results]
    for train in (train_wordpiece, train_byte_level_bpe):
        # The tokenizer library seeds its hash maps differently each time.
        first, second = (train(paragraphs, vocab_size=600).get_vocab() for _ in range(2))
        assert first == second and len(first) == 600
