"""Samplers, and the choice of one by the arguments."""

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
from littrainer.runtime.lazy_isinstance import is_a, loaded_classes

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments


logger = logging.getLogger(__name__)

# Batches that are sorted by length together; fewer if the data would make fewer than the minimum of groups.
MAX_BATCHES_SORTED_TOGETHER = 50
MIN_SORTED_GROUPS = 4


class EpochSeededSampler(RandomSampler):
    """A random sampler whose order of epoch `e` is that of a generator seeded with `data_seed + e`, as accelerate's.

    Parameters:
        data_seed: the seed; None takes the seed torch's global generator was last given.
    """

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.initial_seed = torch.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    @classmethod
    def replacing(cls, sampler: RandomSampler, data_seed: int | None) -> EpochSeededSampler:
        """Return a sampler that draws as another random sampler, but seeded by epoch."""
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
    """Return a random order with samples of similar length together.

    The longest sample comes first, so that running out of memory happens at once and not after hours.

    Parameters:
        lengths: the length of each sample, in tokens.
        batch_size: samples of a batch.
        mega_batch_mult: batches that are shuffled into a group and sorted there; by default 50, or fewer so that a
            small dataset has four groups.
        generator: draws the order; torch's global one by default.
    """
    if mega_batch_mult is None:
        mega_batch_mult = max(1, min(MAX_BATCHES_SORTED_TOGETHER, len(lengths) // (batch_size * MIN_SORTED_GROUPS)))
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
    """A random order with samples of similar length together, so that batches need less padding.

    Parameters:
        batch_size: samples of a batch, or of all micro-batches of an optimizer step.
        dataset: measured if `lengths` is None.
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
        self.lengths = compute_sample_lengths(dataset, model_input_name) if lengths is None else list_lengths(lengths)
        self.generator = generator

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        return iter(get_length_grouped_indices(self.lengths, self.batch_size, generator=self.generator))


# Formats of a `datasets.Dataset` in which a list of `n` values is something of length `n`.
FORMATS = (None, "numpy", "torch")
ROWS_READ_AT_ONCE = 10_000
MASK = "attention_mask"


def get_sample_length(sample: Any, name: str, without_padding: bool) -> int:
    """Return the length of a sample's entry; without padding, the number of tokens that its attention mask shows."""
    return int(np.sum(sample[MASK])) if without_padding and MASK in sample else len(sample[name])


def compute_sample_lengths(
    dataset: Any, model_input_name: str | None = None, without_padding: bool = False
) -> list[int]:
    """Return the length of each sample's main input.

    Parameters:
        dataset: map-style, with mappings as samples; those of a `datasets.Dataset` are measured in its table if
            possible, since decoding all samples takes as long as an epoch of reading them.
        model_input_name: the key whose value is measured; `"input_ids"` by default.
        without_padding: count only what the samples' attention masks show, if they have any.

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
    return [get_sample_length(sample, name, without_padding) for sample in samples]


def _lengths_in_table(dataset: Any, name: str) -> list[int] | None:
    # A subclass may read other rows than those of its table.
    if type(dataset) not in loaded_classes("datasets.Dataset") or not len(dataset):
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


# Datasets that have been measured, with the names that were read; evaluations need the lengths again and again.
_measured: WeakKeyDictionary[Any, tuple[tuple[str, str | None, bool], np.ndarray]] = WeakKeyDictionary()


def measure_lengths(args: TrainingArguments, dataset: Any, processing_class: Any, argument: str) -> np.ndarray:
    """Return the length of each sample in tokens; a dataset is measured once.

    The lengths are those of the column `length_column_name`, of an attribute `lengths`, or of the main input.

    Parameters:
        argument: the argument that needs them, for errors; `pack_to_length` needs them without padding.

    Raises:
        ValueError: the samples have no length, or `lengths` has another number of them.
    """
    names = args.length_column_name, _main_input_name(processing_class), argument == "pack_to_length"
    # A list cannot be a key, and is measured fast.
    with suppress(TypeError):
        known = _measured.get(dataset)
        if known is not None and known[0] == names and len(known[1]) == len(dataset):
            return known[1]
    lengths = _length_column(args, dataset)
    if lengths is None and not callable(getattr(dataset, "lengths", None)):
        lengths = getattr(dataset, "lengths", None)
    try:
        found = compute_sample_lengths(dataset, *names[1:]) if lengths is None else list_lengths(lengths)
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


def list_lengths(lengths: Any) -> list[int]:
    """Return the lengths of a column, tensor or array as a list, whose numbers are compared fast."""
    # The column of a `datasets.Dataset` decodes each value for itself, unless all are read at once.
    lengths = lengths[:]
    return lengths.tolist() if hasattr(lengths, "tolist") else list(lengths)


ORDERED_BY_LENGTH = ("group_by_length", "batch_rebalance")


def make_train_sampler(args: TrainingArguments, dataset: Any, processing_class: Any) -> Sampler[Any]:
    """Return the sampler of a map-style training dataset for `train_sampling_strategy` or `sortish_sampler`.

    Parameters:
        processing_class: its main input's name is the key whose length counts.

    Raises:
        ValueError: the strategy needs lengths, and the samples have none.
    """
    strategy, samples_of_step = _strategy(args), args.train_batch_size * args.gradient_accumulation_steps
    if strategy == "group_by_length":
        return _group_by_length(args, dataset, processing_class, samples_of_step)
    if strategy == "batch_rebalance":
        lengths = _length_column(args, dataset)
        if lengths is None:
            lengths = compute_sample_lengths(dataset, _main_input_name(processing_class))
        return _rebalance_sampler_class()(
            list_lengths(lengths),
            effective_batch_size=samples_of_step * data_parallel_size(args),
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


def make_evaluation_sampler(args: TrainingArguments, dataset: Any, processing_class: Any) -> Sampler[int] | None:
    """Return the sampler of an evaluation dataset: its own order (None with several processes), or by length."""
    if args.train_sampling_strategy != "group_by_length":
        return SequentialSampler(dataset) if args.world_size <= 1 else None
    seed = args.seed if args.data_seed is None else args.data_seed
    return _group_by_length(
        args, dataset, processing_class, args.eval_batch_size, generator=torch.Generator().manual_seed(seed)
    )


def _group_by_length(
    args: TrainingArguments, dataset: Any, processing_class: Any, batch_size: int, generator: Any = None
) -> LengthGroupedSampler:
    lengths, name = _length_column(args, dataset), _main_input_name(processing_class)
    return LengthGroupedSampler(batch_size, dataset, lengths, name, generator)


def warn_about_stream_order(args: TrainingArguments) -> None:
    """Warn that a strategy which needs lengths has no effect on training data that is read in its own order."""
    if _strategy(args) in ORDERED_BY_LENGTH:
        logger.warning(
            "train_sampling_strategy=%r has no effect: the training data is a stream or has no length, and is read "
            "in its own order.",
            _strategy(args),
        )


def warn_about_dropped_lengths(args: TrainingArguments, whole: Any, kept: Any) -> None:
    """Warn if the column of lengths was among the unused columns of a `datasets.Dataset`, which are dropped before."""
    name = args.length_column_name
    if _strategy(args) in ORDERED_BY_LENGTH and name in whole.column_names and name not in kept.column_names:
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
