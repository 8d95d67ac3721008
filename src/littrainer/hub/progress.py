"""Pushes on their way: one thread sends them in order, and what fails is sent again with the next one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from littrainer.hub.failures import PushError, advice_for, tells, text_of
from littrainer.hub.sending import WorkInOrder
from littrainer.hub.silence import silence_bounded
from littrainer.hub.snapshot import remove_snapshot
from littrainer.hub.tokens import remove_files_with_secrets
from littrainer.hub.transfer import upload_folder

logger = logging.getLogger(__name__)

# What becomes of a push that fails.
GOES_ON = "Training goes on; the next save is pushed again."
STAYS = "All of it is in output_dir; push_to_hub() pushes the model."


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

    def described(self) -> str:
        """What is sent where, for readers."""
        return f'"{self.message}" to {self.repository}'

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
    """The pushes of a Trainer, of which the thread sends one at a time."""

    def __init__(self) -> None:
        super().__init__()
        # Of the push that failed last, and of earlier ones where they stay wanted. Changed by the thread, and where
        # nothing is on its way.
        self._unsent: list[Upload] = []
        self._failure: PushError | None = None
        # What becomes of a push that fails.
        self._outlook = GOES_ON
        self._sent_at_the_moment: Upload | None = None

    def begin(self, push: Push) -> None:
        """Send a push, and what failed before and is still wanted, in the background."""
        self._outlook = GOES_ON
        self._sent_at_the_moment = self._sent_at_the_moment or push.uploads[0]
        self.run(lambda: self._carry_out(push))

    def note_failure(self, doing: str, error: Exception, token: str | None = None) -> None:
        """Note that a push could not even begin, after what is on its way."""
        failure = PushError(f"{doing} failed ({text_of(error, token)}).")
        self.run(lambda: self._fail(failure))

    def forget_failure(self) -> None:
        """Drop what was not sent."""
        unsent, self._unsent, self._failure = self._unsent, [], None
        for folder in _places(unsent):
            remove_snapshot(folder)

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

    def go_on_without_training(self) -> None:
        """Training has ended by an error: what is on its way goes on, and no further save brings what fails."""
        self._outlook = STAYS
        if self.is_at_work():
            logger.warning("%s, and goes on though training has ended.", self.describe())
        elif self._failure is not None:
            logger.error("%s %s", self._failure, STAYS)

    def describe(self) -> str:
        """What is on its way, as a sentence without its full stop."""
        upload = self._sent_at_the_moment
        return f"{'A push to the Hub' if upload is None else f'The push of {upload.described()}'} is on its way"

    def _carry_out(self, push: Push, is_last_try: bool = False) -> None:
        before, self._unsent = self._unsent, []
        uploads = [*push.uploads, *(upload for upload in before if upload.stays_wanted)]
        unsent: list[Upload] = []
        failure = None
        try:
            self._sent_at_the_moment = uploads[0]
            with silence_bounded():
                push.prepare()
                for upload in uploads:
                    self._sent_at_the_moment = upload
                    try:
                        upload.send()
                    except Exception as error:
                        failure = _failure_of(upload, error)
                        unsent.append(upload)
        except Exception as error:
            # Of what needs no preparing, the next push brings what is wanted even then.
            failure = _failure_of(uploads[0], error)
            unsent = [upload for upload in uploads if upload.stays_wanted]
        self._sent_at_the_moment, self._unsent = None, unsent
        for folder in _places(before, uploads) - _places(unsent):
            remove_snapshot(folder)
        if failure is None or is_last_try:
            self._failure = failure
        else:
            self._fail(failure)

    def _fail(self, failure: PushError) -> None:
        self._failure = failure
        logger.warning("%s %s", failure, self._outlook)


def _places(*several: list[Upload]) -> set[Path]:
    return {upload.folder.parent for uploads in several for upload in uploads}


def _failure_of(upload: Upload, error: Exception) -> PushError:
    words = f"Pushing {upload.described()} failed ({text_of(error, upload.token)}). {advice_for(error)}"
    failure = PushError(words.rstrip())
    if not tells(error, upload.token):
        failure.__cause__ = error
    return failure
