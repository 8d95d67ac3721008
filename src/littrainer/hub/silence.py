"""An end to waiting for a Hub that says nothing any more; its client by itself waits for ever, again and again."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

# After which a connection on which nothing comes or goes is given up.
LONGEST_SILENCE_SECONDS = 120.0
KINDS_OF_SILENCE = ("connect", "read", "write", "pool")

_lock = threading.Lock()
_installing = threading.Lock()
# Blocks that are open, in all threads.
_blocks = 0


class SilentHubError(ConnectionError):
    """Nothing came or went for too long; the client, which tries again after a timeout of its own, passes this on."""


@contextlib.contextmanager
def silence_bounded() -> Iterator[None]:
    """A block in which such a Hub is an error of the client, in whichever thread and however often it connects anew."""
    global _blocks
    _install()
    with _lock:
        _blocks += 1
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1


def _install() -> None:
    """Have all sessions made with the bound, also the one after an error of the network, which closes a session."""
    try:
        from huggingface_hub import set_client_factory
        from huggingface_hub.utils import _http
    except ImportError:
        # Clients of releases before 1.0 have no such setting.
        return
    with _installing:
        make: Any = getattr(_http, "_GLOBAL_CLIENT_FACTORY", None)
        # It closes the session, which others may use: once, and again only where the script sets its own.
        if make is not None and getattr(make, "func", None) is not _made_bound:
            set_client_factory(functools.partial(_made_bound, make))


def _made_bound(make: Callable[[], Any]) -> Any:
    session = make()
    if getattr(session.send, "func", None) is not _send:
        session.send = functools.partial(_send, session.send)
    return session


def _send(send: Callable[..., Any], request: Any, **keywords: Any) -> Any:
    """Send a request, while a block is open with a bound unless it has a limit of its own."""
    given = request.extensions.get("timeout") or {}
    bounds = {kind: LONGEST_SILENCE_SECONDS for kind in KINDS_OF_SILENCE if given.get(kind) is None}
    if not (_blocks and bounds):
        return send(request, **keywords)
    request.extensions = {**request.extensions, "timeout": {**given, **bounds}}
    try:
        return send(request, **keywords)
    except Exception as error:
        # Which library of requests it is differs from release to release.
        if type(error).__name__.endswith("Timeout"):
            raise SilentHubError(f"nothing came or went for {LONGEST_SILENCE_SECONDS:g} s") from error
        raise
