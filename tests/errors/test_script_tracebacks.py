"""What a script shows of an error, beside what it shows under transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.errors import traceback_script

ROOT = Path(__file__).parents[2]
METHODS = {"train", "evaluate", "__init__"}


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Case -> library -> error and frames (module, function)."""
    command = [sys.executable, traceback_script.__file__, str(tmp_path_factory.mktemp("script"))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def frames_within(frames: list[list[str]]) -> list[tuple[str, str]]:
    """Package and function of the frames below the public method that the script has called."""
    named = [(module.partition(".")[0], function) for module, function in frames]
    begin = next(place for place, (package, name) in enumerate(named) if package == "littrainer" and name in METHODS)
    return named[begin + 1 :]


# Case -> the calls of ours below the public method, and the last call of all where it is the script's.
ENDS: dict[str, tuple[list[str], str | None]] = {
    "Ctrl-C in forward": (["loss_and_outputs"], "interrupt"),
    "Ctrl-C in the dataset": (["_read"], "interrupt"),
    # It waits until weights and step count agree.
    "Ctrl-C in the optimizer's step": (["end_micro_batch"], None),
    "collator of None": ([], None),
    "collator of a number": ([], None),
    "empty file as checkpoint": ([], None),
    "unknown optimizer": ([], None),
}


@pytest.mark.parametrize("case", ENDS)
def test_nothing_internal_stands_between_the_method_and_the_script_but_the_call_that_led_there(
    shown: Any, case: str
) -> None:
    ours, last = ENDS[case]
    frames = frames_within(shown[case]["littrainer"]["frames"])
    assert [name for package, name in frames if package in ("littrainer", "lightning")] == ours
    assert last is None or frames[-1] == ("__main__", last)


def test_an_object_of_the_users_that_our_code_stumbles_over_shows_the_calls_that_led_to_it(shown: Any) -> None:
    frames = frames_within(shown["scheduler that is a text"]["littrainer"]["frames"])
    assert {package for package, _ in frames} == {"littrainer"} and frames[-1][1] == "_get_learning_rate"


# There our calls are shown that led to the fault.
@pytest.mark.parametrize("case", sorted({*traceback_script.CASES} - {"scheduler that is a text"}))
def test_no_traceback_is_longer_than_the_one_of_transformers(shown: Any, case: str) -> None:
    ours, theirs = (len(shown[case][library]["frames"]) for library in ("littrainer", "transformers"))
    assert 0 < ours <= theirs


@pytest.mark.parametrize("case", ["collator of None", "collator of a number"])
def test_a_collator_that_returns_no_dict_is_told_what_to_return(shown: Any, case: str) -> None:
    assert "let data_collator return a dict such as" in shown[case]["littrainer"]["error"]
