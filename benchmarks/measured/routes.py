"""Which way does data take through littrainer: how many of its functions are called, and in how many of its files?

Counts are the same however busy the machine is. Only calls of Python functions of the package count, in the main
thread. "Changes" are calls of a function in another file than that of the call before: what somebody who reads along
has to turn pages. The way of a step leads from the end of one to the end of the next, that of a save from the end of a
step to `on_save`, that of a resume from `train()` to the first step.
"""

from __future__ import annotations

import itertools
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from ..benchmark import Benchmark, Case, Measured
from ..figures import Figures, markdown
from ..jobs import JOBS
from ..sides import OURS, Side
from ..trainings import Plan, prepared_training, silenced

# What is counted -> what it may be at most; lower it when a way becomes shorter. A resume differs by a few calls with
# what is installed.
BOUNDS = {"step_calls": 98, "step_files": 18, "step_changes": 54, "save_calls": 302, "resume_calls": 838}
# The steps at whose ends the ways of a step and of a save begin.
STEP, SAVE = 3, 5


class Route:
    """The files of the package's functions, in the order of the calls from `begin` to `end`."""

    def __init__(self) -> None:
        import littrainer

        self._folder = str(Path(littrainer.__file__).parent)
        self._files: list[str] = []

    def begin(self) -> None:
        self._files = []
        sys.setprofile(self._note)

    def end(self) -> list[str]:
        sys.setprofile(None)
        return self._files

    def _note(self, frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(self._folder):
            self._files.append(frame.f_code.co_filename)


def counted(name: str, files: list[str]) -> Measured:
    changes = sum(one != other for one, other in itertools.pairwise(files))
    return {f"{name}_calls": len(files), f"{name}_files": len(set(files)), f"{name}_changes": changes}


def measure(side: Side, steps: int) -> Measured:
    """The ways of one step, one save, and one resume, once a first round has imported what they use."""
    # The clock would look for files in a step that comes a second after its last look.
    with mock.patch("littrainer.loop.clock.FILE_CHECK_INTERVAL_S", math.inf):
        _trained(side, steps)
        return _trained(side, steps)


def _trained(side: Side, steps: int) -> Measured:
    route, done = Route(), 0
    found: Measured = {}

    def step_ended() -> None:
        nonlocal done
        done += 1
        if done == STEP + 1:
            found.update(counted("step", route.end()))
        if done in (STEP, SAVE):
            route.begin()

    def step_begins() -> None:
        if "resume_calls" not in found:
            found.update(counted("resume", route.end()))

    def train(events: dict[str, Callable[[], None]], further: int, **arguments: Any) -> Callable[[], object]:
        saving = {"save_strategy": "steps", "save_steps": SAVE, **arguments}
        plan = Plan(JOBS["mlp"], folder, steps + further, arguments=saving, samples=samples)
        return prepared_training(side, plan, events)

    samples = JOBS["mlp"].samples((steps + 1) * 8)
    with tempfile.TemporaryDirectory() as folder, silenced():
        train({"step_end": step_ended, "save": lambda: found.update(counted("save", route.end()))}, 0)()
        checkpoint = str(Path(folder, f"checkpoint-{SAVE}"))
        resume = train({"step_begin": step_begins}, 1, resume_from_checkpoint=checkpoint)
        route.begin()
        resume()
    return found


def table(figures: Figures) -> str:
    (case,) = figures.cases
    names = ("calls", "files", "changes")
    rows = [
        (way, *(f"{figures.median(case, OURS.name, f'{way}_{name}'):.0f}" for name in names))
        for way in ("step", "save", "resume")
    ]
    return markdown(("the way of a", *names), rows)


def failures(figures: Figures) -> list[str]:
    """No way has become longer."""
    (case,) = figures.cases
    found = {name: figures.median(case, OURS.name, name) for name in BOUNDS}
    return [f"{name}: {found[name]:g}, at most {most}" for name, most in BOUNDS.items() if found[name] > most]


CASES = (Case("mlp", JOBS["mlp"].title, (OURS,), {"steps": 8}, rounds=1),)
BENCHMARK = Benchmark(
    name="routes",
    question="Which way does data take through littrainer?",
    measure=measure,
    full=CASES,
    short=CASES,
    rounds=1,
    tables={"routes": table},
    failures=failures,
)
