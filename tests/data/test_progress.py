from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

from littrainer.data.generators import drawn_from, host_states
from littrainer.data.loaders import LookaheadLoader
from littrainer.data.position import DataProgress, ResumePoint, generator_states, set_generator_states
from tests.data.test_loaders import Numbers


def noisy(samples: list[int]) -> tuple[Any, ...]:
    return (*samples, random.random())


def loader_over(count: int) -> LookaheadLoader:
    return LookaheadLoader(Numbers(count), 2, collate_fn=noisy)


def read(batches: Iterator[Any], number: int) -> list[Any]:
    """Read batches, and draw from the generator in between, as dropout does."""
    taken = []
    for _ in range(number):
        taken.append(next(batches))
        random.random()
    return taken


@pytest.mark.parametrize("done", [1, 3, 4])
def test_reading_goes_on_with_the_batches_and_draws_that_were_left(done: int) -> None:
    progress = DataProgress()
    batches = progress.batches(loader_over(10))
    read(batches, done)
    kept, at_checkpoint = progress.state(done, epoch_is_over=False), random.getstate()
    expected = read(batches, 5 - done)

    random.seed(99)
    resumed = DataProgress()
    resumed.point = ResumePoint(done, kept, lambda: random.setstate(at_checkpoint))
    loader = resumed.resumed_loader(loader_over(10))
    assert read(resumed.batches(loader), 5 - done) == expected
    assert loader.dataset.read == list(range(2 * done, 10))


def test_what_was_read_for_a_step_that_was_not_made_is_not_kept() -> None:
    progress = DataProgress()
    batches = progress.batches(loader_over(10))
    read(batches, 2)
    assert progress.state(2, epoch_is_over=False)["before_ahead"] is not None
    read(batches, 1)
    assert progress.state(2, epoch_is_over=False)["before_ahead"] is None


def generators_read(progress: DataProgress, batch: int, collate: Any = list) -> set[str]:
    """The generators whose states were read before a batch was collated ahead."""
    batches = progress.batches(LookaheadLoader(Numbers(40), 2, collate_fn=collate))
    read(batches, batch)
    assert progress._before_ahead is not None
    return set(progress._before_ahead)


def test_generators_that_reading_does_not_draw_from_are_soon_not_read_any_more() -> None:
    assert generators_read(DataProgress(), 2) == {"torch", "python", "numpy"}
    assert generators_read(DataProgress(), 9) == {"torch"}
    assert generators_read(DataProgress(), 9, collate=noisy) == {"torch", "python"}


def test_a_generator_that_reading_draws_from_now_and_then_goes_on_where_it_stood() -> None:
    def rarely_noisy(samples: list[int]) -> Any:
        return (*samples, random.random()) if samples[0] in (12, 24) else samples

    def loader() -> LookaheadLoader:
        return LookaheadLoader(Numbers(30), 2, collate_fn=rarely_noisy)

    progress = DataProgress()
    batches = progress.batches(loader())
    for _ in range(9):
        next(batches)
    kept = progress.state(9, epoch_is_over=False)
    expected = list(batches)

    resumed = DataProgress()
    resumed.point = ResumePoint(9, kept, lambda: None)
    assert list(resumed.batches(resumed.resumed_loader(loader()))) == expected


def test_a_loaders_own_generators_go_on_over_an_epochs_end() -> None:
    def loader() -> DataLoader:
        dataset = Numbers(10)
        order = RandomSampler(dataset, generator=torch.Generator().manual_seed(2))
        return DataLoader(dataset, 2, sampler=order, generator=torch.Generator().manual_seed(1))

    first = loader()
    list(first)
    states = generator_states(first)
    assert set(states) == {"loader", "sampler"}
    again = loader()
    set_generator_states(again, states)
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in first]


def test_objects_that_are_no_loaders_have_no_generators() -> None:
    assert generator_states([1, 2]) == generator_states(None) == {}


def test_an_epoch_is_read_in_place_where_nothing_is_resumed() -> None:
    progress, loader = DataProgress(), loader_over(4)
    assert progress.resumed_loader(loader) is loader
    before = host_states()
    batches = progress.batches(loader)
    assert not drawn_from(before, host_states())
    assert len(list(batches)) == 2 and progress.data_has_ended
