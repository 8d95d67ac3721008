"""One loader's evaluation in a lightning.Trainer: what is kept of its batches, and the metrics at its end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from littrainer.arguments.choices import SaveStrategy
from littrainer.data.loaders import LookaheadLoader, first_dimension, has_length, whole_dataset
from littrainer.evaluation.gathering import BatchCollection
from littrainer.evaluation.metrics import call_metric_function, checked_metrics, noting_where
from littrainer.evaluation.prediction import ExactLossMean, mean_over_samples
from littrainer.evaluation.results import EvalPrediction
from littrainer.evaluation.streaming import StreamingMetrics, facts_of_task
from littrainer.nested_values import PADDING, truncated
from littrainer.processes.agreement import failing_together, from_first
from littrainer.processes.collectives import gathered, padded_to_longest, process_count

if TYPE_CHECKING:
    from littrainer.plain_lightning.module import TransformersModule


class EvaluationRound:
    """What is kept of the batches of one loader, in all processes.

    Parameters:
        module: the module whose metrics are computed.
        loader: the batches' loader.
        streaming: metrics that are updated batch by batch; None where `compute_metrics` is a function or absent.
    """

    def __init__(self, module: TransformersModule, loader: Any, streaming: StreamingMetrics | None):
        self.module = module
        self.args = module.args
        # That of a TrainerDataModule knows which rows of a last batch only fill it up.
        loader = getattr(loader, "loader", loader)
        self.loader = loader if isinstance(loader, LookaheadLoader) else None
        self.streaming = streaming
        self.settings = module.loss_settings
        self._gather: Callable[[Any], Any] = partial(gathered, copies=self.settings.tensor_parallel_size)
        dataset = whole_dataset(loader) if hasattr(loader, "dataset") else None
        expected_rows = len(dataset) if has_length(dataset) else None
        join = self.args.eval_do_concat_batches
        self.losses, self.predictions, self.labels, self.inputs = (
            BatchCollection(join, expected_rows) for _ in range(4)
        )
        self.exact_loss: ExactLossMean | None = None
        if self.args.eval_loss_weighting != "batches":
            self.exact_loss = ExactLossMean(self.args, self.settings.shifts_labels, self._gather)
        self.batches_done = 0
        if streaming is not None:
            streaming.begin(module.device, self._facts)

    @property
    def needs_predictions(self) -> bool:
        """Whether metrics are computed from predictions."""
        return self.module.compute_metrics is not None and not self.args.prediction_loss_only

    def add(self, inputs: dict[str, Any], loss: Any, predictions: Any, labels: Any) -> None:
        """Take in what this process has for a batch."""
        size = first_dimension(inputs) or 1
        rows = self._rows_of_last_batch(inputs)
        if loss is not None:
            if self.exact_loss is not None:
                self.exact_loss.add(loss, self.exact_loss.weight_of(inputs))
            # A batch's mean loss stands once for each of its samples.
            self.losses.add(self._cut(self._gather(loss.detach().reshape(1).repeat(self._full_size(size))), rows))
        if self.needs_predictions and predictions is not None:
            self._keep(inputs, loss, predictions, labels, size, rows)
        self.batches_done += 1
        every = self.args.eval_accumulation_steps
        if every and self.batches_done % every == 0:
            for collection in (self.losses, self.predictions, self.labels, self.inputs):
                collection.move_to_host()

    def finish(self) -> dict[str, Any]:
        """The loss and the metrics of all batches, by their names without prefix; the same in all processes."""
        predictions, labels, inputs, losses = (
            collection.arrays() for collection in (self.predictions, self.labels, self.inputs, self.losses)
        )
        place = self._place()
        metrics: Any = {}
        if self.streaming is not None:
            with noting_where(place):
                metrics = self.streaming.compute() if self.streaming.batches else {}
            # Some keep all predictions of an evaluation, on the device.
            self.streaming.reset()
        with failing_together("computing the metrics of an evaluation"):
            if self.streaming is None and predictions is not None and labels is not None:
                metrics = call_metric_function(place, self._for_metrics(predictions, labels, inputs, losses))
            metrics = checked_metrics(place, metrics)
        metrics = from_first(metrics)
        if self.exact_loss is not None:
            mean = self.exact_loss.value()
        else:
            mean = mean_over_samples(losses, self.args.logging_nan_inf_filter)
        return metrics if mean is None else {**metrics, "loss": mean}

    def _keep(
        self, inputs: dict[str, Any], loss: Any, predictions: Any, labels: Any, size: int, rows: int | None
    ) -> None:
        main_inputs = self._padded(self._main_inputs(inputs))
        labels, predictions = self._padded(labels), self._padded(predictions)
        if self.module.preprocess_logits_for_metrics is not None:
            predictions = self.module.preprocess_logits_for_metrics(predictions, labels)
        losses = None if loss is None else loss.detach().reshape(1).repeat(size)
        own = (predictions, labels, main_inputs, losses)
        streaming = self.streaming
        if streaming is not None and labels is None:
            return
        everywhere = own
        if streaming is None or streaming.needs_all_processes:
            everywhere = tuple(None if value is None else self._cut(self._gather(value), rows) for value in own)  # type: ignore[assignment]
        if streaming is None:
            collections = (self.predictions, self.labels, self.inputs)
            for collection, value in zip(collections, everywhere[:3], strict=True):
                if value is not None:
                    collection.add(value)
            return
        real = self._own_rows(size, rows)
        own = tuple(None if value is None else self._cut(value, real) for value in own)  # type: ignore[assignment]
        with noting_where(self._place()):
            streaming.update(self._for_metrics(*own), self._for_metrics(*everywhere))

    def _own_rows(self, size: int, rows: int | None) -> int | None:
        """How many rows of a batch are this process's own: not another's too, and not there to fill it up."""
        copies, rank = self.settings.tensor_parallel_size, self.module.rank
        if rank % copies:
            return 0
        return None if rows is None else min(max(rows - rank // copies * size, 0), size)

    def _rows_of_last_batch(self, inputs: Any) -> int | None:
        if self.loader is None or not self.loader.end_of_dataloader:
            return None
        return self.loader.samples_in_last_batch(inputs)

    def _full_size(self, size: int) -> int:
        """How often the loss of a batch counts: a short last one of TrainerDataModule as a full one that is cut off."""
        batch_size = None if self.loader is None else self.loader.batch_size
        return size if batch_size is None else batch_size

    def _main_inputs(self, inputs: dict[str, Any]) -> Any:
        if "inputs" not in self.args.include_for_metrics:
            return None
        name = getattr(self.module.model, "main_input_name", "input_ids")
        if name not in inputs:
            raise ValueError(
                f"include_for_metrics has 'inputs', and the batch has no {name!r} but {', '.join(inputs)}; set "
                "main_input_name of the model to one of these."
            )
        return inputs[name]

    def _for_metrics(self, predictions: Any, labels: Any, inputs: Any, losses: Any) -> EvalPrediction:
        wanted = self.args.include_for_metrics
        return EvalPrediction(
            predictions=predictions,
            label_ids=labels,
            losses=losses if "loss" in wanted else None,
            inputs=inputs if "inputs" in wanted else None,
        )

    def _facts(self) -> Any:
        module = self.module
        return facts_of_task(
            module.model,
            self.settings.shifts_labels,
            keeps_scores=module.preprocess_logits_for_metrics is None and not module.has_own_prediction_outputs,
            generates=module.generates,
        )

    def _place(self) -> Any:
        """Where metrics are computed, for their errors: an `evaluation.metrics.MetricPlace`."""
        trainer = self.module.trainer
        return SimpleNamespace(
            compute_metrics=self.module.compute_metrics,
            is_in_train=trainer.state.fn == "fit",
            # Lightning's checkpoints hold no metrics as JSON.
            args=SimpleNamespace(save_strategy=SaveStrategy.NO),
            state=SimpleNamespace(global_step=trainer.global_step, max_steps=trainer.max_steps),
        )

    @staticmethod
    def _padded(value: Any) -> Any:
        if value is None or process_count() == 1:
            return value
        return padded_to_longest(value, dim=1, fill=PADDING)

    @staticmethod
    def _cut(value: Any, rows: int | None) -> Any:
        return value if rows is None else truncated(value, rows)
