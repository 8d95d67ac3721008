"""An end to waiting for a Hub that says nothing any more; its client by itself waits for ever, again and again."""

from __future__ import annotations

import contextlib
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


class _MakesBoundClients:
    """Makes the client's sessions as before, each with a bound on its requests while a block is open."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __call__(self) -> Any:
        session = self.make()
        if not isinstance(session.send, _BoundSend):
            session.send = _BoundSend(session.send)
        return session


class _BoundSend:
    """Sends a request as before; a request with a limit of its own keeps it."""

    def __init__(self, send: Callable[..., Any]) -> None:
        self.send = send

    def __call__(self, request: Any, **keywords: Any) -> Any:
        if not _blocks:
            return self.send(request, **keywords)
        given = request.extensions.get("timeout") or {}
        unbound = [kind for kind in KINDS_OF_SILENCE if given.get(kind) is None]
        bounds = dict.fromkeys(unbound, LONGEST_SILENCE_SECONDS)
        request.extensions = {**request.extensions, "timeout": {**given, **bounds}}
        try:
            return self.send(request, **keywords)
        except Exception as error:
            # Of a release of httpx that is not known here.
            if unbound and type(error).__name__.endswith("Timeout"):
                raise SilentHubError(f"nothing came or went for {LONGEST_SILENCE_SECONDS:g} s") from error
            raise


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
        if make is not None and not isinstance(make, _MakesBoundClients):
            set_client_factory(_MakesBoundClients(make))
