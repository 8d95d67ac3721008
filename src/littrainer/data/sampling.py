"""Which sampler the arguments name: the order of training samples, and that of evaluation samples."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import RandomSampler, Sampler, SequentialSampler

from littrainer.data.batch_rebalance import BatchRebalanceSampler
from littrainer.data.samplers import LengthGroupedSampler, sample_lengths, whole_numbers
from littrainer.distributed.layout import data_parallel_rank, data_parallel_size
from littrainer.ecosystem import is_a

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments

logger = logging.getLogger(__name__)

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
