"""What a check has found, and the page that says so."""

from __future__ import annotations

import datetime
import os
import sysconfig
import textwrap
import traceback
from dataclasses import dataclass, field
from typing import NamedTuple

from littrainer.errors.lazy_isinstance import package_of
from littrainer.errors.tracebacks import INTERNAL

PASSED, FAILS, NOTE = "passed", "would fail", "note"
WIDTH = 110
# Files of Python itself and of installed packages.
NOT_THE_USERS = ("<", *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
# Of the words of an error, which may show a whole batch.
MOST_LETTERS = 600


class Finding(NamedTuple):
    """One thing that was looked at.

    Parameters:
        status: `passed`, `would fail` or `note`.
        about: what was looked at.
        text: what was found.
        when: the moment of the training at which it would fail; empty if it would not.
    """

    status: str
    about: str
    text: str
    when: str = ""

    def lines(self) -> list[str]:
        """Return the lines of a page."""
        words = f"{self.about}: {self.text}"
        shown = [
            f"{self.status:<11}{line}" if not number else f"{'':<11}{line}"
            for number, line in enumerate(
                line for part in words.splitlines() for line in textwrap.wrap(part, WIDTH) or [""]
            )
        ]
        return [*shown, *([f"{'':<11}when: {self.when}"] if self.when else [])]


@dataclass
class CheckReport:
    """What `Trainer.check()` has found; printed, it is a page.

    Parameters:
        training: which training was checked.
        findings: what passed, what would fail and when, and what is worth knowing.
        forecast_seconds: how long the whole training takes; None if that is not known.
        forecast_bytes: peak of the memory of one process: on a GPU what torch allocates there, else the process's
            resident memory; None if that is not known.
        forecast: lines about time and memory.
        is_broken_off: whether one of several processes has failed, and others wait for it.
    """

    training: str
    findings: list[Finding] = field(default_factory=list)
    forecast_seconds: float | None = None
    forecast_bytes: int | None = None
    forecast: dict[str, str] = field(default_factory=dict)
    is_broken_off: bool = False

    @property
    def ok(self) -> bool:
        """Whether nothing was found that would fail."""
        return not any(finding.status == FAILS for finding in self.findings)

    def add(self, status: str, about: str, text: str, when: str = "") -> None:
        """Note a finding."""
        self.findings.append(Finding(status, about, text, when))

    def __str__(self) -> str:
        order = (PASSED, NOTE, FAILS)
        lines = [line for status in order for one in self.findings if one.status == status for line in one.lines()]
        lines += [f"{name:<11}{text}" for name, text in self.forecast.items()]
        number = sum(finding.status == FAILS for finding in self.findings)
        verdict = "Nothing was found that would fail." if self.ok else f"Would fail: {number}."
        return "\n".join([f"littrainer check: {self.training}", "", *lines, "", verdict])


def words_of(error: BaseException) -> str:
    """Return what an error says: its kind, its words and notes, and the line of the user's code that it came from."""
    words = " ".join(str(error).split())
    if len(words) > MOST_LETTERS:
        words = f"{words[:MOST_LETTERS]} ..."
    notes = [" ".join(str(note).split())[:MOST_LETTERS] for note in getattr(error, "__notes__", [])]
    frames = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if package_of(frame) not in INTERNAL and not frame.f_code.co_filename.startswith(NOT_THE_USERS)
    ]
    if frames:
        frame, line = frames[-1]
        notes.append(f"({os.path.basename(frame.f_code.co_filename)}, line {line}, in {frame.f_code.co_name})")
    return "\n".join([f"{type(error).__name__}: {words}", *notes])


def shown_bytes(number: float) -> str:
    """Return a number of bytes for reading, as `1.5 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"


def shown_seconds(number: float) -> str:
    """Return a time for reading, as `0.12 s` or `1:23:45`."""
    return f"{number:.3g} s" if number < 100 else str(datetime.timedelta(seconds=round(number)))
