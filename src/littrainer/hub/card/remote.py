"""The card that a repository on the Hub has already, which people edit there too."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

from littrainer.errors.atomic_files import write_whole
from littrainer.hub.card.block import CARD_NAME, Card, read_card
from littrainer.hub.card.metadata import RESULTS, check_metadata, joined, own_entries
from littrainer.hub.card.subject import Given
from littrainer.hub.failures import is_silent, text_of

logger = logging.getLogger(__name__)

# Entries of which neither side's go before the other's.
UNITED = ("tags", *RESULTS)


def settle_card(
    folder: Path, repository: str, revision: str | None, token: str | None, given: Given | None = None
) -> list[str]:
    """Settle what becomes of the card in a folder that is pushed, beside the one that the Hub has.

    A generated card takes over the metadata that somebody has written on the Hub, where neither a call nor the results
    decide them. It is not pushed over a text that was edited there, nor where the Hub does not say what it has. A card
    that somebody has written here is pushed as it is.

    Parameters:
        revision: the branch; None is the main one.
        given: what the call that pushes names.

    Returns:
        names of the files that must not be pushed.

    Raises:
        Exception: the Hub says nothing any more, so that what follows would wait as long.
    """
    path = folder / CARD_NAME
    if not path.is_file():
        return []
    card = read_card(path.read_text(encoding="utf-8", errors="replace"))
    try:
        there = card_on_the_hub(repository, revision, token)
    except Exception as error:
        if is_silent(error):
            raise
        if card.has_text_of_a_person:
            return []
        logger.warning(
            "%s is not pushed, since %s did not say whether its card was edited (%s).",
            path,
            repository,
            text_of(error, token),
        )
        return [CARD_NAME]
    if there is None:
        return []
    if card.has_text_of_a_person:
        _tell_of_what_goes(card, there, path, repository)
        return []
    if there.has_text_of_a_person:
        logger.warning("%s is not pushed: the card of %s was edited on the Hub and stays as it is.", path, repository)
        return [CARD_NAME]
    metadata = _joined_with_the_hub(card, there, given or Given(), path, repository)
    try:
        check_metadata(metadata)
    except ValueError as error:
        logger.warning("%s is not pushed: with the metadata that %s has, %s", path, repository, error)
        return [CARD_NAME]
    if metadata != card.metadata or card.has_block_of_a_person:
        write_whole(path, card.with_metadata(metadata))
    return []


def _joined_with_the_hub(card: Card, there: Card, given: Given, path: Path, repository: str) -> dict[str, Any]:
    own = card.metadata or {}
    is_of_peft = "peft" in (own.get("library_name"), (there.metadata or {}).get("library_name"))
    here, theirs = card.entries_of_a_person(), own_entries(there, is_of_peft)
    taken_out = there.entries_taken_out()
    if not there.has_block_of_a_person:
        # It is as it was pushed, so that what has been changed since was changed here.
        theirs = {name: entry for name, entry in theirs.items() if name not in here}
        taken_out -= here.keys()
    metadata = joined(own, theirs, given, taken_out)
    lost = [name for name, entry in here.items() if name not in UNITED and metadata.get(name) != entry]
    if lost:
        logger.warning(
            "The metadata of %s were edited on the Hub, where these go before those in %s: %s. Change them there, or "
            "name them in the call of push_to_hub.",
            repository,
            path,
            ", ".join(lost),
        )
    return metadata


def _tell_of_what_goes(card: Card, there: Card, path: Path, repository: str) -> None:
    lost = there.entries_of_a_person().keys() - (card.metadata or {}).keys()
    if lost:
        logger.warning(
            "%s, which is pushed as it is, lacks metadata that somebody has written on the Hub, in %s: %s. Add them to "
            "it to have them again.",
            path,
            repository,
            ", ".join(sorted(lost)),
        )


def card_on_the_hub(repository: str, revision: str | None = None, token: str | None = None) -> Card | None:
    """The card that a repository has; None where it has none, or is not there.

    Raises:
        huggingface_hub.errors.HfHubHTTPError, huggingface_hub.errors.LocalEntryNotFoundError: the Hub does not say.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        EntryNotFoundError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    with tempfile.TemporaryDirectory() as folder:
        try:
            # A cached copy would say what was there at an earlier time.
            HfApi().hf_hub_download(repository, CARD_NAME, revision=revision, token=token, local_dir=folder)
        except LocalEntryNotFoundError:
            # It is an EntryNotFoundError, and means that there was no answer.
            raise
        except (EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError):
            return None
        return read_card((Path(folder) / CARD_NAME).read_text(encoding="utf-8", errors="replace"))
