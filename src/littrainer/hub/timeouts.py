"""An end to waiting for a Hub that says nothing any more; its client by itself waits for ever, again and again."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

# After which a connection on which nothing comes or goes is given up.
LONGEST_SILENCE_SECONDS = 120.0
KINDS_OF_SILENCE = ("connect", "read", "write", "pool")

_installing = threading.Lock()


class SilentHubError(ConnectionError):
    """Nothing came or went for too long; the client, which tries again after other timeouts, passes this on."""


def bound_silence() -> None:
    """Let requests of the Hub's client that have no time limit end with an error if the Hub is silent.

    All its sessions are made so from now on, also the one after an error of the network, which closes a session.
    """
    try:
        from huggingface_hub import set_client_factory
        from huggingface_hub.utils import _http
    except ImportError:
        # Releases before 1.0 have no such setting.
        return
    with _installing:
        make: Any = getattr(_http, "_GLOBAL_CLIENT_FACTORY", None)
        # It closes the session, which others may use: once, and again only if the script sets a factory.
        if make is not None and getattr(make, "func", None) is not _made_bound:
            set_client_factory(functools.partial(_made_bound, make))


def _made_bound(make: Callable[[], Any]) -> Any:
    session = make()
    if getattr(session.send, "func", None) is not _send:
        session.send = functools.partial(_send, session.send)
    return session


def _send(send: Callable[..., Any], request: Any, **keywords: Any) -> Any:
    given = request.extensions.get("timeout") or {}
    bounds = {kind: LONGEST_SILENCE_SECONDS for kind in KINDS_OF_SILENCE if given.get(kind) is None}
    request.extensions = {**request.extensions, "timeout": {**given, **bounds}}
    try:
        return send(request, **keywords)
    except Exception as error:
        # Which library of requests it is differs from release to release.
        if bounds and type(error).__name__.endswith("Timeout"):
            raise SilentHubError(f"nothing came or went for {LONGEST_SILENCE_SECONDS:g} s") from error
        raise
