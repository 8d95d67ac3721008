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

PASSED, NOTE, FAILS = "passed", "note", "would fail"
# Where Python's own files are; installed packages lie there, or in a folder of this name. Words of an error may show a
# whole batch.
PYTHON, PACKAGES, MOST_LETTERS = sysconfig.get_path("stdlib"), "site-packages", 600


class Finding(NamedTuple):
    """One thing that was looked at: `passed`, `note` or `would fail`, what it is, what was found, and when it fails."""

    status: str
    about: str
    text: str
    when: str = ""

    def __str__(self) -> str:
        words = f"{self.about}: {self.text}" + (f"\nwhen: {self.when}" if self.when else "")
        return f"{self.status:<11}{textwrap.indent(words, ' ' * 11).lstrip()}"


@dataclass
class CheckReport:
    """What `Trainer.check()` has found; printed, it is a page.

    Parameters:
        training: which training was checked.
        findings: what passed, what is worth knowing, what would fail and when.
        forecast_seconds: how long the whole training takes; None if that is not known.
        forecast_bytes: peak memory of one process, on a GPU what torch allocates there; None if that is not known.
        forecast: lines about time and memory, by their first word.
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

    def __str__(self) -> str:
        shown = [str(one) for status in (PASSED, NOTE, FAILS) for one in self.findings if one.status == status]
        shown += [f"{name:<11}{text}" for name, text in self.forecast.items()]
        number = sum(finding.status == FAILS for finding in self.findings)
        verdict = f"Would fail: {number}." if number else "Nothing was found that would fail."
        return "\n".join([f"littrainer check: {self.training}", "", *shown, "", verdict])


def words_of(error: BaseException) -> str:
    """Return what an error says: its kind, its words and notes, and the line of the user's code that it came from."""
    said = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]
    lines = [textwrap.shorten(str(one), MOST_LETTERS, placeholder=" ...") for one in said]
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        file = frame.f_code.co_filename
        if package_of(frame) not in INTERNAL and not file.startswith(("<", PYTHON)) and PACKAGES not in file:
            lines.append(f"({os.path.basename(file)}, line {line}, in {frame.f_code.co_name})")
            break
    return "\n".join(lines)


def shown_bytes(number: float) -> str:
    """Return a number of bytes for reading, as `1.5 GB`."""
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:,.3g} GB"


def shown_seconds(number: float) -> str:
    """Return a time for reading, as `0.12 s` or `1:23:45`."""
    return f"{number:.3g} s" if number < 100 else str(datetime.timedelta(seconds=round(number)))
