"""Collection of an evaluation's nested outputs in arrays, and the metrics over them.

If the number of rows is known, batches are written directly into the final array, which avoids a second copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from littrainer.data.loaders import find_batch_size
from littrainer.distributed.collectives import (
    all_gather_object,
    broadcast_object,
    pad_across_processes,
    raise_on_all_ranks,
)
from littrainer.distributed.layout import data_parallel_rank, data_parallel_size, model_parallel_rank
from littrainer.evaluation.metrics import MetricContext, call_metric_function, convert_metrics, explain_metric_errors
from littrainer.evaluation.prediction import ExactLossMean, compute_sample_mean
from littrainer.evaluation.results import EvalPrediction
from littrainer.evaluation.streaming import StreamingMetrics
from littrainer.runtime.nested_values import (
    PADDING,
    SampleList,
    concat_nested,
    convert_to_numpy,
    is_sample_list,
    map_nested,
    mixed_shapes_message,
    mixed_types_error,
    truncate_nested,
)

# Batches on the host wait until they have this many bytes; then they are written to the final array.
MIN_WRITE_BYTES = 1 << 20


class SampleLists:
    """Detector of lists with an entry for each sample, in nested outputs.

    Parameters:
        lists_are_samples: a list as long as the batch is a list of samples. If None, the first batches of all processes
            decide: such a list is a list of layers if the batch has several samples and all leaves are scalars or have
            a row for each sample, else of samples.
        join: batches are joined, so a later batch that disproves the decision raises an error.
    """

    def __init__(self, lists_are_samples: bool | None, join: bool = True):
        self.lists_are_samples = lists_are_samples
        self.join = join
        # Samples were assumed only because a batch had a single row; entries may be layers.
        self.is_guess = False
        self._had_layers = False

    def mark(self, value: Any, rows: int | None) -> Any:
        """Return the outputs with each list of samples as a `SampleList`; a collective call in the first batch.

        Raises:
            ValueError: a list is a list of samples, but in the first batch it was taken for a list of layers.
        """
        has_lists = False
        # For each list as long as the batch, True if its entries may be layers.
        are_layers: list[bool] = []

        def has_samples(entries: Any) -> bool:
            nonlocal has_lists
            is_record_tuple = isinstance(entries, tuple) and all(isinstance(entry, Mapping) for entry in entries)
            if not (is_record_tuple or isinstance(entries, list)):
                return False
            has_lists = True
            if self.lists_are_samples or len(entries) != rows:
                return len(entries) == rows
            have_rows: list[bool] = []
            map_nested(lambda leaf: have_rows.append(np.shape(leaf)[:1] in ((), (rows,))), entries)
            are_layers.append(all(have_rows))
            return False

        if self.lists_are_samples is None or (not self.lists_are_samples and self.join and self._had_layers):
            map_nested(lambda leaf: leaf, value, has_samples)
        if self.lists_are_samples is None:
            found = not all(are_layers), rows == 1 and bool(are_layers)
            everywhere = all_gather_object(found) if has_lists else []
            self.lists_are_samples = any(map(any, everywhere))
            self.is_guess = self.lists_are_samples and not any(are_samples for are_samples, _ in everywhere)
            self._had_layers = bool(are_layers)
        if self.lists_are_samples:
            return map_nested(
                lambda leaf: SampleList(leaf) if isinstance(leaf, (list, tuple)) else leaf, value, has_samples
            )
        if self.join and self._had_layers and not all(are_layers):
            raise ValueError(
                f"The model returns a list of {rows} samples, but in the first batch its list was taken for a list of "
                "layers, since each entry had as many rows as the batch. Set per_device_eval_batch_size=1, or "
                "eval_do_concat_batches=False."
            )
        return value


class BatchCollection:
    """Collection of outputs over the batches of an evaluation, on the device until `move_to_host()`.

    Parameters:
        join: join the batches; else keep them in a list.
        expected_rows: rows of all batches together, if known.
    """

    def __init__(self, join: bool = True, expected_rows: int | None = None):
        self.join = join
        self.expected_rows = expected_rows
        self._waiting: deque[Any] = deque()
        self._waiting_bytes = 0
        self._joined: Any = None
        self._separate: list[Any] = []
        # The batches' structure, with empty tensors, so that a batch with another structure fails at once.
        self._structure: Any = None

    def add(self, batch: Any) -> None:
        """Add nested tensors, which must have the structure of earlier batches if joined."""
        if self.join and not isinstance(batch, torch.Tensor):
            structures = [map_nested(_remove_rows, batch, is_sample_list)]
            self._structure = concat_nested(structures if self._structure is None else [self._structure, *structures])
        self._waiting.append(map_nested(_drop_unused_storage, batch))
        size, is_on_host = _measure_storage(batch)
        self._waiting_bytes += size
        # Large host tensors are written now, since waiting would double their memory.
        if self.join and is_on_host and self._waiting_bytes >= MIN_WRITE_BYTES:
            self.move_to_host()

    def move_to_host(self) -> None:
        """Convert the collected batches to NumPy, which frees device memory."""
        # Small batches are joined first, for fewer writes.
        if self.join and len(self._waiting) > 1 and self._waiting_bytes < 2 * MIN_WRITE_BYTES:
            self._waiting = deque([concat_nested(list(self._waiting))])
        self._waiting_bytes = 0
        while self._waiting:
            batch = self._waiting.popleft()
            if not self.join:
                self._separate.append(convert_to_numpy(batch))
                continue
            if self._joined is None:
                self._joined = map_nested(
                    lambda leaf: HostArrayBuilder(self.expected_rows) if isinstance(leaf, torch.Tensor) else _Pieces(),
                    batch,
                    is_sample_list,
                )
            _write(self._joined, batch)

    def arrays(self) -> Any:
        self.move_to_host()
        if not self.join:
            return self._separate or None
        return None if self._joined is None else map_nested(lambda leaf: leaf.array(), self._joined)


class HostArrayBuilder:
    """Host array of collected rows; pieces with a shorter second dimension are padded with -100.

    Parameters:
        expected_rows: number of rows to allocate; more or fewer may be written.
    """

    def __init__(self, expected_rows: int | None = None):
        self.expected_rows = expected_rows
        self.rows = 0
        self._memory: torch.Tensor | None = None
        self._is_scalar = False

    def write(self, piece: torch.Tensor) -> None:
        """Append the rows of a batch, from any device; a scalar counts as a row."""
        self._is_scalar = self.rows == 0 and piece.dim() == 0
        piece = torch.atleast_1d(piece.detach())
        memory = self._reserve(piece)[self.rows : self.rows + len(piece)]
        _copy_padded(memory, piece)
        self.rows += len(piece)

    def array(self) -> np.ndarray:
        """Return an array that shares this object's memory."""
        assert self._memory is not None
        rows = self._memory[: self.rows].numpy()
        return rows.reshape(()) if self._is_scalar else rows

    def _reserve(self, piece: torch.Tensor) -> torch.Tensor:
        """Return the memory, reallocated if the piece does not fit."""
        # NumPy has no bfloat16.
        dtype = torch.float32 if piece.dtype == torch.bfloat16 else piece.dtype
        memory, rows, shape = self._memory, self.rows + len(piece), list(piece.shape)
        if memory is None:
            shape[0] = max(rows, self.expected_rows or 0)
            self._memory = _allocate(shape, dtype)
            return self._memory
        if piece.dim() != memory.dim() or shape[2:] != list(memory.shape[2:]):
            raise ValueError(mixed_shapes_message((self.rows, *memory.shape[1:]), tuple(piece.shape)))
        shape[0] = len(memory) if rows <= len(memory) else max(rows, 2 * len(memory))
        shape[1:2] = [max(width) for width in zip(shape[1:2], memory.shape[1:2], strict=True)]
        dtype = torch.promote_types(memory.dtype, dtype)
        if shape != list(memory.shape) or dtype != memory.dtype:
            self._memory = _allocate(shape, dtype)
            _copy_padded(self._memory[: self.rows], memory[: self.rows])
            return self._memory
        return memory


def _allocate(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    try:
        return torch.empty(shape, dtype=dtype, device="cpu")
    except RuntimeError as error:
        raise MemoryError(
            f"The outputs that an evaluation collects take more memory than the host has ({error}). Keep less of each "
            "batch with preprocess_logits_for_metrics, or pass compute_metrics as a torchmetrics metric, which keeps "
            "no outputs."
        ) from None


def _copy_padded(memory: torch.Tensor, rows: torch.Tensor) -> None:
    if rows.shape != memory.shape:
        memory[:, rows.shape[1] :] = PADDING
        memory = memory[:, : rows.shape[1]]
    memory.copy_(rows)


class _Pieces:
    """Collected values other than tensors."""

    def __init__(self) -> None:
        self._pieces: list[Any] = []

    def write(self, piece: Any) -> None:
        self._pieces.append(convert_to_numpy(piece))

    def array(self) -> Any:
        self._pieces = [concat_nested(self._pieces)]
        return self._pieces[0]


def _remove_rows(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.new_empty((0, *leaf.shape[1:]))
    if isinstance(leaf, SampleList):
        return SampleList()
    return np.atleast_1d(leaf)[:0] if isinstance(leaf, np.ndarray) else leaf


def _measure_storage(batch: Any) -> tuple[int, bool]:
    if isinstance(batch, torch.Tensor):
        return batch.nbytes, batch.device.type == "cpu"
    tensors: list[torch.Tensor] = []
    map_nested(lambda leaf: tensors.append(leaf) if isinstance(leaf, torch.Tensor) else None, batch)
    return sum(tensor.nbytes for tensor in tensors), all(tensor.device.type == "cpu" for tensor in tensors)


def _drop_unused_storage(leaf: Any) -> Any:
    # Copy a view, so that the larger tensor behind it can be freed.
    if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().nbytes() > leaf.nbytes:
        return leaf.clone(memory_format=torch.contiguous_format)
    return leaf


def _write(collected: Any, batch: Any) -> None:
    if isinstance(collected, HostArrayBuilder) and not isinstance(batch, torch.Tensor):
        raise mixed_types_error([torch.Tensor, type(batch)])
    if isinstance(collected, (HostArrayBuilder, _Pieces)):
        collected.write(batch)
    elif type(collected) is not type(batch):
        raise mixed_types_error([type(collected), type(batch)])
    elif isinstance(collected, Mapping):
        for name, part in collected.items():
            _write(part, batch[name])
    else:
        for part, piece in zip(collected, batch, strict=True):
            _write(part, piece)


# ---- All outputs of an evaluation ------------------------------------------------------------------------------------


class BatchOutputs(NamedTuple):
    """Outputs of a batch or of all batches; missing or unused entries are None."""

    losses: Any = None
    predictions: Any = None
    labels: Any = None
    inputs: Any = None

    @property
    def has_predictions_and_labels(self) -> bool:
        return self.predictions is not None and self.labels is not None

    def map(self, function: Callable[[Any], Any]) -> BatchOutputs:
        return BatchOutputs(*(None if value is None else function(value) for value in self))

    def first_rows(self, number: int) -> BatchOutputs:
        return self.map(lambda value: truncate_nested(value, number))

    def make_prediction(self, include_for_metrics: Sequence[str]) -> EvalPrediction:
        return EvalPrediction(
            predictions=self.predictions,
            label_ids=self.labels,
            losses=self.losses if "loss" in include_for_metrics else None,
            inputs=self.inputs if "inputs" in include_for_metrics else None,
        )


def select_main_input(model: Any, include_for_metrics: Sequence[str], inputs: Any) -> Any:
    if "inputs" not in include_for_metrics:
        return None
    name = getattr(model, "main_input_name", "input_ids")
    if name not in inputs:
        raise ValueError(
            f"include_for_metrics has 'inputs', and the batch has no {name!r} but {', '.join(inputs)}; set "
            "main_input_name of the model to one of these."
        )
    return inputs[name]


class OutputCollector:
    """Collected outputs of an evaluation, with metrics and mean loss.

    Parameters:
        streaming: None if `compute_metrics` is a function or absent.
        shifts_labels: the loss compares each label with the prediction at the previous position.
    """

    # Dataset indices in the order of reading; None for the dataset's order.
    order: np.ndarray | None = None

    def __init__(
        self,
        context: MetricContext,
        args: Any,
        rows: int | None,
        streaming: StreamingMetrics | None,
        shifts_labels: bool,
        gather: Callable[[Any], Any],
    ):
        self.context = context
        self.args = args
        self.streaming = streaming
        self.collected = BatchOutputs(
            *(BatchCollection(args.eval_do_concat_batches, rows) for _ in BatchOutputs._fields)
        )
        self.sample_lists = BatchOutputs(
            *(SampleLists(name != "predictions" or None, args.eval_do_concat_batches) for name in BatchOutputs._fields)
        )
        self.exact_loss: ExactLossMean | None = None
        if args.eval_loss_weighting != "batches":
            self.exact_loss = ExactLossMean(args, shifts_labels, gather)
        self.samples_read = 0
        self.batches_done = 0

    def get_batch_weight(self, inputs: Any) -> Any:
        """Return the batch's weight in the exact mean loss; None with eval_loss_weighting="batches"."""
        return None if self.exact_loss is None else self.exact_loss.get_batch_weight(inputs)

    def make_outputs(
        self,
        batch: Any,
        samples: int,
        loss: torch.Tensor | None,
        weight: Any,
        predictions: Any,
        labels: Any,
        inputs: Any,
    ) -> BatchOutputs:
        """Add the loss to the exact mean, and return the outputs of a batch in this process; a collective call.

        Outputs are padded along dimension 1 to the greatest length in any process.

        Parameters:
            samples: number of repetitions of the loss, which is the batch's weight in a mean over samples.
        """
        if self.exact_loss is not None and loss is not None:
            self.exact_loss.add(loss, weight)
        rows, lists = find_batch_size(batch), self.sample_lists
        predictions = _pad_to_longest(predictions, lists.predictions, rows)
        labels, inputs = _pad_to_longest(labels, lists.labels, rows), _pad_to_longest(inputs, lists.inputs, rows)
        if predictions is not None and self.context.preprocess_logits_for_metrics is not None:
            with explain_metric_errors(self.context, (predictions, labels), "preprocess_logits_for_metrics"):
                predictions = self.context.preprocess_logits_for_metrics(predictions, labels)
        return BatchOutputs(None if loss is None else loss.repeat(samples), predictions, labels, inputs)

    def collect(self, batch: BatchOutputs) -> None:
        for collection, value in zip(self.collected, batch, strict=True):
            if value is not None:
                collection.add(value)

    def move_to_host_if_due(self) -> None:
        every = self.args.eval_accumulation_steps
        if every and self.batches_done % every == 0:
            for collection in self.collected:
                collection.move_to_host()

    def update_streaming(self, outputs: BatchOutputs, rows: int | None) -> None:
        """Update the streaming metrics with a batch, and leave out its padding samples.

        Parameters:
            rows: samples in the last global batch; None for other batches.
        """
        assert self.streaming is not None
        if not outputs.has_predictions_and_labels:
            return
        if model_parallel_rank(self.args) > 0:
            # Only the first of the processes with the same batch counts its samples.
            outputs = outputs.first_rows(0)
        elif rows is not None:
            size = find_batch_size(outputs.predictions) or 0
            outputs = outputs.first_rows(min(max(rows - data_parallel_rank(self.args) * size, 0), size))
        with explain_metric_errors(self.context):
            self.streaming.update(outputs.make_prediction(self.args.include_for_metrics))

    def results(self, batch_metrics: Any = None) -> tuple[BatchOutputs, dict[str, Any], float | None]:
        """Return all outputs, and the metrics and mean loss, which are equal in all processes."""
        outputs = BatchOutputs(*(collection.arrays() for collection in self.collected))
        if self.sample_lists.predictions.is_guess and self.args.eval_do_concat_batches:
            outputs = outputs._replace(predictions=map_nested(_join_layer, outputs.predictions, is_sample_list))
        if self.order is not None:
            outputs = restore_dataset_order(outputs, self.order[: self.samples_read * data_parallel_size(self.args)])
        metrics: Any = batch_metrics or {}
        if self.streaming is not None:
            with explain_metric_errors(self.context):
                metrics = self.streaming.compute() if self.streaming.batches else {}
        with raise_on_all_ranks("computing the metrics of an evaluation"):
            is_due = self.context.compute_metrics is not None and self.streaming is None and batch_metrics is None
            if is_due and outputs.has_predictions_and_labels:
                metrics = call_metric_function(self.context, outputs.make_prediction(self.args.include_for_metrics))
            metrics = convert_metrics(self.context, metrics)
        # The best checkpoint and the schedule depend on metrics, and must not differ between processes.
        metrics = broadcast_object(metrics)
        if self.exact_loss is not None:
            return outputs, metrics, self.exact_loss.value()
        return outputs, metrics, compute_sample_mean(outputs.losses, self.args.logging_nan_inf_filter)


def _pad_to_longest(value: Any, sample_lists: SampleLists, rows: int | None) -> Any:
    return None if value is None else pad_across_processes(sample_lists.mark(value, rows), dim=1, fill=PADDING)


def _join_layer(value: Any) -> Any:
    """If each sample has a single row, join the samples into a list of a single layer, as transformers does."""
    have_one_row: list[bool] = []
    if isinstance(value, SampleList):
        map_nested(lambda leaf: have_one_row.append(np.shape(leaf)[:1] in ((), (1,))), value)
    return [concat_nested(list(value))] if have_one_row and all(have_one_row) else value


def restore_dataset_order(outputs: BatchOutputs, order: np.ndarray) -> BatchOutputs:
    """Sort outputs, which were read in `order`, back into the order of the dataset."""

    def sort_rows(rows: Any) -> Any:
        if np.ndim(rows) and len(rows) != len(order):
            raise ValueError(
                f"max_tokens_per_batch reads samples by length, and outputs with {len(rows)} rows cannot be put in the "
                f"order of {len(order)} samples. Return one row for each sample, or do not set max_tokens_per_batch."
            )
        return rows[np.argsort(order)] if np.ndim(rows) else rows

    return outputs.map(lambda value: map_nested(sort_rows, value))
