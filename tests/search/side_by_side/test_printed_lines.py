"""The lines in what a trial's process prints."""

from __future__ import annotations

import pytest

from littrainer.search.side_by_side.printed_lines import LONGEST_LINE_BYTES, SECONDS_BETWEEN_STATES, PrintedLines


def told(*pieces: bytes) -> list[str]:
    lines = PrintedLines(clock=lambda: 0.0)
    return [line for piece in pieces for line in lines.add(piece)] + lines.rest()


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ((b"one\ntw", b"o\n", b"\nthree"), ["one", "two", "", "three"]),
        ((b"caf\xc3", b"\xa9\nwrong \xff\n"), ["café", "wrong �"]),
        ((b"of another system\r", b"\nnext\r\n"), ["of another system", "next"]),
        ((b"\r 0%", b"\r50%\r10", b"0%\nend\n"), ["100%", "end"]),
        ((b"\r50%\r    \rend\n",), ["end"]),
        ((b"\r50%\r",), ["50%"]),
        ((), []),
    ],
)
def test_lines_are_put_together_of_pieces_and_a_bar_is_its_last_state(
    pieces: tuple[bytes, ...], lines: list[str]
) -> None:
    assert told(*pieces) == lines


def test_a_bar_that_runs_long_tells_a_state_now_and_then() -> None:
    now = [0.0]
    lines = PrintedLines(clock=lambda: now[0])
    found = []
    for second in range(int(3 * SECONDS_BETWEEN_STATES) + 1):
        now[0] = float(second)
        found += lines.add(f"\r{second} of 100".encode())
    # What is told has been written over, so that it is whole.
    assert found == ["9 of 100", "19 of 100", "29 of 100"]
    assert lines.add(b"\n") == ["30 of 100"]


def test_what_never_ends_a_line_is_told_in_parts() -> None:
    lines = PrintedLines()
    assert lines.add(b"x" * (LONGEST_LINE_BYTES - 1)) == []
    assert lines.add(b"xyz") == ["x" * LONGEST_LINE_BYTES]
    assert lines.rest() == ["yz"]
