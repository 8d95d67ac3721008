"""How long the Hub's client waits for an answer, by the limits that its requests carry."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from huggingface_hub import close_session, get_session, set_client_factory
from huggingface_hub.utils import _http

from littrainer.hub.timeouts import LONGEST_SILENCE_SECONDS, SilentHubError, bound_silence


@pytest.fixture
def limits_of_request() -> Iterator[Any]:
    """Sends a request through a client that a script has set, to no server, and returns the request's limits."""
    before = _http._GLOBAL_CLIENT_FACTORY
    http: Any = sys.modules[_http.default_client_factory().__class__.__module__.partition(".")[0]]
    seen: list[dict[str, float | None]] = []

    def answer(request: Any) -> Any:
        seen.append(request.extensions["timeout"])
        return http.Response(200)

    def send(**limits: Any) -> dict[str, float | None]:
        get_session().get("http://hub.invalid/", **limits)
        return seen.pop()

    set_client_factory(lambda: http.Client(transport=http.MockTransport(answer), timeout=None))
    yield send
    set_client_factory(before)


BOUND = dict.fromkeys(("connect", "read", "write", "pool"), LONGEST_SILENCE_SECONDS)


def test_requests_without_a_limit_get_one_and_the_session_stays(limits_of_request: Any) -> None:
    bound_silence()
    session = get_session()
    bound_silence()
    assert get_session() is session and limits_of_request() == BOUND
    # As after an error of the network, which closes it.
    close_session()
    assert limits_of_request() == BOUND
    assert limits_of_request(timeout=2.0) == dict.fromkeys(BOUND, 2.0)
    # A client that the script sets meanwhile gets the limit with the next call.
    made: Any = _http._GLOBAL_CLIENT_FACTORY
    set_client_factory(lambda: made.args[0]())
    bound_silence()
    assert limits_of_request() == BOUND


def test_a_timeout_by_the_limit_is_no_error_that_the_client_tries_again_after(limits_of_request: Any) -> None:
    tried_again_after = _http._DEFAULT_RETRY_ON_EXCEPTIONS
    assert not issubclass(SilentHubError, tried_again_after)

    def times_out(request: Any) -> Any:
        http: Any = sys.modules[type(request).__module__.partition(".")[0]]
        raise http.ReadTimeout("nothing", request=request)

    bound_silence()
    session: Any = get_session()
    session._transport.handler = times_out
    with pytest.raises(SilentHubError, match="nothing came or went for 120 s"):
        limits_of_request()
    with pytest.raises(tried_again_after):
        limits_of_request(timeout=2.0)
