"""The process of a trial, from its side; the two ends of a pipe stand for the processes."""

from __future__ import annotations

import os
import tempfile
from multiprocessing import Pipe
from typing import Any

import pytest

from littrainer.search.side_by_side import worker
from littrainer.search.side_by_side.conversation import Answer, Channel, Setting, Task, value_of
from littrainer.search.travelling import surroundings


def answers_to(results: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[Answer]:
    """What a process answers to trials that return or raise these; the last one ends it."""

    def carried_out(channel: Channel, setting: Setting, packed: bytes, task: Task) -> Any:
        if isinstance(results[task.number], BaseException):
            raise results[task.number]
        return packed, results[task.number]

    monkeypatch.setattr(surroundings, "enter", lambda *arguments: None)
    monkeypatch.setattr(worker, "_carried_out", carried_out)
    here, there = (Channel(end) for end in Pipe())
    with tempfile.TemporaryFile() as trainer_file:
        trainer_file.write(b"a trainer")
        trainer_file.flush()
        here.send(Setting({}, os.dup(trainer_file.fileno()), 1))
        for number in range(len(results)):
            here.send(Task(number))
        with pytest.raises(KeyboardInterrupt):
            worker._carry_out_all(there)
    there.close()
    answers = [here.receive() for _ in results]
    here.close()
    return answers


def test_a_trial_that_the_script_interrupts_says_so_and_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    complete, failed, interrupted = answers_to([0.5, ValueError("too wide"), KeyboardInterrupt()], monkeypatch)
    assert value_of(complete) == (b"a trainer", 0.5)
    with pytest.raises(ValueError, match="too wide"):
        value_of(failed)
    with pytest.raises(KeyboardInterrupt):
        value_of(interrupted)
