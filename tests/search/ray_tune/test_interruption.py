from __future__ import annotations

import signal
from typing import Any

import pytest

pytest.importorskip("ray")

from littrainer.search.ray_tune.interruption import Interruption

USR1 = getattr(signal, "SIGUSR1", signal.SIGINT)


def test_a_signal_that_ray_has_taken_is_noticed_and_reaches_ray() -> None:
    come: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    interruption = Interruption()
    with interruption.awaited():
        signal.signal(signal.SIGINT, lambda number, frame: come.append(number))
        interruption.setup(stop=None, num_samples=1)
        assert not interruption.has_come
        signal.raise_signal(signal.SIGINT)
    assert interruption.has_come and come == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_handler_that_ray_has_left_alone_is_left_alone() -> None:
    def own(number: int, frame: Any) -> None: ...

    before = signal.signal(USR1, own)
    try:
        interruption = Interruption()
        with interruption.awaited():
            interruption.setup()
            assert signal.getsignal(USR1) is own
    finally:
        signal.signal(USR1, before)
