"""The order in which samples are drawn, and which order the arguments ask for."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from itertools import accumulate, cycle, islice
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import RandomSampler, Sampler, SequentialSampler

from littrainer.data.lengths import sample_lengths, whole_numbers
from littrainer.distributed.layout import data_parallel_rank, data_parallel_size
from littrainer.errors.lazy_isinstance import is_a

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments


logger = logging.getLogger(__name__)

# Batches that are sorted by length together: fewer where the data would make fewer than so many groups.
MOST_BATCHES_SORTED_TOGETHER = 50
FEWEST_SORTED_GROUPS = 4


class EpochSeededSampler(RandomSampler):
    """A random sampler whose order depends on a seed and the epoch only.

    Parameters:
        data_seed: the seed; None takes the seed torch's global generator was last given.

    The order of epoch `e` is that of a generator seeded with `data_seed + e`, as accelerate's seedable sampler has it.
    """

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.initial_seed = torch.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    @classmethod
    def replacing(cls, sampler: RandomSampler, data_seed: int | None) -> EpochSeededSampler:
        """The same draws (replacement, number, generator) as another random sampler makes, but seeded by epoch."""
        return cls(
            sampler.data_source,
            replacement=sampler.replacement,
            num_samples=sampler._num_samples,
            generator=sampler.generator,
            data_seed=data_seed,
        )

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration has."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.epoch + self.initial_seed)
        yield from super().__iter__()
        self.epoch += 1


def get_length_grouped_indices(
    lengths: Sequence[int],
    batch_size: int,
    mega_batch_mult: int | None = None,
    generator: torch.Generator | None = None,
) -> list[int]:
    """A random order in which samples of similar length stand together, and the longest one first.

    Parameters:
        lengths: the length of each sample, in tokens.
        batch_size: samples of a batch.
        mega_batch_mult: batches that are shuffled into a group and sorted there; by default 50, or fewer so that a
            small dataset has four groups.
        generator: draws the order; torch's global one by default.

    The longest sample comes first so that running out of memory happens at once and not after hours.
    """
    if mega_batch_mult is None:
        mega_batch_mult = max(1, min(MOST_BATCHES_SORTED_TOGETHER, len(lengths) // (batch_size * FEWEST_SORTED_GROUPS)))
    shuffled = torch.randperm(len(lengths), generator=generator).tolist()
    group_size = mega_batch_mult * batch_size
    groups = [
        sorted(shuffled[start : start + group_size], key=lengths.__getitem__, reverse=True)
        for start in range(0, len(shuffled), group_size)
    ]
    if not groups:
        return []
    longest = max(range(len(groups)), key=lambda number: lengths[groups[number][0]])
    groups[0][0], groups[longest][0] = groups[longest][0], groups[0][0]
    return [index for group in groups for index in group]


class LengthGroupedSampler(Sampler[int]):
    """Draws samples in a random order that puts those of similar length together, so that batches need less padding.

    Parameters:
        batch_size: samples of a batch, or of all micro-batches of an optimizer step.
        dataset: measured where `lengths` is not given.
        lengths: the length of each sample, in tokens.
        model_input_name: the key of the samples that is measured; `"input_ids"` by default.
        generator: draws the order; torch's global one by default.

    Raises:
        ValueError: neither dataset nor lengths is given, or the dataset cannot be measured.
    """

    def __init__(
        self,
        batch_size: int,
        dataset: Any = None,
        lengths: Any = None,
        model_input_name: str | None = None,
        generator: torch.Generator | None = None,
    ):
        if dataset is None and lengths is None:
            raise ValueError("LengthGroupedSampler needs a `dataset` to measure, or the `lengths` of its samples.")
        self.batch_size = batch_size
        self.lengths = sample_lengths(dataset, model_input_name) if lengths is None else whole_numbers(lengths)
        self.generator = generator

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        return iter(get_length_grouped_indices(self.lengths, self.batch_size, generator=self.generator))


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
        order = self._order()
        fewest = self.dp_size * self.grad_accum
        for step in range(self.optimizer_steps):
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


ORDERED_BY_LENGTH = ("group_by_length", "batch_rebalance")


def train_sampler(args: TrainingArguments, dataset: Any, processing_class: Any) -> Sampler[Any]:
    """The sampler of a training dataset that has a length, as `train_sampling_strategy` or `sortish_sampler` names it.

    Parameters:
        dataset: map-style.
        processing_class: its main input's name is the key whose length counts.

    Raises:
        ValueError: the strategy needs lengths, and the samples have none.
    """
    strategy = _strategy(args)
    if strategy == "group_by_length":
        return LengthGroupedSampler(
            args.train_batch_size * args.gradient_accumulation_steps,
            dataset=dataset,
            lengths=_length_column(args, dataset),
            model_input_name=_main_input_name(processing_class),
        )
    if strategy == "batch_rebalance":
        lengths = _length_column(args, dataset)
        if lengths is None:
            lengths = sample_lengths(dataset, _main_input_name(processing_class))
        return BatchRebalanceSampler(
            whole_numbers(lengths),
            effective_batch_size=args.train_batch_size * args.gradient_accumulation_steps * data_parallel_size(args),
            dp_size=data_parallel_size(args),
            grad_accum=args.gradient_accumulation_steps,
            rank=data_parallel_rank(args),
            drop_last=args.dataloader_drop_last,
        )
    return SequentialSampler(dataset) if strategy == "sequential" else RandomSampler(dataset)


def _strategy(args: TrainingArguments) -> str:
    return "group_by_length" if getattr(args, "sortish_sampler", False) else args.train_sampling_strategy


def evaluation_sampler(args: TrainingArguments, dataset: Any, processing_class: Any) -> Sampler[int] | None:
    """The sampler of an evaluation dataset that has a length: its own order, or by length where training is.

    None stands for its own order where several processes share it.
    """
    if args.train_sampling_strategy != "group_by_length":
        return SequentialSampler(dataset) if args.world_size <= 1 else None
    seed = args.seed if args.data_seed is None else args.data_seed
    return LengthGroupedSampler(
        args.eval_batch_size,
        dataset=dataset,
        lengths=_length_column(args, dataset),
        model_input_name=_main_input_name(processing_class),
        generator=torch.Generator().manual_seed(seed),
    )


def warn_that_a_stream_has_its_own_order(args: TrainingArguments) -> None:
    """Say that a strategy which asks for lengths has no effect on training data that is read in its own order."""
    if _strategy(args) in ORDERED_BY_LENGTH:
        logger.warning(
            "train_sampling_strategy=%r has no effect: the training data is a stream or has no length, and is read "
            "in its own order.",
            _strategy(args),
        )


def warn_that_lengths_are_dropped(args: TrainingArguments, given: Any, kept: Any) -> None:
    """Say that the column of lengths was among the unused ones, which go before samples are ordered.

    Parameters:
        given, kept: a `datasets.Dataset` before and after its unused columns were dropped.
    """
    name = args.length_column_name
    if _strategy(args) in ORDERED_BY_LENGTH and name in given.column_names and name not in kept.column_names:
        warnings.warn(
            f"length_column_name={name!r} is not read: the column is dropped, since the model does not take it, and "
            "samples are measured by their main input. Set remove_unused_columns=False to have it read.",
            stacklevel=2,
        )


def _length_column(args: TrainingArguments, dataset: Any) -> Any:
    if is_a(dataset, "datasets.Dataset") and args.length_column_name in dataset.column_names:
        return dataset[args.length_column_name]
    return None


def _main_input_name(processing_class: Any) -> str | None:
    names = getattr(processing_class, "model_input_names", None)
    return names[0] if names else None
