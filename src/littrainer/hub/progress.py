"""Pushes on their way: one thread sends them in order, and what fails is sent again with the next one."""

from __future__ import annotations

import functools
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from littrainer.hub.failures import advice_for, is_lasting, is_silent, text_of
from littrainer.hub.sending import WorkInOrder
from littrainer.hub.silence import SilentHubError, silence_bounded
from littrainer.hub.snapshot import remove_snapshot
from littrainer.hub.tokens import remove_files_with_secrets
from littrainer.hub.transfer import upload_folder

logger = logging.getLogger(__name__)

# What becomes of a push that fails.
GOES_ON = "Training goes on; the next save is pushed again."
STAYS = (
    "What was saved last is in output_dir; push_to_hub() pushes the model, and what the Hub lacks of all_checkpoints."
)
# Between lines that say what is waited for.
SECONDS_BETWEEN_LINES = 30.0
# How many of the newest checkpoints wait for the Hub though they are deleted here. Of earlier ones only those that are
# still there wait, which takes no room.
MOST_DELETED = 3


@dataclass
class Upload:
    """One commit that is to be made.

    Parameters:
        repository: the repository's id.
        folder: whose files are sent.
        message: of the commit.
        token: to sign in with; in no text of this object.
        secrets: a file with one of these in it is left out, with a warning.
        origins: folders that the files were taken from, for that warning.
        revision: the branch; None is the main one.
        path_in_repo: folder there; None is the root.
        replaces_folder: delete what else lies in that folder, in the same commit.
        stays_wanted: send it later too, even when there is a newer one.
        checkpoint: the one that the files are of; where it is deleted, they take room of their own.
    """

    repository: str
    folder: Path
    message: str
    token: str | None = field(default=None, repr=False)
    secrets: tuple[bytes, ...] = field(default=(), repr=False)
    origins: tuple[Path, ...] = ()
    revision: str | None = None
    path_in_repo: str | None = None
    replaces_folder: bool = False
    stays_wanted: bool = False
    checkpoint: Path | None = None

    def described(self) -> str:
        """What is sent where, for readers."""
        return f'"{self.message}" to {self.repository}'

    def takes_room(self) -> bool:
        """Whether the files are nowhere else on this disk."""
        return self.checkpoint is None or not self.checkpoint.exists()

    def send(self) -> Any:
        """Make the commit.

        Raises:
            huggingface_hub.errors.HfHubHTTPError: the Hub refuses it.
        """
        remove_files_with_secrets(self.folder, self.secrets, self.origins)
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


class PushInProgress(WorkInOrder):
    """The pushes of a Trainer, of which the thread sends one at a time.

    Attributes:
        failure_at_end: what the Hub lacks, and why, when pushes were last waited for; None where it lacks nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        # Of the push that failed last, and of earlier ones where they stay wanted; newest first. Changed by the thread,
        # and where nothing is on its way.
        self._unsent: list[Upload] = []
        self._failure: str | None = None
        self._is_silent = False
        self.failure_at_end: str | None = None
        # What becomes of a push that fails; None where who waits for it says so.
        self._outlook: str | None = GOES_ON
        self._sent_at_the_moment: Upload | None = None
        # Oldest first; those that have begun are among them until the next one is added.
        self._waiting: list[tuple[Future[Any], Push]] = []
        self._left_out: Push | None = None
        # What is set aside is of use only as long as this is there to send it.
        self._set_aside: set[Path] = set()
        weakref.finalize(self, _remove_all, self._set_aside, os.getpid())

    def begin(self, push: Push) -> None:
        """Send a push, and what failed before and is still wanted, in the background."""
        self._outlook = GOES_ON
        self.drop_left_out()
        self._sent_at_the_moment = self._sent_at_the_moment or push.uploads[0]
        places = _places(push.uploads)
        self._set_aside |= places
        job = self.run(lambda: self._carry_out(push))
        job.add_done_callback(functools.partial(_remove_cancelled, places))
        waiting = [(one, its) for one, its in self._waiting if not (one.running() or one.done())]
        self._waiting = [*waiting, (job, push)]
        for earlier, superseded in self._waiting[:-MOST_DELETED]:
            if superseded.uploads[0].takes_room() and earlier.cancel():
                _tell_given_up(superseded.uploads[-1])

    def leave_out(self, push: Push) -> None:
        """Note a push that is not to be sent as long as a newer one may take its place."""
        self.drop_left_out()
        self._left_out = push
        self._set_aside |= _places(push.uploads)

    def taken_left_out(self) -> Push | None:
        """The newest push that was left out, which is for the caller to begin; None where a newer one was begun."""
        push, self._left_out = self._left_out, None
        return push

    def drop_left_out(self) -> None:
        """Forget what was left out."""
        push = self.taken_left_out()
        if push is not None:
            self._remove(_places(push.uploads))

    def note_failure(self, doing: str, error: Exception, token: str | None = None) -> None:
        """Note that a push could not even begin, after what is on its way."""
        failure = f"{doing} failed ({text_of(error, token)})."
        self.run(lambda: self._fail(failure))

    def finish(self) -> None:
        """Wait for the pushes, and send once more what failed last, unless the Hub is silent; a failure is a warning.

        What stays wanted is kept, for the next push or for `send_wanted`.
        """
        self._outlook = None
        self._wait()
        if self._failure is not None and self._unsent and not self._is_silent:
            logger.warning("The last push to the Hub had failed and is tried once more.")
            unsent, self._unsent = self._unsent, []
            self.run(lambda: self._carry_out(Push(unsent)))
            self._wait()
        self.failure_at_end, self._failure, self._is_silent, self._outlook = self._failure, None, False, GOES_ON
        if self.failure_at_end is not None:
            unsent, self._unsent = self._unsent, [upload for upload in self._unsent if upload.stays_wanted]
            self._remove(_places(unsent) - _places(self._unsent))
            logger.warning("%s %s", self.failure_at_end, STAYS)

    def _wait(self) -> None:
        begin = time.monotonic()
        while not self.wait_until_done(SECONDS_BETWEEN_LINES):
            logger.warning("%s, and is waited for, %.0f s so far.", self.describe(), time.monotonic() - begin)

    def send_wanted(self) -> None:
        """Send, in the background, what failed and stays wanted; a failure is a warning. Nothing else is on its way."""
        if self._unsent:
            self._outlook = STAYS
            self.run(lambda: self._carry_out(Push([])))

    def go_on_without_training(self) -> None:
        """Training has ended by an error: what is on its way goes on, and no further save brings what fails."""
        self._outlook = STAYS
        left_out = self._left_out
        self.drop_left_out()
        if self.is_at_work():
            logger.warning("%s, and goes on though training has ended.", self.describe())
        elif self._failure is not None:
            logger.error("%s %s", self._failure, STAYS)
        if left_out is not None:
            logger.warning("%s was left out meanwhile. %s", left_out.uploads[0].described(), STAYS)

    def describe(self) -> str:
        """What is on its way, as a sentence without its full stop."""
        upload = self._sent_at_the_moment
        return f"{'A push to the Hub' if upload is None else f'The push of {upload.described()}'} is on its way"

    def _carry_out(self, push: Push) -> None:
        before, self._unsent = self._unsent, []
        uploads = [*push.uploads, *(upload for upload in before if upload.stays_wanted)]
        if not uploads:
            return
        unsent: list[Upload] = []
        failure: str | None = None
        is_hopeless, was_silent, self._is_silent = False, self._is_silent, False
        try:
            self._sent_at_the_moment = uploads[0]
            if was_silent and self._outlook != GOES_ON:
                raise SilentHubError("not tried, since nothing came or went for the push before it")
            with silence_bounded():
                push.prepare()
                for number, upload in enumerate(uploads):
                    # What is of earlier pushes does not hold up training's end, or the next save, by failing each by
                    # itself.
                    if is_hopeless or (failure is not None and number >= len(push.uploads) > 0):
                        unsent.append(upload)
                        continue
                    self._sent_at_the_moment = upload
                    try:
                        upload.send()
                    except Exception as error:
                        # The first one is of the newest save.
                        failure = failure or _failure_of(upload, error)
                        self._is_silent, is_hopeless = is_silent(error), is_lasting(error)
                        unsent.append(upload)
        except Exception as error:
            # Of what needs no preparing, the next push brings what is wanted even then.
            failure, self._is_silent = _failure_of(uploads[0], error), is_silent(error)
            unsent = [upload for upload in uploads if upload.stays_wanted]
        self._sent_at_the_moment, self._unsent = None, _within_room(unsent)
        self._remove(_places(before, uploads) - _places(self._unsent))
        if failure is None:
            self._failure = None
        else:
            self._fail(failure)

    def _fail(self, failure: str) -> None:
        self._failure = failure
        if self._outlook is not None:
            logger.warning("%s %s", failure, self._outlook)

    def _remove(self, places: set[Path]) -> None:
        _remove_places(places)
        self._set_aside -= places


def _within_room(uploads: list[Upload]) -> list[Upload]:
    """Of uploads, newest first, those that may wait without filling the disk; the others are told of."""
    wanted = [upload for upload in uploads if upload.stays_wanted]
    given_up = [upload for upload in wanted[MOST_DELETED:] if upload.takes_room()]
    for upload in given_up:
        _tell_given_up(upload)
    return [upload for upload in uploads if not any(upload is one for one in given_up)]


def _tell_given_up(upload: Upload) -> None:
    logger.warning(
        "The push of %s is given up: its checkpoint is deleted here, newer ones wait for the Hub, and what waits would "
        "fill the disk.",
        upload.described(),
    )


def _remove_places(places: Iterable[Path]) -> None:
    for place in places:
        remove_snapshot(place)


def _remove_cancelled(places: set[Path], job: Future[Any]) -> None:
    if job.cancelled():
        _remove_places(places)


def _remove_all(places: set[Path], owner: int) -> None:
    # In a fork of the process they are still those of the first one.
    if os.getpid() == owner:
        _remove_places(list(places))


def _places(*several: list[Upload]) -> set[Path]:
    return {upload.folder.parent for uploads in several for upload in uploads}


def _failure_of(upload: Upload, error: Exception) -> str:
    return f"Pushing {upload.described()} failed ({text_of(error, upload.token)}). {advice_for(error)}".rstrip()
