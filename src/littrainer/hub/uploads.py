"""Uploads in the background: one thread sends them in order, and what fails is sent again with the next one."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from littrainer.hub.model_card import leave_out_generated_card
from littrainer.hub.repository import advice_for, make_branch, remove_files_with_tokens, text_of
from littrainer.hub.snapshot import remove_snapshots

logger = logging.getLogger(__name__)

# What becomes of a push that fails.
GOES_ON = "Training goes on; the next save is pushed again."
STAYS = (
    "What was saved last is in output_dir; push_to_hub() pushes the model, and what the Hub lacks of all_checkpoints."
)
# Between lines that say what is waited for.
SECONDS_BETWEEN_LINES = 30.0
# For which the end of the program waits for what is on its way.
LONGEST_WAIT_AT_EXIT_SECONDS = 3600.0
# How many of the newest checkpoints wait for the Hub though they are deleted here. Of earlier ones only those that are
# still there wait, which takes no room.
MOST_DELETED = 3


@dataclass
class Upload:
    """One commit that is to be made.

    Parameters:
        message: of the commit; None is the Hub's default.
        token: to sign in with; in no text of this object.
        revision: the branch; None is the main one.
        path_in_repo: folder there, whose other files are deleted in the same commit; None is the root.
        stays_wanted: send it later too, even when there is a newer one.
        checkpoint: the one that the files are of; once it is deleted, they take room on the disk.
        prepare: completes the folder, by the thread that sends.
    """

    repository: str
    folder: Path
    message: str | None
    token: str | None = field(default=None, repr=False)
    revision: str | None = None
    path_in_repo: str | None = None
    stays_wanted: bool = False
    checkpoint: Path | None = None
    prepare: Callable[[], object] = lambda: None

    def described(self) -> str:
        return f'"{self.message}" to {self.repository}'

    def takes_room(self) -> bool:
        """Return whether the files are nowhere else on this disk."""
        return self.checkpoint is None or not self.checkpoint.exists()

    def send(self) -> Any:
        """Make the commit, and before it the branch, unless that is there; an edited card there stays."""
        from huggingface_hub import HfApi

        self.prepare()
        make_branch(self.repository, self.revision, self.token)
        if self.path_in_repo is None:
            leave_out_generated_card(self.folder, self.repository, self.revision, self.token)
        remove_files_with_tokens(self.folder, self.token)
        return HfApi().upload_folder(
            repo_id=self.repository,
            folder_path=self.folder,
            path_in_repo=self.path_in_repo,
            commit_message=self.message,
            token=self.token,
            revision=self.revision,
            delete_patterns=None if self.path_in_repo is None else "*",
        )


class PushInProgress:
    """The pushes of a Trainer, which a thread sends one at a time; it keeps no program alive by itself.

    Attributes:
        jobs: the Futures of what has not ended yet, and of what ended last.
        failure_at_end: what the Hub lacks, and why, when pushes were last waited for; None if it lacks nothing.
    """

    def __init__(self) -> None:
        self.jobs: list[Future[Any]] = []
        self.failure_at_end: str | None = None
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        # Of the push that failed last, and of earlier ones if they stay wanted; newest first. Changed by the thread,
        # and while nothing is on its way.
        self._unsent: list[Upload] = []
        self._failure: str | None = None
        # What becomes of a push that fails; None if who waits for it says so.
        self._outlook: str | None = GOES_ON
        self._sent_at_the_moment: Upload | None = None
        # What is set aside is of use only as long as this is there to send it.
        self._set_aside: set[Path] = set()
        weakref.finalize(self, _remove_all, self._set_aside, os.getpid())

    def __reduce__(self) -> Any:
        # What is copied or sent to another process has no thread there.
        return (type(self), ())

    def is_done(self) -> bool:
        """Return whether all that was to be done is done."""
        return all(job.done() for job in self.jobs)

    def wait_until_done(self, seconds: float | None = None) -> bool:
        """Return when all is done, or when so many seconds have passed; whether all is done."""
        return not wait(self.jobs, seconds).not_done

    def cancel(self) -> None:
        """Drop what has not begun; what has begun goes on."""
        self.jobs = [job for job in self.jobs if not (job.cancel() or job.done())]

    def run(self, work: Callable[[], Any]) -> Future[Any]:
        """Do a piece of work after what is on its way."""
        job: Future[Any] = Future()
        self.jobs = [*(one for one in self.jobs if not one.done()), job]
        self._queue.put((job, work))
        if self._thread is None:
            # A worker of a ThreadPoolExecutor could not be left behind by a program that ends.
            self._thread = threading.Thread(target=_serve, args=(self._queue,), name="push to the Hub", daemon=True)
            self._thread.start()
            # What no one can give any more work has no thread either.
            weakref.finalize(self, self._queue.put, None)
            _waited_for.add(self)
        return job

    def begin(self, uploads: list[Upload]) -> None:
        """Send the uploads of a push, and what failed before and is still wanted, in the background."""
        self._outlook = GOES_ON
        self._sent_at_the_moment = self._sent_at_the_moment or uploads[0]
        places = _places(uploads)
        self._set_aside |= places
        self.run(lambda: self._carry_out(uploads)).add_done_callback(functools.partial(_remove_cancelled, places))

    def note_failure(self, doing: str, error: Exception, token: str | None = None) -> None:
        """Note that a push could not even begin, after what is on its way."""
        failure = f"{doing} failed ({text_of(error, token)})."
        self.run(lambda: self._fail(failure))

    def finish(self) -> None:
        """Wait for the pushes, and send once more what failed last; what fails again is a warning.

        What stays wanted is kept, for the next push or for `send_wanted`.
        """
        self._outlook = None
        self._wait()
        if self._failure is not None and self._unsent:
            logger.warning("The last push to the Hub had failed and is tried once more.")
            unsent, self._unsent = self._unsent, []
            self.run(lambda: self._carry_out(unsent))
            self._wait()
        self.failure_at_end, self._failure, self._outlook = self._failure, None, GOES_ON
        if self.failure_at_end is not None:
            unsent, self._unsent = self._unsent, [upload for upload in self._unsent if upload.stays_wanted]
            self._remove(_places(unsent) - _places(self._unsent))
            logger.warning("%s %s", self.failure_at_end, STAYS)

    def send_wanted(self) -> None:
        """Send, in the background, what failed and stays wanted; a failure is a warning. Nothing else is on its way."""
        if self._unsent:
            self._outlook = STAYS
            self.run(lambda: self._carry_out([]))

    def go_on_without_training(self) -> None:
        """Training has ended by an error: what is on its way goes on, and no further save brings what fails."""
        self._outlook = STAYS
        if self.is_at_work():
            logger.warning("%s, and goes on though training has ended.", self._description())
        elif self._failure is not None:
            logger.error("%s %s", self._failure, STAYS)

    def is_at_work(self) -> bool:
        """Return whether something is on its way in this process; in a fork of it the thread does not go on."""
        return self._thread is not None and self._thread.is_alive() and not self.is_done()

    def finish_before_exit(self, seconds: float) -> None:
        """Wait for what is on its way when the program ends, at most so many seconds, or until an interruption."""
        doing = self._description()
        with contextlib.suppress(KeyboardInterrupt):
            logger.warning("%s. The program ends when that is done; Ctrl-C ends it at once.", doing)
            self.wait_until_done(seconds)
        if not self.is_done():
            self.cancel()
            logger.error("%s, and the program ends without it.", doing)

    def _wait(self) -> None:
        begin = time.monotonic()
        while not self.wait_until_done(SECONDS_BETWEEN_LINES):
            logger.warning("%s, and is waited for, %.0f s so far.", self._description(), time.monotonic() - begin)

    def _description(self) -> str:
        upload = self._sent_at_the_moment
        return f"{'A push to the Hub' if upload is None else f'The push of {upload.described()}'} is on its way"

    def _carry_out(self, newest: list[Upload]) -> None:
        before, self._unsent = self._unsent, []
        unsent = uploads = [*newest, *(upload for upload in before if upload.stays_wanted)]
        failure = None
        try:
            while unsent:
                self._sent_at_the_moment, *others = unsent
                self._sent_at_the_moment.send()
                unsent = others
        except Exception as error:
            # What follows would most likely fail as well, and hold up the next save.
            failure = f"Pushing {unsent[0].described()} failed ({text_of(error, unsent[0].token)}). {advice_for(error)}"
        self._sent_at_the_moment, self._unsent = None, _within_room(unsent)
        self._remove(_places([*before, *uploads]) - _places(self._unsent))
        self._failure = None
        if failure is not None:
            self._fail(failure.rstrip())

    def _fail(self, failure: str) -> None:
        self._failure = failure
        if self._outlook is not None:
            logger.warning("%s %s", failure, self._outlook)

    def _remove(self, places: set[Path]) -> None:
        remove_snapshots(*places)
        self._set_aside -= places


def _serve(queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (piece := queue.get()) is not None:
        job, work = piece
        if job.set_running_or_notify_cancel():
            try:
                job.set_result(work())
            except BaseException as error:
                job.set_exception(error)
        # Nothing of it is kept while the thread waits for the next one.
        del piece, job, work


_waited_for: weakref.WeakSet[PushInProgress] = weakref.WeakSet()


def _finish_all_before_exit() -> None:
    for pushes in list(_waited_for):
        if pushes.is_at_work():
            pushes.finish_before_exit(LONGEST_WAIT_AT_EXIT_SECONDS)


# Python's own pools, which the Hub's client uploads with, take no work once the program ends: this is called before
# their function, since it is registered after that, when `concurrent.futures.thread` is imported.
getattr(threading, "_register_atexit", atexit.register)(_finish_all_before_exit)


def _within_room(uploads: list[Upload]) -> list[Upload]:
    """Return the uploads, newest first, that may wait without filling the disk; a warning names the others."""
    wanted = [upload for upload in uploads if upload.stays_wanted]
    given_up = [upload for upload in wanted[MOST_DELETED:] if upload.takes_room()]
    for upload in given_up:
        logger.warning(
            "The push of %s is given up: its checkpoint is deleted here, newer ones wait for the Hub, and what waits "
            "would fill the disk.",
            upload.described(),
        )
    return [upload for upload in uploads if upload not in given_up]


def _places(uploads: list[Upload]) -> set[Path]:
    return {upload.folder.parent for upload in uploads}


def _remove_cancelled(places: set[Path], job: Future[Any]) -> None:
    if job.cancelled():
        remove_snapshots(*places)


def _remove_all(places: set[Path], process: int) -> None:
    # In a fork of the process they are still those of the first one.
    if os.getpid() == process:
        remove_snapshots(*places)
