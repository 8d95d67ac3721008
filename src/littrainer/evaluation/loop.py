"""One pass over an evaluation or test set: what happens at each batch, and what comes out at the end.

Lightning drives the pass; each batch arrives at `EvaluationPass.step`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from littrainer.data.loaders import LookaheadLoader, count_examples, first_dimension, has_length
from littrainer.evaluation.gathering import BatchCollection, truncated
from littrainer.evaluation.results import EvalLoopOutput, EvalPrediction, denumpify_detensorize
from littrainer.model_wrapping import wrapped_model

if TYPE_CHECKING:
    from littrainer.trainer import Trainer


# Argument -> what the whole model is cast to for an evaluation outside of training.
FULL_EVALUATION_TYPES = {"fp16_full_eval": torch.float16, "bf16_full_eval": torch.bfloat16}


class EvaluationPass:
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
        trainer: Trainer,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool,
        ignore_keys: Sequence[str] | None,
        metric_key_prefix: str,
    ):
        self.trainer = trainer
        self.dataloader = dataloader
        self.is_prediction = description == "Prediction"
        self.prediction_loss_only = prediction_loss_only
        self.ignore_keys = ignore_keys
        self.prefix = metric_key_prefix
        join = trainer.args.eval_do_concat_batches
        self.losses, self.predictions, self.labels, self.inputs = (BatchCollection(join) for _ in range(4))
        self.metrics: dict[str, Any] | None = None
        self.batches_done = 0
        self.examples_seen = 0
        self.model: Any = trainer.model

    def begin(self) -> None:
        """Put the model on its device, and model and optimizer into evaluation mode.

        Outside of training the model is cast as `bf16_full_eval` and `fp16_full_eval` ask, and stays that way.
        """
        trainer = self.trainer
        if not trainer._model_is_prepared:
            started = time.time()
            trainer._move_model_to_device(trainer.model, trainer.args.device)
            self.model = trainer.model_wrapped = wrapped_model(trainer)
            trainer.model_preparation_time = round(time.time() - started, 4)
            trainer._model_is_prepared = True
        if not trainer.is_in_train:
            for name, dtype in FULL_EVALUATION_TYPES.items():
                if getattr(trainer.args, name):
                    trainer.model.to(dtype=dtype, device=trainer.args.device)
        for candidate in (trainer.model, trainer.optimizer):
            if callable(getattr(candidate, "eval", None)):
                candidate.eval()
        trainer.callback_handler.eval_dataloader = self.dataloader

    def step(self, inputs: Any) -> None:
        """Predict one batch and collect what is asked for."""
        trainer, args = self.trainer, self.trainer.args
        self.examples_seen += first_dimension(inputs) or 0
        loss, logits, labels = trainer.prediction_step(
            self.model, inputs, self.prediction_loss_only, ignore_keys=self.ignore_keys
        )
        main_inputs = None
        if "inputs" in args.include_for_metrics:
            name = getattr(trainer.model, "main_input_name", "input_ids")
            if name not in inputs:
                raise ValueError(
                    f"include_for_metrics has 'inputs', and the batch has no {name!r} but {', '.join(inputs)}; set "
                    "main_input_name of the model to one of these."
                )
            main_inputs = trainer._prepare_input(inputs[name])

        is_last = isinstance(self.dataloader, LookaheadLoader) and self.dataloader.end_of_dataloader
        rows = self.dataloader.samples_in_last_batch(inputs) if is_last else None
        if loss is not None:
            # A batch's mean loss stands once for each of its samples, so that the mean over all weighs batches by size.
            loss = loss.repeat(rows or args.eval_batch_size)
            self.losses.add(loss)
        if rows:
            logits, labels, main_inputs = (
                None if value is None else truncated(value, rows) for value in (logits, labels, main_inputs)
            )
        if logits is not None and trainer.preprocess_logits_for_metrics is not None:
            logits = trainer.preprocess_logits_for_metrics(logits, labels)
        if not args.batch_eval_metrics or self.is_prediction:
            for collection, value in (
                (self.inputs, main_inputs),
                (self.predictions, logits),
                (self.labels, labels),
            ):
                if value is not None:
                    collection.add(value)
        trainer.control = trainer.callback_handler.on_prediction_step(args, trainer.state, trainer.control)

        self.batches_done += 1
        if args.batch_eval_metrics:
            self._update_batch_metrics(loss, logits, labels, inputs, is_last)
        elif args.eval_accumulation_steps and self.batches_done % args.eval_accumulation_steps == 0:
            for collection in (self.losses, self.predictions, self.labels, self.inputs):
                collection.move_to_host()

    def finish(self) -> EvalLoopOutput:
        """Compute the metrics over all batches and name them."""
        trainer, args = self.trainer, self.trainer.args
        losses, predictions = self.losses.arrays(), self.predictions.arrays()
        labels, inputs = self.labels.arrays(), self.inputs.arrays()
        metrics = self.metrics or {}
        is_complete = predictions is not None and labels is not None
        if trainer.compute_metrics is not None and is_complete and not args.batch_eval_metrics:
            metrics = self._checked(
                trainer.compute_metrics(
                    EvalPrediction(
                        predictions=predictions,
                        label_ids=labels,
                        losses=losses if "loss" in args.include_for_metrics else None,
                        inputs=inputs if "inputs" in args.include_for_metrics else None,
                    )
                )
            )
        metrics = denumpify_detensorize(dict(metrics))
        mean_loss = self._mean_loss(losses)
        if mean_loss is not None:
            metrics[f"{self.prefix}_loss"] = mean_loss
        if trainer.model_preparation_time is not None:
            metrics[f"{self.prefix}_model_preparation_time"] = trainer.model_preparation_time
        return EvalLoopOutput(predictions, labels, self._prefixed(metrics), self._num_samples())

    def _update_batch_metrics(self, loss: Any, logits: Any, labels: Any, inputs: Any, is_last: bool) -> None:
        trainer, wanted = self.trainer, self.trainer.args.include_for_metrics
        if trainer.compute_metrics is None or logits is None or labels is None:
            return
        self.metrics = trainer.compute_metrics(
            EvalPrediction(
                predictions=logits,
                label_ids=labels,
                losses=loss if "loss" in wanted else None,
                inputs=inputs if "inputs" in wanted else None,
            ),
            compute_result=is_last,
        )

    def _prefixed(self, metrics: dict[str, Any]) -> dict[str, Any]:
        prefix = f"{self.prefix}_"
        named = {name: value for name, value in metrics.items() if name.startswith(prefix)}
        named.update({prefix + name: value for name, value in metrics.items() if not name.startswith(prefix)})
        return named

    @staticmethod
    def _checked(metrics: Any) -> dict[str, Any]:
        if not isinstance(metrics, dict):
            raise TypeError(f"compute_metrics has to return a dict of names and numbers, not {metrics!r}.")
        return metrics

    def _mean_loss(self, losses: Any) -> float | None:
        if losses is None:
            return None
        per_sample = np.concatenate(losses) if isinstance(losses, list) else losses
        finite = np.isfinite(per_sample)
        if self.trainer.args.logging_nan_inf_filter and finite.any():
            per_sample = per_sample[finite]
        return per_sample.mean().item()

    def _num_samples(self) -> int:
        dataset = getattr(self.dataloader, "dataset", None)
        if has_length(dataset):
            number = len(dataset)
        elif has_length(self.dataloader):
            number = count_examples(self.dataloader, self.trainer.args.per_device_train_batch_size)
        else:
            number = self.examples_seen
        return number or self.examples_seen
