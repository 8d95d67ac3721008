from __future__ import annotations

import pytest

from littrainer.report.labels import LONGEST_LABEL, as_html, name_as_html, shortened, writable


@pytest.mark.parametrize("length", [0, 1, LONGEST_LABEL])
def test_a_name_with_room_stays_as_it_is(length: int) -> None:
    assert shortened("n" * length) == "n" * length
    assert name_as_html("n" * length) == "n" * length


def test_a_long_name_keeps_its_beginning_and_its_end() -> None:
    name = "first" + "n" * 100_000 + "last"
    short = shortened(name)
    assert len(short) == LONGEST_LABEL
    assert short.startswith("first") and "..." in short and short.endswith("last")
    assert name_as_html(name) == f'<span title="{name}">{short}</span>'


def test_half_a_letter_is_written_as_its_number() -> None:
    assert writable("m\ud800x") == "m\\ud800x"


def test_text_from_outside_cannot_end_its_place() -> None:
    assert as_html("<\"'&>\udfff") == "&lt;&quot;&#x27;&amp;&gt;\\udfff"
    assert '"' not in name_as_html('"' * 200).replace('<span title="', "").replace('">', "")
