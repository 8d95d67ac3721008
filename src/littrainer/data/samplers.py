"""The order in which samples are drawn, and which order the arguments ask for."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.utils.data import RandomSampler, Sampler, SequentialSampler

from littrainer.distributed.layout import data_parallel_rank, data_parallel_size
from littrainer.errors.lazy_isinstance import is_a, known_classes

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

    The order of epoch `e` is that of a generator seeded with `data_seed + e`, as in accelerate's seedable sampler.
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
        return chain.from_iterable(self._orders())

    def _orders(self) -> Iterator[Iterator[int]]:
        # Seeded when the first sample is asked for: until then others may draw from the generator.
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.epoch + self.initial_seed)
        yield super().__iter__()
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


# Formats of a `datasets.Dataset` in which a list of `n` values is something of length `n`.
FORMATS = (None, "numpy", "torch")
ROWS_READ_AT_ONCE = 10_000
MASK = "attention_mask"


def length_of_sample(sample: Any, name: str, without_padding: bool) -> int:
    """Return the length of a sample's entry; without padding, the number of tokens that its attention mask shows."""
    return int(np.sum(sample[MASK])) if without_padding and MASK in sample else len(sample[name])


def sample_lengths(dataset: Any, model_input_name: str | None = None, without_padding: bool = False) -> list[int]:
    """The length of each sample's main input.

    Parameters:
        dataset: map-style, with mappings as samples.
        model_input_name: the key whose value is measured; `"input_ids"` by default.
        without_padding: count only what the samples' attention masks show, if they have any.

    Lengths in a `datasets.Dataset` are read from its table, if that has them: decoding all samples takes as long as
    an epoch of reading them.

    Raises:
        ValueError: samples are no mappings, or have no such key.
    """
    name = "input_ids" if model_input_name is None else model_input_name
    is_masked = without_padding and MASK in getattr(dataset, "column_names", ())
    in_table = _lengths_in_table(dataset, MASK if is_masked else name)
    if in_table is not None:
        return in_table
    # Read twice, as transformers does, so that a dataset that draws random numbers in reading stays in step with it.
    first = dataset[0]
    if not isinstance(first, Mapping) or name not in dataset[0]:
        found = f"the keys {', '.join(map(str, first))}" if isinstance(first, Mapping) else f"a {type(first).__name__}"
        raise ValueError(
            f"Samples are ordered by the length of their {name!r}, and the first one is {found}. Add {name!r} to the "
            "samples, name a column of lengths in length_column_name (a datasets.Dataset), or choose another "
            "train_sampling_strategy."
        )
    # One by one, also where batches of samples could be fetched: samples may be padded to the others of their batch.
    samples = dataset if hasattr(type(dataset), "__iter__") else (dataset[index] for index in range(len(dataset)))
    return [length_of_sample(sample, name, without_padding) for sample in samples]


def _lengths_in_table(dataset: Any, name: str) -> list[int] | None:
    # A subclass may read otherwise than its table stands.
    if type(dataset) not in known_classes("datasets.Dataset") or not len(dataset):
        return None
    shown = dataset.format
    if shown["type"] not in FORMATS or name not in dataset.column_names:
        return None
    if name not in shown["columns"] and not shown["output_all_columns"]:
        return None
    from pyarrow import ArrowNotImplementedError, compute

    lengths: list[Any] = []
    for rows in dataset.with_format("arrow", columns=[name]).iter(ROWS_READ_AT_ONCE):
        try:
            found = compute.list_value_length(rows[name]).to_pylist()
            if name == MASK and None not in found:
                seen = np.insert(np.cumsum(compute.list_flatten(rows[name])), 0, 0)
                found = np.diff(seen[np.insert(np.cumsum(found), 0, 0)]).tolist()
            lengths += found
        except ArrowNotImplementedError:
            # No column of lists.
            return None
    return None if None in lengths else lengths


# Datasets that have been measured, with the names that were read; evaluations ask for them again and again.
_measured: WeakKeyDictionary[Any, tuple[tuple[str, str | None, bool], np.ndarray]] = WeakKeyDictionary()


def known_lengths(args: TrainingArguments, dataset: Any, processing_class: Any, argument: str) -> np.ndarray:
    """Return the length of each sample in tokens; a dataset is measured once.

    They stand in the column `length_column_name` of a `datasets.Dataset`, in an attribute `lengths` of any dataset, or
    are those of the samples' main input.

    Parameters:
        argument: the name of the one that needs them, for errors; `pack_to_length` needs them without padding.

    Raises:
        ValueError: the samples have no length, or `lengths` has another number of them.
    """
    names = args.length_column_name, _main_input_name(processing_class), argument == "pack_to_length"
    # A list cannot be remembered so, and is measured fast.
    with suppress(TypeError):
        known = _measured.get(dataset)
        if known is not None and known[0] == names and len(known[1]) == len(dataset):
            return known[1]
    lengths = _length_column(args, dataset)
    if lengths is None:
        lengths = getattr(dataset, "lengths", None)
        lengths = None if callable(lengths) else lengths
    try:
        found = sample_lengths(dataset, *names[1:]) if lengths is None else whole_numbers(lengths)
    except ValueError as error:
        raise ValueError(
            f"{argument}={getattr(args, argument)} needs the length of each sample: add `input_ids` to the samples, or "
            f"a column of lengths that length_column_name names, or an attribute `lengths` to the dataset. {error}"
        ) from error
    if len(found) != len(dataset):
        raise ValueError(f"The dataset has {len(dataset)} samples, and {len(found)} `lengths`: give one for each.")
    measured = np.ceil(np.asarray(found)).astype(np.int64)
    with suppress(TypeError):
        _measured[dataset] = names, measured
    return measured


def whole_numbers(lengths: Any) -> list[int]:
    """Lengths as a list, whatever column, tensor or array they stand in: comparing them one by one has to be fast."""
    # The column of a `datasets.Dataset` decodes each value for itself, unless all are asked for at once.
    lengths = lengths[:]
    return lengths.tolist() if hasattr(lengths, "tolist") else list(lengths)


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
        return _rebalance_sampler_class()(
            whole_numbers(lengths),
            effective_batch_size=args.train_batch_size * args.gradient_accumulation_steps * data_parallel_size(args),
            dp_size=data_parallel_size(args),
            grad_accum=args.gradient_accumulation_steps,
            rank=data_parallel_rank(args),
            drop_last=args.dataloader_drop_last,
        )
    return SequentialSampler(dataset) if strategy == "sequential" else RandomSampler(dataset)


def _rebalance_sampler_class() -> Any:
    try:
        return importlib.import_module("transformers.trainer_pt_utils").BatchRebalanceSampler
    except (ImportError, AttributeError) as error:
        raise ImportError(
            "train_sampling_strategy='batch_rebalance' needs the BatchRebalanceSampler of transformers 5.23 or newer: "
            "pip install -U transformers, or choose 'group_by_length'."
        ) from error


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
