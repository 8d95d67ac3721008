from __future__ import annotations

from littrainer.hub.card.results import Results
from littrainer.hub.card.subject import Data, Subject
from littrainer.hub.card.text import card_text, table

SUBJECT = Subject("name", None, None, None, (), (), (), None, ())


def text_about(**changes: object) -> str:
    subject = Subject(**{**vars(SUBJECT), **changes})
    return card_text(subject, Results(), {"seed": "42"}, {"PyTorch": "2"}, "DDP", ["[badge](https://x)"])


def test_the_columns_of_a_table_are_as_wide_as_what_they_hold() -> None:
    assert table(("a", "Loss"), [("1.25", "2")]) == "| a    | Loss |\n|:----:|:----:|\n| 1.25 | 2    |"


def test_a_bar_in_a_cell_does_not_end_it() -> None:
    assert "a\\|b" in table(("a|b",), [("1",)])


def test_a_base_model_of_the_hub_is_linked_and_a_folder_is_not() -> None:
    linked = text_about(started_from="org/base", base_model="org/base")
    assert "[org/base](https://huggingface.co/org/base)" in linked
    assert "a fine-tuned version of `folder`" in text_about(started_from="folder")
    assert "trained from scratch" in text_about()


def test_datasets_are_listed() -> None:
    data = (Data("A"), Data("B"), Data("C"))
    assert "on the A dataset, the B dataset and the C dataset." in text_about(data=data)


def test_names_cannot_bring_html_or_lines_of_their_own() -> None:
    shown = text_about(name="<script>\n# x")
    assert "# &lt;script&gt; # x\n" in shown


def test_names_cannot_bring_links() -> None:
    link = "[free](https://elsewhere)"
    shown = text_about(name=link, data=(Data(f"!{link}"),), started_from=link) + table(("a",), [(link,)])
    assert "](https://elsewhere)" not in shown and shown.count("https://elsewhere") == 4


def test_badges_stand_below_the_title() -> None:
    shown = text_about()
    assert shown.index("# name") < shown.index("[badge](https://x)") < shown.index("trained from scratch")
