"""Batches of unequal size whose cost is nearly equal: many short samples in one, few long ones in another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, cycle, islice

import torch
from torch.utils.data import Sampler

QUADRATIC_COST = 0.001
"""Weight of attention, which grows with the square of the length, beside what grows with the length."""

ROUNDS_PER_GROUP = 30
DEFAULT_SEED = 42


class BatchRebalanceSampler(Sampler[list[int]]):
    """Splits the samples of each optimizer step into micro-batches of nearly equal cost; a batch sampler.

    Parameters:
        lengths: the length of each sample, in tokens.
        effective_batch_size: samples per optimizer step, over all ranks.
        dp_size: ranks that train on different data.
        grad_accum: micro-batches per optimizer step on each rank.
        shuffle: draw a new order for each epoch.
        seed: seed of that order; the epoch is added to it.
        rank: the rank whose micro-batches are drawn.
        drop_last: leave out the last, incomplete optimizer step of an epoch.

    Each rank computes the same split from the same seed, so that ranks need not talk to each other.

    Raises:
        ValueError: an optimizer step has fewer samples than micro-batches.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        effective_batch_size: int,
        dp_size: int,
        grad_accum: int,
        shuffle: bool = True,
        seed: int = DEFAULT_SEED,
        rank: int = 0,
        drop_last: bool = True,
    ):
        if dp_size < 1 or grad_accum < 1 or effective_batch_size < dp_size * grad_accum:
            raise ValueError(
                f"effective_batch_size={effective_batch_size} samples cannot fill {grad_accum} micro-batches on each "
                f"of {dp_size} ranks: give at least one sample for each, and at least one micro-batch and rank."
            )
        self.lengths, self.effective_batch_size = list(lengths), effective_batch_size
        self.dp_size, self.grad_accum, self.rank = dp_size, grad_accum, rank
        self.shuffle, self.drop_last = shuffle, drop_last
        self.seed, self.epoch = seed, 0

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps in an epoch."""
        complete, left_over = divmod(len(self.lengths), self.effective_batch_size)
        return complete + (left_over > 0 and not self.drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration has."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.optimizer_steps * self.grad_accum

    def __iter__(self) -> Iterator[list[int]]:
        return self.batches_from(0)

    def batches_from(self, number: int) -> Iterator[list[int]]:
        """The epoch's batches without the first ones, whose split is not computed.

        Parameters:
            number: batches to leave out.
        """
        first_step, within_step = divmod(number, self.grad_accum)
        return islice(self._batches_of_steps(range(first_step, self.optimizer_steps)), within_step, None)

    def _batches_of_steps(self, steps: range) -> Iterator[list[int]]:
        order = self._order()
        fewest = self.dp_size * self.grad_accum
        for step in steps:
            samples = order[step * self.effective_batch_size : (step + 1) * self.effective_batch_size]
            # Only the last step of an epoch can lack samples for all micro-batches; it repeats the first ones.
            samples += islice(cycle(order), max(fewest - len(samples), 0))
            yield from self._micro_batches(samples)

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(len(self.lengths)))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(len(self.lengths), generator=generator).tolist()

    def _micro_batches(self, samples: list[int]) -> list[list[int]]:
        # The most expensive groups go into the first micro-batches of all ranks, the cheapest ones into the last, so
        # that ranks that wait for each other after each micro-batch wait least.
        samples = sorted(samples, key=self.lengths.__getitem__, reverse=True)
        split = _Split([self.lengths[index] for index in samples], self.dp_size, self.grad_accum)
        counts = split.balanced(most_rounds=max(ROUNDS_PER_GROUP * split.groups, self.effective_batch_size))
        ends = list(accumulate(counts))
        ranking = split.by_cost(split.costs(counts))
        return [samples[ends[group] - counts[group] : ends[group]] for group in ranking[self.rank :: self.dp_size]]


class _Split:
    """Where sorted samples are cut into contiguous groups, so that all groups cost about the same.

    A group pays for its padding: each of its samples costs as much as the longest one.

    Parameters:
        lengths: the samples' lengths, longest first.
        dp_size: groups that are processed at the same time, one on each rank.
        grad_accum: groups that each rank processes one after the other.
    """

    def __init__(self, lengths: list[int], dp_size: int, grad_accum: int):
        self.lengths = lengths
        self.dp_size = dp_size
        self.groups = dp_size * grad_accum
        self.frozen: set[int] = set()

    def costs(self, counts: list[int]) -> list[float]:
        """The cost of each group."""
        starts = accumulate(counts[:-1], initial=0)
        return [self._cost(count, start) for count, start in zip(counts, starts, strict=True)]

    def _cost(self, count: int, start: int) -> float:
        longest = self.lengths[start]
        return count * longest + QUADRATIC_COST * count * longest * longest

    def by_cost(self, costs: list[float]) -> list[int]:
        """Groups, the most expensive one first; equally expensive ones in their own order."""
        return sorted(range(self.groups), key=costs.__getitem__, reverse=True)

    def balanced(self, most_rounds: int) -> list[int]:
        """Samples in each group: of all splits tried, the one whose costs differ least.

        Each round moves one sample from the most expensive group to the cheapest one, until a split comes back. A group
        of one sample cannot get cheaper: it leaves the search, with the groups that are processed beside it.
        """
        each, left_over = divmod(len(self.lengths), self.groups)
        counts = [each + (group < left_over) for group in range(self.groups)]
        best, smallest_spread = list(counts), float("inf")
        tried: set[tuple[int, ...]] = set()
        for _ in range(most_rounds):
            active = [group for group in range(self.groups) if group not in self.frozen]
            if tuple(counts) in tried or len(active) < 2:
                break
            tried.add(tuple(counts))
            costs = self.costs(counts)
            dearest, cheapest = max(active, key=costs.__getitem__), min(active, key=costs.__getitem__)
            spread = costs[dearest] - costs[cheapest]
            if spread < smallest_spread:
                best, smallest_spread = list(counts), spread
            if costs[dearest] == costs[cheapest]:
                break
            if counts[dearest] > 1:
                counts[dearest] -= 1
                counts[cheapest] += 1
            else:
                self._freeze_beside(dearest, counts, costs)
        return best

    def _freeze_beside(self, dearest: int, counts: list[int], costs: list[float]) -> None:
        # What runs beside the most expensive group may take samples from other groups for as long as it stays cheaper.
        ranking = self.by_cost(costs)
        first = ranking.index(dearest) // self.dp_size * self.dp_size
        beside = set(ranking[first : first + self.dp_size])
        for group in beside:
            if group not in self.frozen and group != dearest:
                self._fill(group, beside, counts, limit=costs[dearest])
        self.frozen |= beside

    def _fill(self, group: int, beside: set[int], counts: list[int], limit: float) -> None:
        closed = self.frozen | beside
        while self._cost(counts[group] + 1, sum(counts[:group])) <= limit:
            givers = [other for other in range(self.groups) if other not in closed and counts[other] > 1]
            if not givers:
                return
            costs = self.costs(counts)
            counts[min(givers, key=costs.__getitem__)] -= 1
            counts[group] += 1
