from __future__ import annotations

import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import RandomSampler

from littrainer.data.samplers import EpochSeededSampler

DATA = range(20)


def order(sampler: RandomSampler, epoch: int | None = None) -> list[int]:
    if epoch is not None:
        sampler.set_epoch(epoch)  # type: ignore[attr-defined]
    return list(sampler)


def test_the_order_of_an_epoch_depends_on_nothing_drawn_in_between() -> None:
    undisturbed = order(EpochSeededSampler(DATA, data_seed=3), epoch=2)
    sampler = EpochSeededSampler(DATA, data_seed=3)
    order(sampler)
    torch.rand(7)
    assert order(sampler, epoch=2) == undisturbed
    assert sorted(undisturbed) == list(DATA)


def test_seed_and_epoch_count_only_as_their_sum() -> None:
    orders = {
        (seed, epoch): tuple(order(EpochSeededSampler(DATA, data_seed=seed), epoch))
        for seed in (3, 4)
        for epoch in (0, 1)
    }
    assert orders[3, 1] == orders[4, 0]
    assert len(set(orders.values())) == 3


def test_drawing_an_order_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    order(EpochSeededSampler(DATA, data_seed=3))
    assert torch.equal(torch.get_rng_state(), before)


def test_without_a_data_seed_the_seed_last_given_to_torch_counts() -> None:
    torch.manual_seed(11)
    torch.rand(5)
    assert order(EpochSeededSampler(DATA)) == order(EpochSeededSampler(DATA, data_seed=11))


def test_each_complete_pass_moves_on_to_the_next_epoch() -> None:
    sampler = EpochSeededSampler(DATA, data_seed=5)
    first, second = order(sampler), order(sampler)
    assert first != second
    assert second == order(EpochSeededSampler(DATA, data_seed=5), epoch=1)
    started = iter(sampler)
    next(started)
    assert sampler.epoch == 2


def test_the_order_is_that_of_accelerates_seedable_sampler() -> None:
    theirs = SeedableRandomSampler(DATA, data_seed=9)
    ours = EpochSeededSampler(DATA, data_seed=9)
    for epoch in (0, 1, 4):
        assert order(ours, epoch) == order(theirs, epoch)


def test_replacing_a_sampler_keeps_how_many_and_how_it_draws() -> None:
    generator = torch.Generator()
    replaced = EpochSeededSampler.replacing(
        RandomSampler(DATA, replacement=True, num_samples=50, generator=generator), data_seed=1
    )
    assert replaced.replacement and len(replaced) == 50 and replaced.generator is generator
    assert len(set(order(replaced))) < 50
