"""The lines in what a process prints, which comes piece by piece."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

ENDS = re.compile(rb"([\r\n])")
SECONDS_BETWEEN_STATES = 10.0
# What is longer is told in several lines.
LONGEST_LINE_BYTES = 65536


class PrintedLines:
    """Puts lines together; of one that is written over, as bars are, it gives the last state, and one now and then.

    Parameters:
        clock: the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._open = b""
        # What "\r" has ended, and the next text writes over.
        self._state = b""
        self._last_told: float | None = None

    def add(self, content: bytes) -> list[str]:
        """The lines that end in what has come."""
        lines = []
        for part in ENDS.split(content):
            if part == b"\n":
                lines += self._closed()
            elif part == b"\r":
                lines += self._written_over()
            else:
                self._open += part
                while len(self._open) >= LONGEST_LINE_BYTES:
                    lines.append(_text(self._open[:LONGEST_LINE_BYTES]))
                    self._open = self._open[LONGEST_LINE_BYTES:]
        return lines

    def rest(self) -> list[str]:
        """The line that has no end, when nothing more comes."""
        return self._closed() if self._open or self._state else []

    def _closed(self) -> list[str]:
        line = self._open or self._state
        self._open = self._state = b""
        self._last_told = None
        return [_text(line)]

    def _written_over(self) -> list[str]:
        self._state, self._open = self._open or self._state, b""
        if self._last_told is None:
            self._last_told = self._clock()
        if not self._state.strip() or self._clock() - self._last_told < SECONDS_BETWEEN_STATES:
            return []
        self._last_told = self._clock()
        return [_text(self._state)]


def _text(line: bytes) -> str:
    return line.decode(errors="replace")
