"""One thread does pieces of work in order; the end of the program waits for it, and no longer than somebody wants."""

from __future__ import annotations

import _thread
import functools
import gc
import logging
import os
import threading
from concurrent.futures import CancelledError

import pytest

from littrainer.hub.sending import WorkInOrder
from tests.scenarios.other_processes import LONGEST_WAIT_SECONDS


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "push to the Hub"]


def test_pieces_of_work_are_done_one_after_the_other() -> None:
    work, done = WorkInOrder(), list[int]()
    may_begin = threading.Event()
    work.run(lambda: may_begin.wait(LONGEST_WAIT_SECONDS))

    def note(number: int) -> int:
        done.append(number)
        return number

    jobs = [work.run(functools.partial(note, number)) for number in range(5)]
    assert not work.is_done() and done == []
    may_begin.set()
    assert [job.result(60) for job in jobs] == done == [0, 1, 2, 3, 4]
    assert work.wait_until_done() and work.is_done()


def test_an_error_is_that_of_its_future_and_the_next_piece_is_done() -> None:
    work = WorkInOrder()
    failing = work.run(lambda: 1 / 0)
    assert work.run(lambda: "done").result(60) == "done"
    assert isinstance(failing.exception(60), ZeroDivisionError)


def test_what_has_not_begun_can_be_cancelled() -> None:
    work, has_begun, may_end = WorkInOrder(), threading.Event(), threading.Event()

    def wait() -> bool:
        has_begun.set()
        return may_end.wait(LONGEST_WAIT_SECONDS)

    first = work.run(wait)
    second = work.run(lambda: None)
    assert has_begun.wait(LONGEST_WAIT_SECONDS)
    work.cancel()
    may_end.set()
    assert first.result(60) and work.wait_until_done()
    with pytest.raises(CancelledError):
        second.result(60)


def test_a_thread_without_an_owner_ends() -> None:
    before = threads()
    work = WorkInOrder()
    work.run(lambda: None).result(60)
    (thread,) = [one for one in threads() if one not in before]
    del work
    gc.collect()
    thread.join(LONGEST_WAIT_SECONDS)
    assert not thread.is_alive()


def test_a_fork_of_the_process_does_not_wait_for_work_that_goes_on_in_the_first_one() -> None:
    work, may_end = WorkInOrder(), threading.Event()
    work.run(lambda: may_end.wait(LONGEST_WAIT_SECONDS))
    child = os.fork()
    if child == 0:
        os._exit(work.is_at_work())
    assert work.is_at_work()
    may_end.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_end_of_the_program_waits_for_work_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    work, may_end = WorkInOrder(), threading.Event()
    work.run(lambda: may_end.wait(LONGEST_WAIT_SECONDS))
    threading.Timer(0.05, may_end.set).start()
    work.finish_before_exit(60)
    assert work.is_done()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "The program ends when that is done; Ctrl-C ends it at once." in caplog.text


def test_an_interruption_ends_the_wait_and_what_is_not_done_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    work, may_end = WorkInOrder(), threading.Event()

    class Interrupting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            # As Ctrl-C, as soon as who sits there has been told of it.
            if record.levelno == logging.WARNING:
                _thread.interrupt_main()

    handler = Interrupting()
    logger = logging.getLogger("littrainer.hub.sending")
    logger.addHandler(handler)
    try:
        first, second = work.run(lambda: may_end.wait(LONGEST_WAIT_SECONDS)), work.run(lambda: None)
        work.finish_before_exit(60)
        assert not first.done() and second.cancelled()
    finally:
        logger.removeHandler(handler)
        may_end.set()
    assert "and the program ends without it" in caplog.text


def test_work_that_takes_too_long_is_left_behind_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    work, may_end = WorkInOrder(), threading.Event()
    work.run(lambda: may_end.wait(LONGEST_WAIT_SECONDS))
    work.finish_before_exit(0.01)
    may_end.set()
    assert "and the program ends without it" in caplog.text
