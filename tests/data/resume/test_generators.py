from __future__ import annotations

import numpy as np
import torch

from littrainer.data.resume.rng import (
    decode_rng_states,
    encode_rng_states,
    find_advanced_generators,
    get_rng_states,
    set_rng_states,
)


def test_states_lie_on_the_host_whatever_device_new_tensors_are_made_on() -> None:
    torch.set_default_device("meta")
    try:
        before = get_rng_states(gpu=False)
        np.random.random()
        after = get_rng_states(gpu=False)
        assert find_advanced_generators(before, after) == {"numpy"}
        portable = encode_rng_states(after)
        set_rng_states(before)
        assert not find_advanced_generators(before, get_rng_states(gpu=False))
        set_rng_states(decode_rng_states(portable))
        assert not find_advanced_generators(after, get_rng_states(gpu=False))
    finally:
        torch.set_default_device(None)
    assert {state.device.type for state in (portable["torch"], portable["python"][1], portable["numpy"][1])} == {"cpu"}
