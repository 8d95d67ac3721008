"""The loop of `evaluate()` and `predict()` over the batches of a dataset."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

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
from littrainer.distributed.layout import data_parallel_size
from littrainer.evaluation.gathering import BatchOutputs, OutputCollector, select_main_input
from littrainer.evaluation.metrics import call_metric_function
from littrainer.evaluation.results import EvalLoopOutput
from littrainer.evaluation.streaming import find_task_facts, make_streaming_metrics
from littrainer.strategies.full_state import reshard_gathered

logger = logging.getLogger(__name__)


class EvaluationLoop(OutputCollector):
    """Loop of `evaluate()` and `predict()`: `begin`, `step` for each batch, and `finish`.

    Parameters:
        description: "Evaluation" or "Prediction"; a prediction keeps its outputs even with `batch_eval_metrics`, since
            `predict()` returns them.
        overrides_prediction_step: the Trainer's class or instance overrides `prediction_step`.
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
        overrides_prediction_step: bool,
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
        self.overrides_prediction_step = overrides_prediction_step
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
        trainer.session.eval_loss_terms.clear()
        for part in (trainer.model, trainer.optimizer):
            if callable(getattr(part, "eval", None)):
                part.eval()
        trainer.callback_handler.eval_dataloader = self.dataloader
        generates = bool(getattr(trainer.args, "predict_with_generate", False))
        label_evaluation_bar(trainer.callback_handler.callbacks, get_progress_label(self.prefix, generates))
        data = "prediction data" if self.is_prediction else "evaluation data"
        check_equal_lengths(self.dataloader, data, f"{self.description.lower()} with metric_key_prefix={self.prefix!r}")
        logger.info(f"\n***** Running {self.description} *****")
        has_number = has_length(self.dataloader)
        logger.info(f"  Num examples{f' = {trainer.num_examples(self.dataloader)}' if has_number else ': Unknown'}")
        logger.info(f"  Batch size = {trainer.args.eval_batch_size}")
        if self.streaming is not None:
            # A script's own functions may return probabilities, which a second sigmoid would raise to at least 0.5.
            has_raw_scores = trainer.preprocess_logits_for_metrics is None and not self.overrides_prediction_step
            self.streaming.begin(
                trainer.args.device,
                lambda: find_task_facts(trainer.model, self.loss_shifts_labels, has_raw_scores, generates),
            )

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
        trainer, args = self.trainer, self.args
        trainer.session.preemption.raise_if_preempted()
        self.batch = batch
        samples = find_batch_size(batch)
        self.samples_read += samples or 0
        is_end = isinstance(self.dataloader, PrefetchLoader) and self.dataloader.end_of_dataloader
        # `gather_for_metrics` drops the padding rows of the last batch.
        rows = self.dataloader.samples_in_last_batch() if is_end else None
        trainer.accelerator.samples_in_last_batch = rows
        try:
            # Computed before the step, which may remove labels.
            weight = self.get_batch_weight(batch)
            # Set here, since an overridden prediction_step may call compute_loss itself.
            trainer.session.needs_logits = not self.prediction_loss_only
            loss, logits, labels = trainer.prediction_step(
                self.model, batch, self.prediction_loss_only, ignore_keys=self.ignore_keys
            )
            inputs = select_main_input(trainer.model, args.include_for_metrics, batch)
            inputs = None if inputs is None else self.move_input(inputs)
            # As in transformers, the loss is repeated for each sample of a full batch; later, `gather_for_metrics`
            # shortens the last batch. Batches grouped by length differ in size, so their own sizes are used.
            loss_rows = args.eval_batch_size if self.order is None else samples or 0
            outputs = self.make_outputs(batch, loss_rows, loss, weight, logits, labels, inputs)
            is_kept = self.streaming is None or self.is_prediction
            gathered = (outputs if is_kept else BatchOutputs(outputs.losses)).map(trainer.gather_function)
        finally:
            trainer.session.needs_logits = False
            trainer.accelerator.samples_in_last_batch = None
        if rows is not None and args.world_size > 1:
            # Seq2SeqTrainer's gather function keeps padding samples; as in transformers, its mean loss includes them.
            gathered = gathered.first_rows(rows)._replace(losses=gathered.losses)
        if self.streaming is not None:
            self.update_streaming(outputs, rows)
        self.collect(BatchOutputs(gathered.losses) if args.batch_eval_metrics and not self.is_prediction else gathered)
        trainer.control = trainer.callback_handler.on_prediction_step(args, trainer.state, trainer.control)
        self.batches_done += 1
        if not args.batch_eval_metrics or self.streaming is not None:
            self.move_to_host_if_due()
        elif trainer.compute_metrics is not None and gathered.has_predictions_and_labels:
            # As in transformers, `inputs` is then the whole batch of this process.
            prediction = gathered._replace(inputs=batch).make_prediction(args.include_for_metrics)
            is_last = is_end or self.batches_done == self.max_batches
            self._batch_metrics = call_metric_function(trainer, prediction, compute_result=is_last)
        self.batch = None
        return outputs

    def find_sample_indices(self, batch: Any) -> list[int] | None:
        """Return the dataset indices of the batch read last; None if shuffled or with several processes."""
        sampler = getattr(self.dataloader, "sampler", None)
        if not isinstance(sampler, SequentialSampler) or self.args.world_size > 1:
            return None
        positions = range(self.samples_read - (find_batch_size(batch) or 0), self.samples_read)
        return list(positions) if self.order is None else self.order[list(positions)].tolist()

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
        if trainer.args.log_loss_terms:
            metrics = {**trainer.session.eval_loss_terms.take(trainer.args.device), **metrics}
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
