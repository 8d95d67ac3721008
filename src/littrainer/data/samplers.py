"""Samplers, and their selection by the arguments."""

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

# Batches sorted by length together; fewer if the data would give less than `MIN_SORTED_GROUPS`.
MAX_BATCHES_PER_SORTED_GROUP = 50
MIN_SORTED_GROUPS = 4


class EpochSeededSampler(RandomSampler):
    """Random sampler that seeds epoch `e` with `data_seed + e`, as accelerate's.

    Parameters:
        data_seed: by default the initial seed of torch's global generator.
    """

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.initial_seed = torch.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    @classmethod
    def replace(cls, sampler: RandomSampler, data_seed: int | None) -> EpochSeededSampler:
        return cls(
            sampler.data_source,
            replacement=sampler.replacement,
            num_samples=sampler._num_samples,
            generator=sampler.generator,
            data_seed=data_seed,
        )

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._draw_order())

    def _draw_order(self) -> Iterator[Iterator[int]]:
        # Seeded lazily, since the generator may be used until the first sample is drawn.
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

    The longest sample is first, so that memory runs out in the first step if at all.

    Parameters:
        mega_batch_mult: batches of a group that is sorted by length; by default 50, or fewer so that a small dataset
            has four groups.
    """
    if mega_batch_mult is None:
        mega_batch_mult = max(1, min(MAX_BATCHES_PER_SORTED_GROUP, len(lengths) // (batch_size * MIN_SORTED_GROUPS)))
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
    """Random order with samples of similar length together, which need less padding.

    Parameters:
        batch_size: samples of a batch, or of all micro-batches of an optimizer step.
        dataset: dataset to measure if `lengths` is None.
        model_input_name: key of the samples to measure; `"input_ids"` by default.
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


# Formats of a `datasets.Dataset` that keep the length of a list.
LENGTH_KEEPING_FORMATS = (None, "numpy", "torch")
ROWS_READ_AT_ONCE = 10_000
MASK = "attention_mask"


def get_sample_length(sample: Any, name: str, without_padding: bool) -> int:
    """Return the length of an entry; without padding, the sum of the attention mask."""
    return int(np.sum(sample[MASK])) if without_padding and MASK in sample else len(sample[name])


def compute_sample_lengths(
    dataset: Any, model_input_name: str | None = None, without_padding: bool = False
) -> list[int]:
    """Return the length of each sample's main input, without decoding a `datasets.Dataset` if possible."""
    name = "input_ids" if model_input_name is None else model_input_name
    is_masked = without_padding and MASK in getattr(dataset, "column_names", ())
    in_table = _get_table_lengths(dataset, MASK if is_masked else name)
    if in_table is not None:
        return in_table
    # Read twice, as transformers does, since reading may draw random numbers.
    first = dataset[0]
    if not isinstance(first, Mapping) or name not in dataset[0]:
        content = (
            f"the keys {', '.join(map(str, first))}" if isinstance(first, Mapping) else f"a {type(first).__name__}"
        )
        raise ValueError(
            f"Samples are ordered by the length of their {name!r}, and the first one is {content}. Add {name!r} to the "
            "samples, name a column of lengths in length_column_name (a datasets.Dataset), or choose another "
            "train_sampling_strategy."
        )
    # Without `__getitems__`, which may pad samples to the longest of a batch.
    samples = dataset if hasattr(type(dataset), "__iter__") else (dataset[index] for index in range(len(dataset)))
    return [get_sample_length(sample, name, without_padding) for sample in samples]


def _get_table_lengths(dataset: Any, name: str) -> list[int] | None:
    # Subclasses may return other rows than their table.
    if type(dataset) not in loaded_classes("datasets.Dataset") or not len(dataset):
        return None
    output = dataset.format
    if output["type"] not in LENGTH_KEEPING_FORMATS or name not in dataset.column_names:
        return None
    if name not in output["columns"] and not output["output_all_columns"]:
        return None
    from pyarrow import ArrowNotImplementedError, compute

    lengths: list[Any] = []
    for rows in dataset.with_format("arrow", columns=[name]).iter(ROWS_READ_AT_ONCE):
        try:
            chunk = compute.list_value_length(rows[name]).to_pylist()
            if name == MASK and None not in chunk:
                totals = np.insert(np.cumsum(compute.list_flatten(rows[name])), 0, 0)
                chunk = np.diff(totals[np.insert(np.cumsum(chunk), 0, 0)]).tolist()
            lengths += chunk
        except ArrowNotImplementedError:
            return None
    return None if None in lengths else lengths


# Dataset -> names that were read, and lengths.
_lengths_cache: WeakKeyDictionary[Any, tuple[tuple[str, str | None, bool], np.ndarray]] = WeakKeyDictionary()


def measure_lengths(args: TrainingArguments, dataset: Any, processing_class: Any, argument: str) -> np.ndarray:
    """Return the cached tokens of each sample, from `length_column_name`, an attribute `lengths`, or the main input.

    Parameters:
        argument: argument that needs the lengths; `pack_to_length` excludes padding.
    """
    names = args.length_column_name, _get_main_input_name(processing_class), argument == "pack_to_length"
    # Unhashable datasets, such as lists, are not cached.
    with suppress(TypeError):
        cached = _lengths_cache.get(dataset)
        if cached is not None and cached[0] == names and len(cached[1]) == len(dataset):
            return cached[1]
    lengths = _get_length_column(args, dataset)
    if lengths is None and not callable(getattr(dataset, "lengths", None)):
        lengths = getattr(dataset, "lengths", None)
    try:
        lengths = compute_sample_lengths(dataset, *names[1:]) if lengths is None else list_lengths(lengths)
    except ValueError as error:
        raise ValueError(
            f"{argument}={getattr(args, argument)} needs the length of each sample: add `input_ids` to the samples, or "
            f"a column of lengths that length_column_name names, or an attribute `lengths` to the dataset. {error}"
        ) from error
    if len(lengths) != len(dataset):
        raise ValueError(f"The dataset has {len(dataset)} samples, and {len(lengths)} `lengths`: give one for each.")
    rounded = np.ceil(np.asarray(lengths)).astype(np.int64)
    with suppress(TypeError):
        _lengths_cache[dataset] = names, rounded
    return rounded


def list_lengths(lengths: Any) -> list[int]:
    # Read at once, since a `datasets` column decodes each value separately.
    lengths = lengths[:]
    return lengths.tolist() if hasattr(lengths, "tolist") else list(lengths)


LENGTH_STRATEGIES = ("group_by_length", "batch_rebalance")


def make_train_sampler(args: TrainingArguments, dataset: Any, processing_class: Any) -> Sampler[Any]:
    strategy, samples_per_step = _get_strategy(args), args.train_batch_size * args.gradient_accumulation_steps
    if strategy == "group_by_length":
        return _group_by_length(args, dataset, processing_class, samples_per_step)
    if strategy == "batch_rebalance":
        lengths = _get_length_column(args, dataset)
        if lengths is None:
            lengths = compute_sample_lengths(dataset, _get_main_input_name(processing_class))
        return _import_rebalance_sampler()(
            list_lengths(lengths),
            effective_batch_size=samples_per_step * data_parallel_size(args),
            dp_size=data_parallel_size(args),
            grad_accum=args.gradient_accumulation_steps,
            rank=data_parallel_rank(args),
            drop_last=args.dataloader_drop_last,
        )
    return SequentialSampler(dataset) if strategy == "sequential" else RandomSampler(dataset)


def _import_rebalance_sampler() -> Any:
    try:
        return importlib.import_module("transformers.trainer_pt_utils").BatchRebalanceSampler
    except (ImportError, AttributeError) as error:
        raise ImportError(
            "train_sampling_strategy='batch_rebalance' needs the BatchRebalanceSampler of transformers 5.23 or newer: "
            "pip install -U transformers, or choose 'group_by_length'."
        ) from error


def _get_strategy(args: TrainingArguments) -> str:
    return "group_by_length" if getattr(args, "sortish_sampler", False) else args.train_sampling_strategy


def make_evaluation_sampler(args: TrainingArguments, dataset: Any, processing_class: Any) -> Sampler[int] | None:
    """Return a sequential sampler (None with several processes), or a sampler grouped by length."""
    if args.train_sampling_strategy != "group_by_length":
        return SequentialSampler(dataset) if args.world_size <= 1 else None
    seed = args.seed if args.data_seed is None else args.data_seed
    return _group_by_length(
        args, dataset, processing_class, args.eval_batch_size, generator=torch.Generator().manual_seed(seed)
    )


def _group_by_length(
    args: TrainingArguments, dataset: Any, processing_class: Any, batch_size: int, generator: Any = None
) -> LengthGroupedSampler:
    lengths, name = _get_length_column(args, dataset), _get_main_input_name(processing_class)
    return LengthGroupedSampler(batch_size, dataset, lengths, name, generator)


def warn_about_stream_order(args: TrainingArguments) -> None:
    if _get_strategy(args) in LENGTH_STRATEGIES:
        logger.warning(
            "train_sampling_strategy=%r has no effect: the training data is a stream or has no length, and is read "
            "in its own order.",
            _get_strategy(args),
        )


def warn_about_dropped_lengths(args: TrainingArguments, before: Any, after: Any) -> None:
    name = args.length_column_name
    if _get_strategy(args) in LENGTH_STRATEGIES and name in before.column_names and name not in after.column_names:
        warnings.warn(
            f"length_column_name={name!r} is not read: the column is dropped, since the model does not take it, and "
            "samples are measured by their main input. Set remove_unused_columns=False to have it read.",
            stacklevel=2,
        )


def _get_length_column(args: TrainingArguments, dataset: Any) -> Any:
    if is_a(dataset, "datasets.Dataset") and args.length_column_name in dataset.column_names:
        return dataset[args.length_column_name]
    return None


def _get_main_input_name(processing_class: Any) -> str | None:
    names = getattr(processing_class, "model_input_names", None)
    return names[0] if names else None
