"""Pushes on their way: one thread sends them in order, and what fails is sent again with the next one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from littrainer.hub.failures import PushError, advice_for, tells, text_of
from littrainer.hub.snapshot import remove_snapshot
from littrainer.hub.transfer import upload_folder

logger = logging.getLogger(__name__)


@dataclass
class Upload:
    """One commit that is to be made.

    Parameters:
        repository: the repository's id.
        folder: whose files are sent.
        message: of the commit.
        token: to sign in with; in no text of this object.
        revision: the branch; None is the main one.
        path_in_repo: folder there; None is the root.
        replaces_folder: delete what else lies in that folder, in the same commit.
        stays_wanted: send it later too, even when there is a newer one.
    """

    repository: str
    folder: Path
    message: str
    token: str | None = field(default=None, repr=False)
    revision: str | None = None
    path_in_repo: str | None = None
    replaces_folder: bool = False
    stays_wanted: bool = False

    def send(self) -> Any:
        """Make the commit.

        Raises:
            huggingface_hub.errors.HfHubHTTPError: the Hub refuses it.
        """
        return upload_folder(
            repo_id=self.repository,
            folder_path=self.folder,
            path_in_repo=self.path_in_repo,
            commit_message=self.message,
            token=self.token,
            revision=self.revision,
            delete_patterns="*" if self.replaces_folder else None,
        )


@dataclass
class Push:
    """What is sent for one save.

    Parameters:
        prepare: makes the folders of the uploads; called by the thread that sends.
        uploads: the commits, in order.
    """

    uploads: list[Upload]
    prepare: Callable[[], object] = lambda: None


class PushInProgress:
    """The pushes of a Trainer, of which the thread sends one at a time.

    Attributes:
        jobs: the Futures of those that have not ended yet, and of the last ones that have.
    """

    def __init__(self) -> None:
        self.jobs: list[Future[Any]] = []
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        # Of the push that failed last, and of earlier ones where they stay wanted; the thread alone changes it.
        self._unsent: list[Upload] = []
        self._failure: PushError | None = None

    def __reduce__(self) -> Any:
        # A Trainer that is copied or sent to another process has no pushes under way there.
        return (type(self), ())

    def is_done(self) -> bool:
        """Whether no push is on its way."""
        return all(job.done() for job in self.jobs)

    def wait_until_done(self) -> None:
        """Return when no push is on its way."""
        wait(self.jobs)

    def cancel(self) -> None:
        """Drop the pushes that have not begun; the one that has begun goes on."""
        self.jobs = [job for job in self.jobs if not (job.cancel() or job.done())]

    def begin(self, push: Push) -> None:
        """Send a push, and what failed before and is still wanted, in the background."""
        self.run(lambda: self._carry_out(push))

    def run(self, work: Callable[[], Any]) -> Future[Any]:
        """Do a piece of work after what is on its way."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="push to the Hub")
        job = self._pool.submit(work)
        self.jobs = [*(one for one in self.jobs if not one.done()), job]
        return job

    def note_failure(self, doing: str, error: Exception) -> None:
        """Note that a push could not even begin."""
        self._fail(PushError(f"{doing} failed ({text_of(error)})."))

    def forget_failure(self) -> None:
        """Drop what was not sent: something newer of the same has been."""
        with self._lock:
            unsent, self._unsent, self._failure = self._unsent, [], None
        for upload in unsent:
            remove_snapshot(upload.folder.parent)

    def finish(self) -> None:
        """Wait for the pushes, and send once more what failed last.

        Raises:
            PushError: it failed again.
        """
        self.wait_until_done()
        if self._failure is not None and self._unsent:
            logger.warning("The last push to the Hub had failed and is tried once more.")
            unsent, self._unsent = self._unsent, []
            self.run(lambda: self._carry_out(Push(unsent), is_last_try=True))
            self.wait_until_done()
        failure = self._failure
        if failure is not None:
            self.forget_failure()
            raise failure

    def _carry_out(self, push: Push, is_last_try: bool = False) -> None:
        kept = [upload for upload in self._unsent if upload.stays_wanted]
        dropped = {upload.folder.parent for upload in self._unsent} - {upload.folder.parent for upload in kept}
        for folder in dropped:
            remove_snapshot(folder)
        self._unsent, failure = [], None
        uploads = [*push.uploads, *kept]
        try:
            push.prepare()
        except Exception as error:
            self._fail(_failure_of(push.uploads[0], error))
            self._unsent = kept
            for folder in {upload.folder.parent for upload in push.uploads}:
                remove_snapshot(folder)
            return
        for upload in uploads:
            try:
                upload.send()
            except Exception as error:
                failure = _failure_of(upload, error)
                self._unsent.append(upload)
        still_needed = {upload.folder.parent for upload in self._unsent}
        for folder in {upload.folder.parent for upload in uploads} - still_needed:
            remove_snapshot(folder)
        if failure is None or is_last_try:
            self._failure = failure
        else:
            self._fail(failure)

    def _fail(self, failure: PushError) -> None:
        self._failure = failure
        logger.warning("%s Training goes on; the next save is pushed again.", failure)


def _failure_of(upload: Upload, error: Exception) -> PushError:
    doing = f'Pushing "{upload.message}" to {upload.repository}'
    failure = PushError(f"{doing} failed ({text_of(error, upload.token)}). {advice_for(error)}".rstrip())
    if not tells(error, upload.token):
        failure.__cause__ = error
    return failure
