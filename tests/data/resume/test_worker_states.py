from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info

from littrainer.data.loaders import PrefetchLoader
from littrainer.data.resume.position import DataPosition
from littrainer.data.resume.progress import DataProgress
from littrainer.data.resume.rng import (
    decode_rng_states,
    encode_rng_states,
    find_advanced_generators,
    get_rng_states,
    set_rng_states,
)
from tests.data.test_loaders import Numbers


class Noisy(Numbers):
    """Numbers plus a value that `worker_init_fn` sets; wrappers often have an attribute `dataset`."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.noise = 0
        self.dataset = None

    def __getitems__(self, indices: list[int]) -> list[int]:
        assert indices, "an empty batch was fetched"
        return [index + self.noise for index in indices]


def set_noise(worker: int) -> None:
    get_worker_info().dataset.noise = 100 * (1 + worker)  # type: ignore[union-attr, attr-defined]


@pytest.mark.parametrize("states", [{}, {1: encode_rng_states(get_rng_states(gpu=False))}])
def test_worker_init_fn_can_change_the_dataset_of_a_resumed_worker(states: Any) -> None:
    loader = PrefetchLoader(Noisy(6), 1, collate_fn=list, num_workers=2, worker_init_fn=set_noise)
    progress = DataProgress(loader)
    progress.resume_at(DataPosition(0, 3, data={"num_workers": 2, "workers": states}))
    assert list(progress.batches(loader)) == list(loader)[3:] == [[203], [104], [205]]


def test_states_are_on_the_host_regardless_of_the_default_device() -> None:
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
