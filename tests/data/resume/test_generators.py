from __future__ import annotations

import numpy as np
import torch

from littrainer.data.resume.rng import (
    capture_random_states,
    find_advanced,
    portable_states,
    set_random_states,
    states_of_portable,
)


def test_states_lie_on_the_host_whatever_device_new_tensors_are_made_on() -> None:
    torch.set_default_device("meta")
    try:
        before = capture_random_states(gpu=False)
        np.random.random()
        after = capture_random_states(gpu=False)
        assert find_advanced(before, after) == {"numpy"}
        portable = portable_states(after)
        set_random_states(before)
        assert not find_advanced(before, capture_random_states(gpu=False))
        set_random_states(states_of_portable(portable))
        assert not find_advanced(after, capture_random_states(gpu=False))
    finally:
        torch.set_default_device(None)
    assert {state.device.type for state in (portable["torch"], portable["python"][1], portable["numpy"][1])} == {"cpu"}
