"""The card that a repository on the Hub has already, which people edit there too."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

from littrainer.hub.card.block import CARD_NAME, is_kept
from littrainer.hub.failures import text_of

logger = logging.getLogger(__name__)


def cards_not_pushed(folder: Path, repository: str, revision: str | None, token: str | None) -> list[str]:
    """Names of generated cards in a folder that must not be pushed over one that was edited on the Hub.

    Where the Hub does not say what it has, none is pushed.

    Parameters:
        revision: the branch; None is the main one.
    """
    card = folder / CARD_NAME
    if not card.is_file() or is_kept(card.read_text(encoding="utf-8", errors="replace")):
        return []
    try:
        if not hub_keeps_its_card(repository, revision, token):
            return []
    except Exception as error:
        logger.warning(
            "%s is not pushed, since %s did not say whether its card was edited (%s).",
            card,
            repository,
            text_of(error, token),
        )
        return [CARD_NAME]
    logger.warning("%s is not pushed: the card of %s was edited on the Hub and stays as it is.", card, repository)
    return [CARD_NAME]


def hub_keeps_its_card(repository: str, revision: str | None = None, token: str | None = None) -> bool:
    """Whether the card on the Hub holds a person's text.

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
            return False
        return is_kept((Path(folder) / CARD_NAME).read_text(encoding="utf-8", errors="replace"))
