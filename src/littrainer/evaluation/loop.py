"""One pass over an evaluation or test set: what happens at each batch, and what comes out at the end.

Lightning drives the pass; each batch arrives at `EvaluationPass.step`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import IterableDataset, SequentialSampler

from littrainer.callbacks.progress import label_of, name_evaluation
from littrainer.data.limits import limited_number
from littrainer.data.loaders import LookaheadLoader, first_dimension, has_length, whole_dataset
from littrainer.data.sharding import length_of
from littrainer.data.stream_end import check_equal_lengths
from littrainer.data.token_batches import length_groups_of
from littrainer.distributed.agreement import failing_together, from_first
from littrainer.distributed.layout import data_parallel_rank, data_parallel_size, tensor_parallel_rank
from littrainer.errors.nested_values import PADDING, map_nested, truncated
from littrainer.evaluation.gathering import BatchCollection
from littrainer.evaluation.metrics import MetricPlace, call_metric_function, checked_metrics, noting_where
from littrainer.evaluation.prediction import ExactLossMean, mean_over_samples
from littrainer.evaluation.results import EvalLoopOutput, EvalPrediction
from littrainer.evaluation.streaming import StreamingMetrics, TaskFacts, facts_of_task, streaming_metrics
from littrainer.model.traversal import eval_all
from littrainer.strategies.shards import free_gathered

logger = logging.getLogger(__name__)


class BatchOutputs(NamedTuple):
    """What there is of a batch, or of all of them; None if it is not there or not asked for."""

    losses: Any = None
    predictions: Any = None
    labels: Any = None
    inputs: Any = None

    def first_rows(self, number: int) -> BatchOutputs:
        """Return the same with no more than so many samples."""
        return BatchOutputs(*(None if value is None else truncated(value, number) for value in self))

    def for_metrics(self, wanted: Sequence[str]) -> EvalPrediction:
        """Return what a metric function is given, with what `include_for_metrics` wants."""
        losses, inputs = self.losses if "loss" in wanted else None, self.inputs if "inputs" in wanted else None
        return EvalPrediction(predictions=self.predictions, label_ids=self.labels, losses=losses, inputs=inputs)


def main_inputs(model: Any, wanted: Sequence[str], inputs: Any) -> Any:
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
    """What an evaluation keeps of its batches, and what it computes of that at the end.

    Parameters:
        args: training arguments.
        rows: how many there will be, if that is known.
        streaming: metrics that are updated batch by batch; None if `compute_metrics` is a function or absent.
        shifts_labels: the loss compares each label with the prediction one position before.
        gather: puts rows of all processes together.
    """

    def __init__(
        self,
        args: Any,
        rows: int | None,
        streaming: StreamingMetrics | None,
        shifts_labels: bool,
        gather: Callable[[Any], Any],
    ):
        self.args = args
        self.streaming = streaming
        self.collected = BatchOutputs(
            *(BatchCollection(args.eval_do_concat_batches, rows) for _ in BatchOutputs._fields)
        )
        # Places in the dataset of the samples, in the order in which they are read; None if they are read in its own.
        self.order: np.ndarray | None = None
        self.examples_seen = 0
        self.exact_loss: ExactLossMean | None = None
        if args.eval_loss_weighting != "batches":
            self.exact_loss = ExactLossMean(args, shifts_labels, gather)
        self.batches_done = 0

    def collect(self, batch: BatchOutputs) -> None:
        """Keep what there is of a batch."""
        for collection, value in zip(self.collected, batch, strict=True):
            if value is not None:
                collection.add(value)

    def move_to_host_if_due(self) -> None:
        """Free the device's memory every `eval_accumulation_steps` batches."""
        every = self.args.eval_accumulation_steps
        if every and self.batches_done % every == 0:
            for collection in self.collected:
                collection.move_to_host()

    def update_streaming(self, place: MetricPlace, own: BatchOutputs, rows: int | None) -> None:
        """Hand a batch to the metrics, without the samples that only fill up the last one.

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
            size = first_dimension(own.predictions) or 0
            own = own.first_rows(min(max(rows - data_parallel_rank(self.args) * size, 0), size))
        with noting_where(place):
            self.streaming.update(own.for_metrics(self.args.include_for_metrics))

    def results(self, place: MetricPlace, of_batches: Any = None) -> tuple[BatchOutputs, dict[str, Any], float | None]:
        """Everything that was kept, and the metrics and the mean loss of it; the latter are the same in all processes.

        Parameters:
            of_batches: the metrics, if a function was called with each batch.
        """
        everything = BatchOutputs(*(collection.arrays() for collection in self.collected))
        if self.order is not None:
            rows_read = self.examples_seen * data_parallel_size(self.args)
            everything = in_datasets_order(everything, self.order[:rows_read])
        is_complete = everything.predictions is not None and everything.labels is not None
        metrics: Any = of_batches or {}
        if self.streaming is not None:
            with noting_where(place):
                metrics = self.streaming.compute() if self.streaming.batches else {}
        # A function may fail in one process alone, and the others would wait for it.
        with failing_together("computing the metrics of an evaluation"):
            is_due = place.compute_metrics is not None and self.streaming is None and of_batches is None
            if is_due and is_complete:
                metrics = call_metric_function(place, everything.for_metrics(self.args.include_for_metrics))
            metrics = checked_metrics(place, metrics)
        # Which checkpoint is the best, and what a schedule follows, must be the same everywhere.
        metrics = from_first(metrics)
        if self.exact_loss is not None:
            return everything, metrics, self.exact_loss.value()
        return everything, metrics, mean_over_samples(everything.losses, self.args.logging_nan_inf_filter)


def in_datasets_order(everything: BatchOutputs, order: np.ndarray) -> BatchOutputs:
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


class EvaluationPass(CollectedOutputs):
    """The state of one pass over an evaluation or test set.

    Parameters:
        trainer: the Trainer whose model and metrics are used.
        dataloader: the batches.
        description: "Evaluation" or "Prediction"; a prediction keeps its outputs even with `batch_eval_metrics`.
        prediction_loss_only: collect nothing but the loss.
        ignore_keys: model outputs to leave out of the predictions.
        metric_key_prefix: prefix of the metrics' names.
    """

    def __init__(
        self,
        trainer: Any,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool,
        ignore_keys: Sequence[str] | None,
        metric_key_prefix: str,
        has_own_step: bool = False,
    ):
        self.trainer = trainer
        self.has_own_step = has_own_step
        self.loss_shifts_labels = trainer._loss_shifts_labels
        self.dataloader = dataloader
        self.description = description
        self.is_prediction = description == "Prediction"
        self.prediction_loss_only = prediction_loss_only
        self.ignore_keys = ignore_keys
        self.prefix = metric_key_prefix
        purpose = "prediction" if self.is_prediction else "evaluation"
        self.limit_of_batches = limited_number(trainer, purpose, dataloader)
        rows = length_of(whole_dataset(dataloader)) if self.limit_of_batches is None else None
        streaming = streaming_metrics(trainer.compute_metrics)
        super().__init__(trainer.args, rows, streaming, self.loss_shifts_labels, trainer.accelerator.gather)
        groups = length_groups_of(dataloader)
        self.order = None if groups is None else groups.order
        self.metrics: dict[str, Any] | None = None
        self.model: Any = None
        self._output: EvalLoopOutput | None = None

    def begin(self, model: Any) -> None:
        """Put model and optimizer into evaluation mode."""
        trainer, self.model = self.trainer, model
        if callable(getattr(trainer.model, "eval", None)):
            eval_all(trainer.model)
        if callable(getattr(trainer.optimizer, "eval", None)):
            trainer.optimizer.eval()
        trainer.callback_handler.eval_dataloader = self.dataloader
        generates = bool(getattr(trainer.args, "predict_with_generate", False))
        name_evaluation(trainer.callback_handler.callbacks, label_of(self.prefix, generates))
        what = "prediction data" if self.is_prediction else "evaluation data"
        call = f"{self.description.lower()} with metric_key_prefix={self.prefix!r}"
        check_equal_lengths(self.dataloader, what, call)
        logger.info(f"\n***** Running {self.description} *****")
        has_number = has_length(self.dataloader)
        logger.info(f"  Num examples{f' = {trainer.num_examples(self.dataloader)}' if has_number else ': Unknown'}")
        logger.info(f"  Batch size = {trainer.args.eval_batch_size}")
        if self.streaming is not None:
            self.streaming.begin(trainer.args.device, self.task_facts)

    def task_facts(self) -> TaskFacts:
        """Return what is known of the task of the model."""
        trainer = self.trainer
        return facts_of_task(
            trainer.model,
            self.loss_shifts_labels,
            # A script's own step may return probabilities, and their sigmoid would be above one half throughout.
            keeps_scores=trainer.preprocess_logits_for_metrics is None and not self.has_own_step,
            generates=bool(getattr(trainer.args, "predict_with_generate", False)),
        )

    def step(self, inputs: Any) -> BatchOutputs:
        """Predict one batch and collect what is asked for, from all processes.

        Returns:
            what this process has for the batch.
        """
        trainer, args = self.trainer, self.trainer.args
        self.examples_seen += first_dimension(inputs) or 0
        ends_here = isinstance(self.dataloader, LookaheadLoader) and self.dataloader.end_of_dataloader
        # Further rows that a last batch has only fill it up; `gather_for_metrics` leaves them out.
        rows = self.dataloader.samples_in_last_batch() if ends_here else None
        is_last = ends_here or self.batches_done + 1 == self.limit_of_batches
        trainer.accelerator.samples_in_last_batch = rows
        own = self._predicted(inputs)
        everywhere = self._gathered(own)
        trainer.accelerator.samples_in_last_batch = None
        if self.streaming is not None:
            self.update_streaming(trainer, own, rows)
        keeps_losses_only = args.batch_eval_metrics and not self.is_prediction
        self.collect(BatchOutputs(losses=everywhere.losses) if keeps_losses_only else everywhere)
        trainer.control = trainer.callback_handler.on_prediction_step(args, trainer.state, trainer.control)

        self.batches_done += 1
        if args.batch_eval_metrics and self.streaming is None:
            self._update_batch_metrics(everywhere._replace(inputs=inputs), is_last)
        else:
            self.move_to_host_if_due()
        return own

    @property
    def number_of_batches(self) -> float:
        """Batches that the pass reads; infinity if that is not known."""
        number = length_of(self.dataloader) if self.limit_of_batches is None else self.limit_of_batches
        return float("inf") if number is None else number

    def places_of(self, batch: Any) -> list[int] | None:
        """Return places in the dataset of the samples in the batch that was predicted last.

        None if they are not known: the samples are in another order, or several processes share them.
        """
        sampler = getattr(self.dataloader, "sampler", None)
        if not isinstance(sampler, SequentialSampler) or self.trainer.args.world_size > 1:
            return None
        size = first_dimension(batch) or 0
        places = range(self.examples_seen - size, self.examples_seen)
        return list(places) if self.order is None else [int(self.order[place]) for place in places]

    def finish(self) -> EvalLoopOutput:
        """Compute the metrics over all batches and name them; once, however often it is called."""
        if self._output is None:
            self._output = self._finished()
        return self._output

    def _finished(self) -> EvalLoopOutput:
        trainer = self.trainer
        if trainer.is_fsdp_enabled:
            # What forward passes have gathered takes memory, and hides from scripts that the model is sharded.
            free_gathered(trainer.model)
        if self.batches_done == 0 and isinstance(getattr(self.dataloader, "dataset", None), IterableDataset):
            name = "test" if self.is_prediction else "evaluation"
            raise ValueError(
                f"The {name} set is a stream that gave no batch. Check how it was filtered; a generator can be read "
                "only once, and dataloader_drop_last=True leaves out a short last batch."
            )
        of_batches = (self.metrics or {}) if self.args.batch_eval_metrics else None
        (_, predictions, labels, _), metrics, mean_loss = self.results(trainer, of_batches)
        if mean_loss is not None:
            metrics[f"{self.prefix}_loss"] = mean_loss
        if trainer.model_preparation_time is not None:
            metrics[f"{self.prefix}_model_preparation_time"] = trainer.model_preparation_time
        return EvalLoopOutput(predictions, labels, self._prefixed(metrics), self._num_samples())

    def _predicted(self, inputs: Any) -> BatchOutputs:
        """Return what this process has for a batch, as long as the longest that any process has."""
        trainer, exact = self.trainer, self.exact_loss
        weight = 0 if exact is None else exact.weight_of(inputs)
        loss, logits, labels = trainer.prediction_step(
            self.model, inputs, self.prediction_loss_only, ignore_keys=self.ignore_keys
        )
        if exact is not None and loss is not None:
            exact.add(loss, weight)
        # A batch's mean loss stands once for each of its samples, so that the mean over all weighs batches by size.
        size = trainer.args.eval_batch_size if self.order is None else first_dimension(inputs) or 0
        losses = None if loss is None else loss.repeat(size)
        found = main_inputs(trainer.model, trainer.args.include_for_metrics, inputs)
        if found is not None:
            found = self._padded(trainer._prepare_input(found))
        labels, logits = self._padded(labels), self._padded(logits)
        if logits is not None and trainer.preprocess_logits_for_metrics is not None:
            with noting_where(trainer, (logits, labels), "preprocess_logits_for_metrics"):
                logits = trainer.preprocess_logits_for_metrics(logits, labels)
        return BatchOutputs(losses, logits, labels, found)

    def _padded(self, value: Any) -> Any:
        if value is None:
            return None
        return self.trainer.accelerator.pad_across_processes(value, dim=1, pad_index=PADDING)

    def _gathered(self, own: BatchOutputs) -> BatchOutputs:
        if self.streaming is not None and not self.is_prediction:
            # Nothing is kept of a batch but its loss, so nothing else has to travel.
            own = BatchOutputs(losses=own.losses)
        gather = self.trainer.gather_function
        return BatchOutputs(*(None if value is None else gather(value) for value in own))

    def _update_batch_metrics(self, batch: BatchOutputs, is_last: bool) -> None:
        if self.trainer.compute_metrics is not None and batch.predictions is not None and batch.labels is not None:
            prediction = batch.for_metrics(self.trainer.args.include_for_metrics)
            self.metrics = call_metric_function(self.trainer, prediction, compute_result=is_last)

    def _prefixed(self, metrics: dict[str, Any]) -> dict[str, Any]:
        prefix = f"{self.prefix}_"
        named = {name: value for name, value in metrics.items() if name.startswith(prefix)}
        named.update({prefix + name: value for name, value in metrics.items() if not name.startswith(prefix)})
        return named

    def _num_samples(self) -> int:
        of_dataset = length_of(whole_dataset(self.dataloader))
        if self.limit_of_batches is not None:
            read = self.examples_seen * data_parallel_size(self.trainer.args)
            number = read if of_dataset is None else min(read, of_dataset)
        elif of_dataset is not None:
            number = of_dataset
        else:
            number = self.trainer.num_examples(self.dataloader) if has_length(self.dataloader) else 0
        return number or self.examples_seen
