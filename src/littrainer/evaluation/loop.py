"""The loop over an evaluation or test set: what is done with each batch, and what is computed of all at the end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset, SequentialSampler

from littrainer.callbacks.progress import get_progress_label, label_evaluation_bar
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
    """What there is of a batch, or of all of them; None if it is not there or not asked for."""

    losses: Any = None
    predictions: Any = None
    labels: Any = None
    inputs: Any = None

    def first_rows(self, number: int) -> BatchOutputs:
        """Return the same with no more than so many samples."""
        return BatchOutputs(*(None if value is None else truncate_nested(value, number) for value in self))

    def for_metrics(self, wanted: Sequence[str]) -> EvalPrediction:
        """Return what a metric function is given, with what `include_for_metrics` wants."""
        losses, inputs = self.losses if "loss" in wanted else None, self.inputs if "inputs" in wanted else None
        return EvalPrediction(predictions=self.predictions, label_ids=self.labels, losses=losses, inputs=inputs)


def select_main_input(model: Any, wanted: Sequence[str], inputs: Any) -> Any:
    """Return the model's main input among a batch, if `include_for_metrics` wants it."""
    if "inputs" not in wanted:
        return None
    name = getattr(model, "main_input_name", "input_ids")
    if name not in inputs:
        raise ValueError(
            f"include_for_metrics has 'inputs', and the batch has no {name!r} but {', '.join(inputs)}; set "
            "main_input_name of the model to one of these."
        )
    return inputs[name]


class CollectedOutputs:
    """Outputs of the batches of an evaluation, and the metrics and the mean loss that are computed of them.

    Parameters:
        place: the Trainer, or whatever else has the metric functions.
        args: training arguments.
        rows: how many there will be, if that is known.
        streaming: metrics that are updated batch by batch; None if `compute_metrics` is a function or absent.
        shifts_labels: the loss compares each label with the prediction one position before.
        gather: puts rows of all processes together.
    """

    # Places in the dataset of the samples, in the order in which they are read; None if that is the dataset's own.
    order: np.ndarray | None = None

    def __init__(
        self,
        place: MetricContext,
        args: Any,
        rows: int | None,
        streaming: StreamingMetrics | None,
        shifts_labels: bool,
        gather: Callable[[Any], Any],
    ):
        self.place = place
        self.args = args
        self.streaming = streaming
        self.collected = BatchOutputs(
            *(BatchCollection(args.eval_do_concat_batches, rows) for _ in BatchOutputs._fields)
        )
        self.sample_lists = BatchOutputs(*(SampleLists(name != "predictions") for name in BatchOutputs._fields))
        self.exact_loss: ExactLossMean | None = None
        if args.eval_loss_weighting != "batches":
            self.exact_loss = ExactLossMean(args, shifts_labels, gather)
        self.examples_seen = 0
        self.batches_done = 0

    def get_batch_weight(self, inputs: Any) -> Any:
        """Return a batch's weight in the mean loss, to be read before a step, which may take labels out of it."""
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
        """Return the outputs of a batch in this process, as long as the longest ones of all processes.

        Parameters:
            samples: number of samples that the loss stands for. With each counted, the mean weighs batches by size.
            weight: the batch's weight in the mean loss.
            inputs: the model's main input, if metrics are computed with it.
        """
        if self.exact_loss is not None and loss is not None:
            self.exact_loss.add(loss, weight)
        rows, marks = find_batch_size(batch), self.sample_lists
        predictions = _align(predictions, marks.predictions, rows)
        labels, inputs = _align(labels, marks.labels, rows), _align(inputs, marks.inputs, rows)
        if predictions is not None and self.place.preprocess_logits_for_metrics is not None:
            with explain_metric_errors(self.place, (predictions, labels), "preprocess_logits_for_metrics"):
                predictions = self.place.preprocess_logits_for_metrics(predictions, labels)
        return BatchOutputs(None if loss is None else loss.repeat(samples), predictions, labels, inputs)

    def collect(self, batch: BatchOutputs) -> None:
        """Keep the outputs of a batch."""
        for collection, value in zip(self.collected, batch, strict=True):
            if value is not None:
                collection.add(value)

    def move_to_host_if_due(self) -> None:
        """Free the device's memory every `eval_accumulation_steps` batches."""
        every = self.args.eval_accumulation_steps
        if every and self.batches_done % every == 0:
            for collection in self.collected:
                collection.move_to_host()

    def update_streaming(self, own: BatchOutputs, rows: int | None) -> None:
        """Update the streaming metrics with a batch, without the samples that only fill up the last one.

        Parameters:
            rows: samples of the last batch in all processes; None for any other batch.
        """
        assert self.streaming is not None
        if own.predictions is None or own.labels is None:
            return
        if tensor_parallel_rank(self.args) > 0:
            # Another process has predicted the same samples.
            own = own.first_rows(0)
        elif rows is not None:
            # The samples of the last batch go to the processes one after the other, to each as many.
            size = find_batch_size(own.predictions) or 0
            own = own.first_rows(min(max(rows - data_parallel_rank(self.args) * size, 0), size))
        with explain_metric_errors(self.place):
            self.streaming.update(own.for_metrics(self.args.include_for_metrics))

    def results(self, batch_metrics: Any = None) -> tuple[BatchOutputs, dict[str, Any], float | None]:
        """Return all outputs, and the metrics and the mean loss of them; the latter are the same in all processes.

        Parameters:
            batch_metrics: the metrics, if a function was called with each batch.
        """
        everything = BatchOutputs(*(collection.arrays() for collection in self.collected))
        if self.order is not None:
            rows_read = self.examples_seen * data_parallel_size(self.args)
            everything = restore_dataset_order(everything, self.order[:rows_read])
        metrics: Any = batch_metrics or {}
        if self.streaming is not None:
            with explain_metric_errors(self.place):
                metrics = self.streaming.compute() if self.streaming.batches else {}
        # A function may fail in one process alone, and the others would wait for it.
        with raise_on_all_ranks("computing the metrics of an evaluation"):
            is_complete = everything.predictions is not None and everything.labels is not None
            is_due = self.place.compute_metrics is not None and self.streaming is None and batch_metrics is None
            if is_due and is_complete:
                metrics = call_metric_function(self.place, everything.for_metrics(self.args.include_for_metrics))
            metrics = check_metrics(self.place, metrics)
        # Which checkpoint is the best, and what a schedule follows, must be the same everywhere.
        metrics = broadcast_object(metrics)
        if self.exact_loss is not None:
            return everything, metrics, self.exact_loss.value()
        return everything, metrics, compute_sample_mean(everything.losses, self.args.logging_nan_inf_filter)


def _align(value: Any, sample_lists: SampleLists, rows: int | None) -> Any:
    """Return outputs of a batch with their lists of samples marked, as long as the longest ones of all processes."""
    return None if value is None else pad_across_processes(sample_lists.marked(value, rows), dim=1, fill=PADDING)


def restore_dataset_order(everything: BatchOutputs, order: np.ndarray) -> BatchOutputs:
    """Return the same in the dataset's order, of samples that were read in the order given.

    Raises:
        ValueError: something does not have one row for each sample.
    """

    def sorted_rows(rows: Any) -> Any:
        if np.ndim(rows) and len(rows) != len(order):
            raise ValueError(
                f"max_tokens_per_batch reads samples by length, and outputs with {len(rows)} rows cannot be put in the "
                f"order of {len(order)} samples. Return one row for each sample, or leave it out."
            )
        return rows[np.argsort(order)] if np.ndim(rows) else rows

    return BatchOutputs(*(map_nested(sorted_rows, value) for value in everything))


class EvaluationLoop(CollectedOutputs):
    """The loop of `evaluate()` and `predict()` over an evaluation or test set.

    Parameters:
        trainer: the Trainer whose model and metrics are used.
        dataloader: the batches.
        description: "Evaluation" or "Prediction"; a prediction keeps its outputs even with `batch_eval_metrics`.
        prediction_loss_only: collect nothing but the loss.
        ignore_keys: model outputs to leave out of the predictions.
        metric_key_prefix: prefix of the metrics' names.
        has_custom_step: the Trainer is of a class with its own `prediction_step`.
    """

    def __init__(
        self,
        trainer: Any,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool,
        ignore_keys: Sequence[str] | None,
        metric_key_prefix: str,
        has_custom_step: bool = False,
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
        self.loss_shifts_labels = trainer._loss_shifts_labels
        rows = get_length(get_full_dataset(dataloader)) if self.max_batches is None else None
        streaming = make_streaming_metrics(trainer.compute_metrics)
        super().__init__(trainer, trainer.args, rows, streaming, self.loss_shifts_labels, trainer.accelerator.gather)
        groups = find_length_groups(dataloader)
        self.order = None if groups is None else groups.order
        self.model: Any = None
        # The batch that is being predicted, for errors.
        self.batch: Any = None
        self._batch_metrics: dict[str, Any] = {}
        self._output: EvalLoopOutput | None = None

    def begin(self, model: Any) -> None:
        """Put model and optimizer into evaluation mode."""
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
        """Return the facts about the model's task."""
        trainer = self.trainer
        # A script's own step may return probabilities, and their sigmoid would be above one half throughout.
        keeps_scores = trainer.preprocess_logits_for_metrics is None and not self.has_custom_step
        return find_task_facts(trainer.model, self.loss_shifts_labels, keeps_scores, self.generates)

    def run(self) -> None:
        """Predict all batches."""
        with torch.no_grad():
            for batch in self.batches():
                self.step(batch)

    def batches(self) -> Iterator[Any]:
        """Yield the batches of the loader, which is first asked for an iterator when the first batch is due."""
        reads_itself = isinstance(self.dataloader, PrefetchLoader)
        batches = iter(self.dataloader) if reads_itself else iterate_batches(self.dataloader)
        yield from batches if self.max_batches is None else limit_batches(batches, self.max_batches)

    @property
    def num_batches(self) -> float:
        """Batches that the loop reads; infinity if that is not known."""
        number = get_length(self.dataloader) if self.max_batches is None else self.max_batches
        return float("inf") if number is None else number

    def step(self, batch: Any) -> BatchOutputs:
        """Predict a batch, gather its outputs from all processes and keep what is needed of them.

        Returns:
            the outputs of this process.
        """
        trainer, args = self.trainer, self.trainer.args
        trainer.preemption.raise_if_preempted()
        self.batch = batch
        samples = find_batch_size(batch)
        self.examples_seen += samples or 0
        is_end = isinstance(self.dataloader, PrefetchLoader) and self.dataloader.end_of_dataloader
        # Further rows of a last batch only fill it up; `gather_for_metrics` leaves them out.
        rows = self.dataloader.samples_in_last_batch() if is_end else None
        trainer.accelerator.samples_in_last_batch = rows
        try:
            weight = self.get_batch_weight(batch)
            loss, logits, labels = trainer.prediction_step(
                self.model, batch, self.prediction_loss_only, ignore_keys=self.ignore_keys
            )
            inputs = select_main_input(trainer.model, args.include_for_metrics, batch)
            inputs = None if inputs is None else trainer._prepare_input(inputs)
            loss_rows = args.eval_batch_size if self.order is None else samples or 0
            own = self.make_outputs(batch, loss_rows, loss, weight, logits, labels, inputs)
            everywhere = self._gather(own, rows)
        finally:
            trainer.accelerator.samples_in_last_batch = None
        if self.streaming is not None:
            self.update_streaming(own, rows)
        keeps_losses_only = args.batch_eval_metrics and not self.is_prediction
        self.collect(BatchOutputs(losses=everywhere.losses) if keeps_losses_only else everywhere)
        trainer.control = trainer.callback_handler.on_prediction_step(args, trainer.state, trainer.control)
        self.batches_done += 1
        if args.batch_eval_metrics and self.streaming is None:
            self._update_batch_metrics(
                everywhere._replace(inputs=batch), is_end or self.batches_done == self.max_batches
            )
        else:
            self.move_to_host_if_due()
        self.batch = None
        return own

    def _gather(self, own: BatchOutputs, rows: int | None) -> BatchOutputs:
        if self.streaming is not None and not self.is_prediction:
            # Nothing is kept of a batch but its loss, so nothing else has to travel.
            own = BatchOutputs(losses=own.losses)
        gather = self.trainer.gather_function
        found = BatchOutputs(*(None if value is None else gather(value) for value in own))
        if rows is None or self.args.world_size == 1:
            return found
        # A gather function such as Seq2SeqTrainer's keeps samples that only fill the batch up, which its loss counts.
        return found.first_rows(rows)._replace(losses=found.losses)

    def _update_batch_metrics(self, batch: BatchOutputs, is_last: bool) -> None:
        if self.trainer.compute_metrics is not None and batch.predictions is not None and batch.labels is not None:
            prediction = batch.for_metrics(self.args.include_for_metrics)
            self._batch_metrics = call_metric_function(self.trainer, prediction, compute_result=is_last)

    def find_sample_indices(self, batch: Any) -> list[int] | None:
        """Return places in the dataset of the samples in the batch that was predicted last.

        None if they are not known: the samples are in another order, or several processes share them.
        """
        sampler = getattr(self.dataloader, "sampler", None)
        if not isinstance(sampler, SequentialSampler) or self.trainer.args.world_size > 1:
            return None
        places = range(self.examples_seen - (find_batch_size(batch) or 0), self.examples_seen)
        return list(places) if self.order is None else [int(self.order[place]) for place in places]

    def finish(self) -> EvalLoopOutput:
        """Compute the metrics over all batches and name them; once, however often it is called."""
        if self._output is not None:
            return self._output
        trainer, prefix = self.trainer, f"{self.prefix}_"
        if trainer.is_fsdp_enabled:
            # What forward passes have gathered takes memory, and hides from scripts that the model is sharded.
            reshard_gathered(trainer.model)
        if self.batches_done == 0 and isinstance(getattr(self.dataloader, "dataset", None), IterableDataset):
            name = "test" if self.is_prediction else "evaluation"
            raise ValueError(
                f"The {name} set is a stream that gave no batch. Check how it was filtered; a generator can be read "
                "only once, and dataloader_drop_last=True leaves out a short last batch."
            )
        everything, metrics, mean_loss = self.results(self._batch_metrics if self.args.batch_eval_metrics else None)
        if mean_loss is not None:
            metrics[prefix + "loss"] = mean_loss
        if trainer.model_preparation_time is not None:
            metrics[prefix + "model_preparation_time"] = trainer.model_preparation_time
        named = {name: value for name, value in metrics.items() if name.startswith(prefix)}
        named |= {prefix + name: value for name, value in metrics.items() if not name.startswith(prefix)}
        self._output = EvalLoopOutput(everything.predictions, everything.labels, named, self._num_samples())
        return self._output

    def _num_samples(self) -> int:
        of_dataset = get_length(get_full_dataset(self.dataloader))
        if self.max_batches is not None:
            read = self.examples_seen * data_parallel_size(self.args)
            number = read if of_dataset is None else min(read, of_dataset)
        elif of_dataset is not None:
            number = of_dataset
        else:
            number = self.trainer.num_examples(self.dataloader) if has_length(self.dataloader) else 0
        return number or self.examples_seen
