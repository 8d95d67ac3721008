"""Sending a folder to the Hub, by Xet where that works, else by LFS."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from littrainer.hub.failures import causes
from littrainer.hub.repository import client

logger = logging.getLogger(__name__)

# Endpoints where Xet has failed, as it does behind a firewall that lets only the Hub itself through.
_without_xet: set[str] = set()


def upload_folder(**keywords: Any) -> Any:
    """Send a folder in one commit, or in several where it is large, and return the last one.

    Parameters:
        keywords: what `huggingface_hub.HfApi.upload_folder` takes.

    Raises:
        huggingface_hub.errors.HfHubHTTPError: the Hub refuses it.
    """
    hub = client()
    if hub.endpoint in _without_xet:
        with _xet_left_out():
            return hub.upload_folder(**keywords)
    try:
        return hub.upload_folder(**keywords)
    except Exception as error:
        if not _is_of_xet(error):
            raise
        logger.info("Uploading by Xet does not work here (%s); large files are sent by LFS.", type(error).__name__)
    with _xet_left_out():
        sent = hub.upload_folder(**keywords)
    _without_xet.add(hub.endpoint)
    return sent


def _is_of_xet(error: BaseException) -> bool:
    from huggingface_hub import constants

    if getattr(constants, "HF_HUB_DISABLE_XET", True):
        return False
    chain = list(causes(error))
    # The Hub's own answers have one, also those about its endpoint for Xet.
    refused = any(getattr(link, "response", None) is not None for link in chain)
    return not refused and any("xet" in f"{type(link).__module__} {link}".lower() for link in chain)


@contextlib.contextmanager
def _xet_left_out() -> Iterator[None]:
    from huggingface_hub import constants

    before = constants.HF_HUB_DISABLE_XET
    constants.HF_HUB_DISABLE_XET = True
    try:
        yield
    finally:
        constants.HF_HUB_DISABLE_XET = before
