from __future__ import annotations

import numpy as np
import torch

from littrainer.data.workers import drawn_from, host_states, set_host_states


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
