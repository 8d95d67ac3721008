"""How long the Hub's client waits for an answer, by the limits that its requests carry."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from huggingface_hub import close_session, get_session, set_client_factory
from huggingface_hub.utils import _http

from littrainer.hub.silence import LONGEST_SILENCE_SECONDS, SilentHubError, silence_bounded


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
WITHOUT_END = dict.fromkeys(BOUND)


def test_an_error_of_the_network_which_closes_the_session_does_not_end_the_bound(limits_of_request: Any) -> None:
    with silence_bounded():
        assert limits_of_request() == BOUND
        close_session()
        assert limits_of_request() == BOUND


def test_a_client_that_the_script_sets_meanwhile_has_the_bound_from_the_next_block_on(limits_of_request: Any) -> None:
    with silence_bounded():
        pass
    made = _http._GLOBAL_CLIENT_FACTORY
    set_client_factory(lambda: made.args[0]())
    with silence_bounded():
        assert limits_of_request() == BOUND


def test_a_block_that_ends_does_not_end_the_bound_of_another_one(limits_of_request: Any) -> None:
    background, by_hand = silence_bounded(), silence_bounded()
    background.__enter__()
    by_hand.__enter__()
    background.__exit__(None, None, None)
    assert limits_of_request() == BOUND
    by_hand.__exit__(None, None, None)
    assert limits_of_request() == WITHOUT_END


def test_the_client_keeps_its_session_and_is_as_patient_as_before_afterwards(
    limits_of_request: Any,
) -> None:
    with silence_bounded():
        session = get_session()
    with silence_bounded():
        assert get_session() is session
    assert limits_of_request() == WITHOUT_END


def test_a_request_with_a_limit_of_its_own_keeps_it(limits_of_request: Any) -> None:
    with silence_bounded():
        assert limits_of_request(timeout=2.0) == dict.fromkeys(BOUND, 2.0)


def test_a_timeout_is_no_error_that_the_client_tries_again_after_and_one_of_the_requests_own_stays_what_it_is(
    limits_of_request: Any,
) -> None:
    tried_again_after = _http._DEFAULT_RETRY_ON_EXCEPTIONS
    assert not issubclass(SilentHubError, tried_again_after)

    def times_out(request: Any) -> Any:
        http: Any = sys.modules[type(request).__module__.partition(".")[0]]
        raise http.ReadTimeout("nothing", request=request)

    with silence_bounded():
        session: Any = get_session()
        session._transport.handler = times_out
        with pytest.raises(SilentHubError, match="nothing came or went for 120 s"):
            limits_of_request()
        with pytest.raises(tried_again_after):
            limits_of_request(timeout=2.0)
