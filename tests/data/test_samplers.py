from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import RandomSampler
from transformers.trainer_pt_utils import LengthGroupedSampler as TheirLengthGroupedSampler
from transformers.trainer_pt_utils import get_length_grouped_indices as theirs_grouped

from littrainer.data.samplers import EpochSeededSampler, LengthGroupedSampler, get_length_grouped_indices

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


LENGTHS = [3, 50, 7, 7, 12, 1, 30, 29, 8, 8, 8, 40, 2, 19, 5, 6, 11, 13, 4, 22, 50, 9]


class Measured:
    """Samples that are mappings, of the given lengths; counts how often one is read."""

    def __init__(self, lengths: list[int], name: str = "input_ids") -> None:
        self.lengths, self.name, self.reads = lengths, name, 0

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        self.reads += 1
        return {self.name: [0] * self.lengths[index]}


@pytest.mark.parametrize("count", [1, 2, 5, 16, 22])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 64])
@pytest.mark.parametrize("mega_batch_mult", [None, 1, 3])
def test_samples_of_similar_length_are_grouped_as_transformers_groups_them(
    count: int, batch_size: int, mega_batch_mult: int | None
) -> None:
    orders = []
    for group in (theirs_grouped, get_length_grouped_indices):
        generator = torch.Generator().manual_seed(count)
        orders.append(group(LENGTHS[:count], batch_size, mega_batch_mult, generator=generator))
    assert orders[0] == orders[1] and sorted(orders[1]) == list(range(count))


def test_the_longest_sample_comes_first_and_each_epoch_has_an_order_of_its_own() -> None:
    torch.manual_seed(0)
    sampler = LengthGroupedSampler(3, lengths=LENGTHS)
    first, second = list(sampler), list(sampler)
    assert LENGTHS[first[0]] == LENGTHS[second[0]] == max(LENGTHS)
    assert first != second and len(sampler) == len(first) == len(LENGTHS)


def test_grouping_draws_from_the_global_generator_unless_it_is_given_one() -> None:
    before = torch.get_rng_state()
    list(LengthGroupedSampler(3, lengths=LENGTHS, generator=torch.Generator()))
    assert torch.equal(torch.get_rng_state(), before)
    list(LengthGroupedSampler(3, lengths=LENGTHS))
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("make", [list, torch.tensor, tuple])
def test_lengths_may_come_as_list_tensor_or_column(make: Any) -> None:
    assert LengthGroupedSampler(3, lengths=make(LENGTHS)).lengths == LENGTHS


@pytest.mark.parametrize("name", [None, "input_ids", "pixels"])
def test_a_dataset_is_measured_by_its_main_input(name: str | None) -> None:
    dataset = Measured([4, 2, 9], name or "input_ids")
    assert LengthGroupedSampler(2, dataset=dataset, model_input_name=name).lengths == [4, 2, 9]


def test_a_dataset_is_read_as_often_as_transformers_reads_it() -> None:
    ours, theirs = Measured(LENGTHS), Measured(LENGTHS)
    LengthGroupedSampler(2, dataset=ours)
    TheirLengthGroupedSampler(2, dataset=theirs)
    # Python's own loop over a dataset without __iter__ reads once more, and ends with that read's IndexError.
    assert ours.reads == theirs.reads - 1 == len(LENGTHS) + 2


@pytest.mark.parametrize(
    ("dataset", "found"), [([[1, 2]], "a list"), (Measured([1], "pixels"), "the keys pixels")], ids=["list", "keys"]
)
def test_samples_without_a_length_are_refused_with_what_there_is_and_what_to_do(dataset: Any, found: str) -> None:
    with pytest.raises(ValueError, match=rf"'input_ids'.*{found}.*length_column_name"):
        LengthGroupedSampler(2, dataset=dataset)


def test_grouping_needs_a_dataset_or_lengths() -> None:
    with pytest.raises(ValueError, match=r"`dataset`.*`lengths`"):
        LengthGroupedSampler(2)


def test_nothing_to_group_is_an_empty_order() -> None:
    assert list(LengthGroupedSampler(2, lengths=[])) == []
