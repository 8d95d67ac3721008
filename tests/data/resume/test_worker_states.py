from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import get_worker_info

from littrainer.data.loaders import PrefetchLoader
from littrainer.data.resume.position import DataPosition
from littrainer.data.resume.progress import DataProgress
from littrainer.data.resume.rng import encode_rng_states, get_rng_states
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
