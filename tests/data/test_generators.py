from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from littrainer.data.workers import drawn_from, host_states, set_host_states

DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(1).item(),
    "python": random.random,
    "numpy": np.random.random,
}


def draw_all() -> list[Any]:
    # Normal variates come in pairs, of which the second one is held back.
    return [
        torch.rand(2).tolist(),
        random.gauss(0, 1),
        random.random(),
        float(np.random.randn()),
        np.random.randint(99),
    ]


def test_generators_go_on_from_where_they_were_found() -> None:
    draw_all()
    states = host_states()
    expected = draw_all()
    set_host_states(states)
    assert draw_all() == expected


@pytest.mark.parametrize("name", DRAWS)
def test_a_generator_that_was_drawn_from_is_told_from_the_others(name: str) -> None:
    before = host_states()
    DRAWS[name]()
    assert drawn_from(before, host_states()) == {name}


def test_states_lie_on_the_host_whatever_device_new_tensors_are_made_on() -> None:
    torch.set_default_device("meta")
    try:
        before = host_states()
        np.random.random()
        after = host_states()
        assert drawn_from(before, after) == {"numpy"}
        set_host_states(before)
    finally:
        torch.set_default_device(None)
    assert {state.device.type for state in (after["torch"], after["numpy"][1])} == {"cpu"}
