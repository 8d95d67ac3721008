"""How a command ends when it is interrupted, or when nobody reads what it prints any longer."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable

FAILURE = 1
# As shells count a program that a signal has ended.
ENDED_BY_SIGNAL = 128
NOBODY_READS = ENDED_BY_SIGNAL + 13
INTERRUPTED = ENDED_BY_SIGNAL + 2


def quietly(answer: Callable[[], int]) -> int:
    """Carry a command out; Ctrl-C, and a reader that has left (`littrainer explain | head -1`), end it without a word.

    Letters that standard output cannot hold are written as escapes.

    Parameters:
        answer: carries it out and returns the exit status.

    Returns:
        That status, or the one that shells expect after a signal.
    """
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
    try:
        try:
            return answer()
        finally:
            # What argparse prints itself still lies in the buffer when it raises SystemExit.
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_has_left():
            raise
        return NOBODY_READS
    except OSError as error:
        # Without a name it is standard output that has no room; files are named.
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        _leave_the_output()
        print(f"littrainer: standard output cannot be written: {error.strerror}", file=sys.stderr)
        return FAILURE
    except KeyboardInterrupt:
        return _interrupted()


def status_of(returncode: int) -> int:
    """The exit status for a child process that has ended so, as `subprocess` counts it."""
    return returncode if returncode >= 0 else ENDED_BY_SIGNAL - returncode


def _reader_has_left() -> bool:
    """Whether nobody reads standard output; a BrokenPipeError may come from elsewhere too."""
    import select

    try:
        output = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    if hasattr(select, "poll"):
        ends = select.poll()
        ends.register(output, select.POLLOUT)
        if not any(event & select.POLLERR for _, event in ends.poll(0)):
            return False
    _leave_the_output()
    return True


def _leave_the_output() -> None:
    # The interpreter flushes once more when it ends, and would tell of the error then.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _interrupted() -> int:
    if os.name == "posix":
        import signal

        # A shell ends a loop around the command only if a signal has ended it.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return INTERRUPTED
