"""Evaluation loop: prediction and collection of batches, and metrics at the end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset, SequentialSampler

from littrainer.callbacks.progress import get_progress_label, label_evaluation_bar
from littrainer.callbacks.trainer_context import TrainerContext
from littrainer.data.limits import get_batch_limit, limit_batches
from littrainer.data.loaders import PrefetchLoader, find_batch_size, get_full_dataset, has_length
from littrainer.data.sharding import get_length
from littrainer.data.stream_end import check_equal_lengths
from littrainer.data.token_batches import find_length_groups
from littrainer.data.workers import iterate_batches
from littrainer.distributed.collectives import broadcast_object, pad_across_processes, raise_on_all_ranks
from littrainer.distributed.layout import data_parallel_rank, data_parallel_size, tensor_parallel_rank
from littrainer.evaluation.gathering import BatchCollection, SampleLists
from littrainer.evaluation.metrics import MetricContext, call_metric_function, check_metrics, explain_metric_errors
from littrainer.evaluation.prediction import ExactLossMean, compute_sample_mean
from littrainer.evaluation.results import EvalLoopOutput, EvalPrediction
from littrainer.evaluation.streaming import StreamingMetrics, TaskFacts, find_task_facts, make_streaming_metrics
from littrainer.runtime.nested_values import PADDING, map_nested, truncate_nested
from littrainer.strategies.full_state import reshard_gathered

logger = logging.getLogger(__name__)


class BatchOutputs(NamedTuple):
    """Outputs of a batch or of all batches; missing or unused entries are None."""

    losses: Any = None
    predictions: Any = None
    labels: Any = None
    inputs: Any = None

    def first_rows(self, number: int) -> BatchOutputs:
        return BatchOutputs(*(None if value is None else truncate_nested(value, number) for value in self))

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


class CollectedOutputs:
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
        self.sample_lists = BatchOutputs(*(SampleLists(name != "predictions") for name in BatchOutputs._fields))
        self.exact_loss: ExactLossMean | None = None
        if args.eval_loss_weighting != "batches":
            self.exact_loss = ExactLossMean(args, shifts_labels, gather)
        self.samples_read = 0
        self.batches_done = 0

    def get_batch_weight(self, inputs: Any) -> Any:
        """Return a weight for the mean loss; call before a step, which may remove labels."""
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
        """Return the outputs of a batch in this process, padded to the longest of all processes.

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
        """Update the streaming metrics with a batch, without padding samples.

        Parameters:
            rows: samples in the last global batch; None for other batches.
        """
        assert self.streaming is not None
        if outputs.predictions is None or outputs.labels is None:
            return
        if tensor_parallel_rank(self.args) > 0:
            # Tensor-parallel processes predict the same samples.
            outputs = outputs.first_rows(0)
        elif rows is not None:
            size = find_batch_size(outputs.predictions) or 0
            outputs = outputs.first_rows(min(max(rows - data_parallel_rank(self.args) * size, 0), size))
        with explain_metric_errors(self.context):
            self.streaming.update(outputs.make_prediction(self.args.include_for_metrics))

    def results(self, batch_metrics: Any = None) -> tuple[BatchOutputs, dict[str, Any], float | None]:
        """Return all outputs, and the metrics and mean loss, which are equal in all processes."""
        outputs = BatchOutputs(*(collection.arrays() for collection in self.collected))
        if self.order is not None:
            outputs = restore_dataset_order(outputs, self.order[: self.samples_read * data_parallel_size(self.args)])
        metrics: Any = batch_metrics or {}
        if self.streaming is not None:
            with explain_metric_errors(self.context):
                metrics = self.streaming.compute() if self.streaming.batches else {}
        with raise_on_all_ranks("computing the metrics of an evaluation"):
            is_complete = outputs.predictions is not None and outputs.labels is not None
            is_due = self.context.compute_metrics is not None and self.streaming is None and batch_metrics is None
            if is_due and is_complete:
                metrics = call_metric_function(self.context, outputs.make_prediction(self.args.include_for_metrics))
            metrics = check_metrics(self.context, metrics)
        # The best checkpoint and the schedule depend on metrics, and must not differ between processes.
        metrics = broadcast_object(metrics)
        if self.exact_loss is not None:
            return outputs, metrics, self.exact_loss.value()
        return outputs, metrics, compute_sample_mean(outputs.losses, self.args.logging_nan_inf_filter)


def _pad_to_longest(value: Any, sample_lists: SampleLists, rows: int | None) -> Any:
    return None if value is None else pad_across_processes(sample_lists.mark(value, rows), dim=1, fill=PADDING)


def restore_dataset_order(outputs: BatchOutputs, order: np.ndarray) -> BatchOutputs:
    """Return outputs, read in `order`, in the dataset's order."""

    def sort_rows(rows: Any) -> Any:
        if np.ndim(rows) and len(rows) != len(order):
            raise ValueError(
                f"max_tokens_per_batch reads samples by length, and outputs with {len(rows)} rows cannot be put in the "
                f"order of {len(order)} samples. Return one row for each sample, or leave it out."
            )
        return rows[np.argsort(order)] if np.ndim(rows) else rows

    return BatchOutputs(*(map_nested(sort_rows, value) for value in outputs))


class EvaluationLoop(CollectedOutputs):
    """Loop of `evaluate()` and `predict()`.

    Parameters:
        description: "Evaluation" or "Prediction"; a prediction keeps its outputs even with `batch_eval_metrics`.
        has_custom_step: the Trainer's class overrides `prediction_step`.
        shifts_labels: the loss compares each label with the prediction at the previous position.
        move_input: moves a batch's main input to the device.
    """

    def __init__(
        self,
        trainer: TrainerContext,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool,
        ignore_keys: Sequence[str] | None,
        metric_key_prefix: str,
        has_custom_step: bool,
        shifts_labels: bool,
        move_input: Callable[[Any], Any],
    ):
        self.trainer = trainer
        self.dataloader = dataloader
        self.description = description
        self.is_prediction = description == "Prediction"
        self.prediction_loss_only = prediction_loss_only
        self.ignore_keys = ignore_keys
        self.prefix = metric_key_prefix
        self.has_custom_step = has_custom_step
        self.generates = bool(getattr(trainer.args, "predict_with_generate", False))
        self.max_batches = get_batch_limit(trainer, "prediction" if self.is_prediction else "evaluation", dataloader)
        self.loss_shifts_labels, self.move_input = shifts_labels, move_input
        rows = get_length(get_full_dataset(dataloader)) if self.max_batches is None else None
        streaming = make_streaming_metrics(trainer.compute_metrics)
        super().__init__(trainer, trainer.args, rows, streaming, shifts_labels, trainer.accelerator.gather)
        groups = find_length_groups(dataloader)
        self.order = None if groups is None else groups.order
        self.model: Any = None
        # The current batch, for error messages.
        self.batch: Any = None
        self._batch_metrics: dict[str, Any] = {}
        self._output: EvalLoopOutput | None = None

    def begin(self, model: Any) -> None:
        trainer, self.model = self.trainer, model
        if callable(getattr(trainer.model, "eval", None)):
            trainer.model.eval()
        if callable(getattr(trainer.optimizer, "eval", None)):
            trainer.optimizer.eval()
        trainer.callback_handler.eval_dataloader = self.dataloader
        label_evaluation_bar(trainer.callback_handler.callbacks, get_progress_label(self.prefix, self.generates))
        data = "prediction data" if self.is_prediction else "evaluation data"
        check_equal_lengths(self.dataloader, data, f"{self.description.lower()} with metric_key_prefix={self.prefix!r}")
        logger.info(f"\n***** Running {self.description} *****")
        has_number = has_length(self.dataloader)
        logger.info(f"  Num examples{f' = {trainer.num_examples(self.dataloader)}' if has_number else ': Unknown'}")
        logger.info(f"  Batch size = {trainer.args.eval_batch_size}")
        if self.streaming is not None:
            self.streaming.begin(trainer.args.device, self.task_facts)

    def task_facts(self) -> TaskFacts:
        trainer = self.trainer
        # A script's step may return probabilities, whose sigmoid would exceed 0.5.
        has_raw_scores = trainer.preprocess_logits_for_metrics is None and not self.has_custom_step
        return find_task_facts(trainer.model, self.loss_shifts_labels, has_raw_scores, self.generates)

    def run(self) -> None:
        with torch.no_grad():
            for batch in self.batches():
                self.step(batch)

    def batches(self) -> Iterator[Any]:
        is_ours = isinstance(self.dataloader, PrefetchLoader)
        batches = iter(self.dataloader) if is_ours else iterate_batches(self.dataloader)
        yield from batches if self.max_batches is None else limit_batches(batches, self.max_batches)

    @property
    def num_batches(self) -> float:
        number = get_length(self.dataloader) if self.max_batches is None else self.max_batches
        return float("inf") if number is None else number

    def step(self, batch: Any) -> BatchOutputs:
        """Predict a batch, collect its gathered outputs, and return the outputs of this process."""
        trainer, args = self.trainer, self.trainer.args
        trainer.session.preemption.raise_if_preempted()
        self.batch = batch
        samples = find_batch_size(batch)
        self.samples_read += samples or 0
        is_end = isinstance(self.dataloader, PrefetchLoader) and self.dataloader.end_of_dataloader
        # `gather_for_metrics` drops the padding rows of the last batch.
        rows = self.dataloader.samples_in_last_batch() if is_end else None
        trainer.accelerator.samples_in_last_batch = rows
        try:
            weight = self.get_batch_weight(batch)
            loss, logits, labels = trainer.prediction_step(
                self.model, batch, self.prediction_loss_only, ignore_keys=self.ignore_keys
            )
            inputs = select_main_input(trainer.model, args.include_for_metrics, batch)
            inputs = None if inputs is None else self.move_input(inputs)
            loss_rows = args.eval_batch_size if self.order is None else samples or 0
            outputs = self.make_outputs(batch, loss_rows, loss, weight, logits, labels, inputs)
            gathered = self._gather(outputs, rows)
        finally:
            trainer.accelerator.samples_in_last_batch = None
        if self.streaming is not None:
            self.update_streaming(outputs, rows)
        has_losses_only = args.batch_eval_metrics and not self.is_prediction
        self.collect(BatchOutputs(losses=gathered.losses) if has_losses_only else gathered)
        trainer.control = trainer.callback_handler.on_prediction_step(args, trainer.state, trainer.control)
        self.batches_done += 1
        if args.batch_eval_metrics and self.streaming is None:
            self._update_batch_metrics(gathered._replace(inputs=batch), is_end or self.batches_done == self.max_batches)
        else:
            self.move_to_host_if_due()
        self.batch = None
        return outputs

    def _gather(self, outputs: BatchOutputs, rows: int | None) -> BatchOutputs:
        if self.streaming is not None and not self.is_prediction:
            outputs = BatchOutputs(losses=outputs.losses)
        gather = self.trainer.gather_function
        gathered = BatchOutputs(*(None if value is None else gather(value) for value in outputs))
        if rows is None or self.args.world_size == 1:
            return gathered
        # Seq2SeqTrainer's gather function keeps padding samples; its loss includes them.
        return gathered.first_rows(rows)._replace(losses=gathered.losses)

    def _update_batch_metrics(self, batch: BatchOutputs, is_last: bool) -> None:
        if self.trainer.compute_metrics is not None and batch.predictions is not None and batch.labels is not None:
            prediction = batch.make_prediction(self.args.include_for_metrics)
            self._batch_metrics = call_metric_function(self.trainer, prediction, compute_result=is_last)

    def find_sample_indices(self, batch: Any) -> list[int] | None:
        """Return the dataset indices of the last batch; None if shuffled or with several processes."""
        sampler = getattr(self.dataloader, "sampler", None)
        if not isinstance(sampler, SequentialSampler) or self.trainer.args.world_size > 1:
            return None
        positions = range(self.samples_read - (find_batch_size(batch) or 0), self.samples_read)
        return list(positions) if self.order is None else [int(self.order[position]) for position in positions]

    def finish(self) -> EvalLoopOutput:
        """Compute the metrics, and return the cached result in later calls."""
        if self._output is not None:
            return self._output
        trainer, prefix = self.trainer, f"{self.prefix}_"
        if trainer.is_fsdp_enabled:
            # Forward passes leave all-gathered parameters, which use memory and are visible to scripts.
            reshard_gathered(trainer.model)
        if self.batches_done == 0 and isinstance(getattr(self.dataloader, "dataset", None), IterableDataset):
            name = "test" if self.is_prediction else "evaluation"
            raise ValueError(
                f"The {name} set is a stream that gave no batch. Check how it was filtered; a generator can be read "
                "only once, and dataloader_drop_last=True leaves out a short last batch."
            )
        outputs, metrics, mean_loss = self.results(self._batch_metrics if self.args.batch_eval_metrics else None)
        if mean_loss is not None:
            metrics[prefix + "loss"] = mean_loss
        if trainer.model_preparation_time is not None:
            metrics[prefix + "model_preparation_time"] = trainer.model_preparation_time
        prefixed = {name: value for name, value in metrics.items() if name.startswith(prefix)}
        prefixed |= {prefix + name: value for name, value in metrics.items() if not name.startswith(prefix)}
        self._output = EvalLoopOutput(outputs.predictions, outputs.labels, prefixed, self._count_samples())
        return self._output

    def _count_samples(self) -> int:
        length = get_length(get_full_dataset(self.dataloader))
        if self.max_batches is not None:
            count = self.samples_read * data_parallel_size(self.args)
            count = count if length is None else min(count, length)
        elif length is not None:
            count = length
        else:
            count = self.trainer.num_examples(self.dataloader) if has_length(self.dataloader) else 0
        return count or self.samples_read
