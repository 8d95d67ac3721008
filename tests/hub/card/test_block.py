from __future__ import annotations

from collections.abc import Callable

import pytest

from littrainer.hub.card.block import SEAL_PLACE, read_card, written_card

GENERATED = written_card({"license": "mit", "tags": ["a"]}, f"\n# Name\n\n{SEAL_PLACE}\n\nText\n")


def test_metadata_and_text_are_read_as_they_were_written() -> None:
    card = read_card(GENERATED)
    assert card.metadata == {"license": "mit", "tags": ["a"]}
    assert card.text.startswith("\n# Name\n")
    assert not card.has_text_of_a_person
    assert card.entries_of_a_person() == {} and card.entries_taken_out() == set()


@pytest.mark.parametrize(
    "edit",
    [
        lambda content: content.replace("Text", "Test"),
        lambda content: content + "\nMore.\n",
        lambda content: content.replace("# Name\n", ""),
        lambda content: "\n".join(line for line in content.split("\n") if "littrainer card" not in line),
    ],
    ids=["a word", "a line more", "a line less", "the seal"],
)
def test_a_text_that_was_changed_is_a_persons(edit: Callable[[str], str]) -> None:
    assert read_card(edit(GENERATED)).has_text_of_a_person


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.replace("\n", "\r\n"),
        lambda content: content.rstrip("\n"),
        lambda content: content + "\n\n",
        lambda content: content.replace("Text", "Text  "),
        lambda content: "\ufeff" + content,
    ],
    ids=["ends of lines", "no last line", "last lines", "spaces at an end", "byte order mark"],
)
def test_what_editors_do_by_themselves_is_no_change(change: Callable[[str], str]) -> None:
    assert not read_card(change(GENERATED)).has_text_of_a_person


def test_metadata_that_were_changed_are_a_persons_and_the_text_is_not() -> None:
    card = read_card(GENERATED.replace("mit", "apache-2.0"))
    assert card.entries_of_a_person() == {"license": "apache-2.0"}
    assert not card.has_text_of_a_person


def test_a_generated_entry_that_is_gone_was_taken_out_by_a_person() -> None:
    assert read_card(GENERATED.replace("license: mit\n", "")).entries_taken_out() == {"license"}


def test_what_a_person_has_changed_stays_known_when_the_card_is_written_anew() -> None:
    generated = {"license": "mit", "tags": ["a"]}
    again = read_card(written_card({"license": "other", "widget": []}, f"\n{SEAL_PLACE}\n", generated))
    assert again.entries_of_a_person() == {"license": "other", "widget": []}
    assert again.entries_taken_out() == {"tags"}


def test_metadata_in_another_order_are_the_same() -> None:
    reordered = GENERATED.replace("license: mit\n", "").replace("- a\n", "- a\nlicense: mit\n")
    assert reordered != GENERATED
    assert read_card(reordered).entries_of_a_person() == {}


def test_metadata_without_a_text_are_a_persons_and_take_a_generated_text() -> None:
    card = read_card("---\nlicense: mit\n---\n")
    assert card.entries_of_a_person() == {"license": "mit"}
    assert not card.has_text_of_a_person


def test_an_empty_block_is_none_of_a_person() -> None:
    card = read_card("---\n---\n")
    assert card.metadata == {} and card.entries_of_a_person() == {} and not card.has_text_of_a_person


@pytest.mark.parametrize(
    "content",
    [
        "# My model\n",
        "---\ntags: [\n---\n",
        "---\n- a\n---\n",
        "---\nlicense: mit\non: yes\n---\n",
        "---\ntags: 5\n---\n",
        "---\ntags: [{a: b}]\n---\n",
    ],
)
def test_a_card_of_another_hand_is_kept(content: str) -> None:
    assert read_card(content).has_text_of_a_person


def test_a_block_is_a_persons_once_it_is_another_than_was_written() -> None:
    assert not read_card(GENERATED).has_block_of_a_person
    assert read_card(GENERATED.replace("mit", "gpl-3.0")).has_block_of_a_person
    again = read_card(read_card(GENERATED).with_metadata({"license": "gpl-3.0", "tags": ["a"]}))
    assert not again.has_block_of_a_person and not again.has_text_of_a_person
    assert again.entries_of_a_person() == {"license": "gpl-3.0"}


def test_an_entry_with_keys_of_several_kinds_has_a_digest() -> None:
    assert set(read_card(GENERATED.replace("tags:", "widget: {1: a, b: c}\ntags:")).entries_of_a_person()) == {"widget"}
