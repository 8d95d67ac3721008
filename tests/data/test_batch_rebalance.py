from __future__ import annotations

import random
from typing import Any

import pytest
from transformers.trainer_pt_utils import BatchRebalanceSampler as TheirSampler

from littrainer.data.samplers import QUADRATIC_COST, BatchRebalanceSampler

KINDS = ("even", "few lengths", "a few very long ones")


def some_lengths(source: random.Random, kind: str, count: int) -> list[int]:
    if kind == "even":
        return [source.randint(1, 500) for _ in range(count)]
    if kind == "few lengths":
        return [source.choice([5, 50, 51]) for _ in range(count)]
    return [int(source.paretovariate(0.7) * 10) for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dp_size", [1, 2, 3, 5])
@pytest.mark.parametrize("grad_accum", [1, 2, 3, 8])
@pytest.mark.parametrize("drop_last", [False, True])
def test_every_rank_gets_the_micro_batches_that_transformers_gives_it(
    kind: str, dp_size: int, grad_accum: int, drop_last: bool
) -> None:
    source = random.Random(dp_size * 10 + grad_accum)
    for trial in range(8):
        lengths = some_lengths(source, kind, source.randint(1, 60))
        keywords: dict[str, Any] = {
            "effective_batch_size": dp_size * grad_accum * source.randint(1, 5) + source.randint(0, 3),
            "dp_size": dp_size,
            "grad_accum": grad_accum,
            "shuffle": trial % 3 > 0,
            "seed": trial,
            "drop_last": drop_last,
        }
        for rank in range(dp_size):
            theirs = TheirSampler(lengths, rank=rank, **keywords)
            ours = BatchRebalanceSampler(lengths, rank=rank, **keywords)
            for epoch in (0, 1):
                theirs.set_epoch(epoch)
                ours.set_epoch(epoch)
                assert list(ours) == list(theirs)
            assert len(ours) == len(theirs) == len(list(ours))


def cost(samples: list[int], lengths: list[int]) -> float:
    longest = max(lengths[index] for index in samples)
    return len(samples) * (longest + QUADRATIC_COST * longest**2)


def test_each_sample_is_drawn_once_and_micro_batches_of_a_step_cost_about_the_same() -> None:
    source = random.Random(0)
    lengths = [source.randint(10, 400) for _ in range(96)]
    sampler = BatchRebalanceSampler(lengths, effective_batch_size=32, dp_size=1, grad_accum=4)
    batches = list(sampler)
    assert sorted(index for batch in batches for index in batch) == list(range(96))
    assert len({len(batch) for batch in batches}) > 1
    for step in range(3):
        costs = [cost(batch, lengths) for batch in batches[4 * step : 4 * step + 4]]
        assert max(costs) < 1.5 * min(costs)
        assert costs == sorted(costs, reverse=True), "the most expensive micro-batch comes first"


def test_an_epoch_has_the_same_order_however_often_it_is_drawn_and_another_one_its_own() -> None:
    sampler = BatchRebalanceSampler(list(range(1, 25)), effective_batch_size=8, dp_size=1, grad_accum=2)
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first


@pytest.mark.parametrize(
    "keywords",
    [
        {"effective_batch_size": 3, "dp_size": 2, "grad_accum": 2},
        {"effective_batch_size": 4, "dp_size": 0, "grad_accum": 2},
        {"effective_batch_size": 4, "dp_size": 1, "grad_accum": 0},
    ],
    ids=str,
)
def test_an_optimizer_step_with_fewer_samples_than_micro_batches_is_refused(keywords: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"effective_batch_size={keywords['effective_batch_size']} .* cannot fill"):
        BatchRebalanceSampler([1, 2, 3, 4], **keywords)
