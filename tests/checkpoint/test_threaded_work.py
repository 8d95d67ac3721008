from __future__ import annotations

import os
import signal
import threading

import pytest

from littrainer.checkpoint.threaded_work import ThreadedWork


def test_work_is_waited_for_again_after_ctrl_c_has_interrupted_the_wait() -> None:
    opened = threading.Event()
    done: list[str] = []

    def work() -> None:
        opened.wait()
        done.append(threading.current_thread().name)

    begun = ThreadedWork(work, name="at work")
    begun.start()
    interrupt = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        begun.wait()
    assert not begun.has_ended() and done == []
    threading.Timer(0.1, opened.set).start()
    begun.wait()
    assert begun.has_ended() and done == ["at work"] and begun.error is None


def test_what_the_work_raises_is_kept() -> None:
    error = SystemExit(3)

    def work() -> None:
        raise error

    begun = ThreadedWork(work)
    begun.start()
    begun.wait()
    assert begun.error is error
