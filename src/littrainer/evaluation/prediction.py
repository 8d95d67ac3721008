"""The forward pass of one evaluation batch (loss, predictions and labels), and the mean loss of all batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from littrainer.data.columns import make_unnamed_batch_error
from littrainer.data.loaders import find_batch_size
from littrainer.data.windows import count_label_tokens
from littrainer.runtime.nested_values import detach_nested


def predict_batch(
    trainer: Any,
    model: Any,
    inputs: dict[str, Any],
    prediction_loss_only: bool,
    ignore_keys: Sequence[str] | None,
) -> tuple[Any, Any, Any]:
    """Return loss, predictions and labels of one batch; what a batch does not have is None.

    Parameters:
        prediction_loss_only: leave out predictions and labels.
        ignore_keys: outputs to leave out; by default those the model's config names, else `past_key_values`.

    Raises:
        TypeError: the batch is no mapping, or `compute_loss` returned no pair.
        ValueError: the predictions cannot belong to the labels that metrics compare them with.
    """
    if not hasattr(inputs, "keys"):
        raise make_unnamed_batch_error(inputs, model, override="prediction_step")
    label_names = trainer.label_names
    gives_loss = can_compute_loss(inputs, label_names, trainer.can_return_loss)
    inputs = trainer._prepare_inputs(inputs)
    if ignore_keys is None:
        ignore_keys = get_ignored_outputs(trainer.model)

    labels = None
    if gives_loss:
        # Taken before the forward pass: computing the loss may take the labels out of the inputs.
        labels = extract_labels(inputs, label_names)
        num_items = trainer._get_num_items_in_batch([inputs], trainer.args.device)

    with torch.no_grad(), trainer.compute_loss_context_manager():
        if gives_loss:
            if trainer.args.use_liger_kernel and prediction_loss_only:
                # Liger's fused loss needs no logits, and they are large.
                inputs = {**inputs, "skip_logits": True}
            found = trainer.compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items)
            if found is None or isinstance(found, torch.Tensor):
                raise TypeError(
                    f"{type(trainer).__name__}.compute_loss returned {'None' if found is None else 'the loss alone'}, "
                    "and evaluations call it with return_outputs=True: let it return (loss, outputs) then."
                )
            loss, outputs = found
            loss = loss.detach()
            loss = loss.mean() if loss.dim() else loss
        else:
            loss = None
            outputs = model(**inputs)

    if prediction_loss_only:
        return loss, None, None
    are_compared = trainer.compute_metrics is not None and trainer.preprocess_logits_for_metrics is None
    return loss, extract_logits(outputs, ignore_keys, labels, gives_loss, label_names if are_compared else None), labels


def can_compute_loss(inputs: Mapping[str, Any], label_names: Sequence[str], can_return_loss: bool) -> bool:
    """Return whether a batch has all labels, or the model returns a loss without any."""
    if label_names:
        return all(inputs.get(name) is not None for name in label_names)
    return_loss = inputs.get("return_loss")
    return bool(can_return_loss if return_loss is None else return_loss)


def contains_loss(outputs: Any) -> bool:
    """Return whether a model's outputs have a loss among them, or in front of them."""
    if isinstance(outputs, dict):
        return "loss" in outputs
    is_row = isinstance(outputs, (tuple, list)) and len(outputs) > 0
    return is_row and isinstance(outputs[0], torch.Tensor) and outputs[0].dim() == 0


def get_ignored_outputs(model: Any) -> Sequence[str]:
    """Return the outputs that are no predictions, which the model's config names."""
    config = getattr(model, "config", None)
    return [] if config is None else getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])


def extract_labels(inputs: Mapping[str, Any], label_names: Sequence[str]) -> Any:
    """Return the labels of a batch: one, or a tuple of them."""
    labels = detach_nested(tuple(inputs.get(name) for name in label_names))
    return labels[0] if len(labels) == 1 else labels


def extract_logits(
    outputs: Any, ignore_keys: Sequence[str], labels: Any, has_loss: bool, compared_labels: Sequence[str] | None
) -> Any:
    """Return the predictions among a model's outputs: one, or a tuple of them.

    Parameters:
        has_loss: a loss was computed, so that one stands among the outputs, or in front of them.
        compared_labels: names of the labels that metrics compare the predictions with; None if none do.

    Raises:
        ValueError: the predictions cannot belong to these labels.
    """
    if isinstance(outputs, dict):
        left_out = [*ignore_keys, "loss"] if has_loss else ignore_keys
        logits: Any = tuple(value for name, value in outputs.items() if name not in left_out)
    else:
        logits = outputs[1:] if has_loss else outputs
    if labels is not None and compared_labels is not None:
        names = [name for name in outputs if name not in (*ignore_keys, "loss")] if isinstance(outputs, dict) else None
        check_rows(logits, labels, names, compared_labels)
    logits = detach_nested(logits)
    # A bare tensor keeps its dimensions, also if the batch is of one sample.
    is_only_one = isinstance(logits, (list, tuple)) and len(logits) == 1
    return logits[0] if is_only_one else logits


def check_rows(logits: Any, labels: Any, names: list[str] | None, label_names: Sequence[str]) -> None:
    """Refuse predictions that cannot belong to the labels row by row, before a metric is computed from them.

    Parameters:
        names: names of the model's outputs; None if it returns a tuple.

    Raises:
        ValueError: no output with rows has one for each row of the first label, not even if either is flattened.
    """
    first_label = labels[0] if isinstance(labels, (list, tuple)) and labels else labels
    outputs = list(logits) if isinstance(logits, (list, tuple)) else [logits]
    tensors = [output for output in outputs if isinstance(output, torch.Tensor)]
    if not isinstance(first_label, torch.Tensor) or first_label.dim() == 0 or len(tensors) < len(outputs):
        return
    # Single numbers, as the parts of a loss, have no rows to be compared.
    with_rows = [output for output in tensors if output.dim()]
    if not with_rows or any(_fit_together(output, first_label) for output in with_rows):
        return
    shown = [
        f"{name} of shape {tuple(output.shape)}"
        for name, output in zip(names or [f"output {number}" for number in range(len(tensors))], tensors, strict=True)
    ]
    raise ValueError(
        f"The model returned {', '.join(shown)} for a batch whose {label_names[0]!r} have {len(first_label)} rows: "
        "compute_metrics needs a prediction for each. Return outputs that keep the batch as their first dimension, "
        "check what the data collator does to the labels, or shape both in preprocess_logits_for_metrics."
    )


def _fit_together(output: torch.Tensor, labels: torch.Tensor) -> bool:
    # Scripts flatten tokens on either side, and the other in compute_metrics.
    rows = labels.shape[0]
    return output.shape[0] in (rows, labels.numel()) or rows == output.shape[:2].numel()


class ExactLossMean:
    """The mean of the batches' losses, each weighted by what the batch really holds.

    Parameters:
        args: training arguments; `eval_loss_weighting` says whether a batch counts by its samples or by its labels.
        shifts_labels: the loss compares each label with the prediction one position before.
        gather: puts rows of all processes together.

    The loss of a batch is a mean over its samples, or over its labels if each token has one. Weighted by the same, the
    mean over batches is the mean over the whole set, however it is divided into batches.
    """

    def __init__(self, args: Any, shifts_labels: bool, gather: Callable[[torch.Tensor], torch.Tensor]):
        self.args = args
        self.shifts_labels = shifts_labels
        self.gather = gather
        self._losses: list[torch.Tensor] = []
        self._weights: list[torch.Tensor] = []

    def get_batch_weight(self, inputs: Any) -> torch.Tensor | int:
        """Return what a batch weighs in this process; ask before a step, which may take labels out of the batch."""
        args = self.args
        if args.eval_loss_weighting == "labels" and ("labels" in inputs or "shift_labels" in inputs):
            labels = count_label_tokens([inputs], self.shifts_labels)
            if labels is not None:
                return labels
        samples = find_batch_size(inputs)
        return args.eval_batch_size if samples is None else samples

    def add(self, loss: torch.Tensor, weight: torch.Tensor | int) -> None:
        """Take in a batch's loss. Nothing is read from the device before the end."""
        loss = loss.detach().float().mean().reshape(1)
        self._losses.append(self.gather(loss))
        self._weights.append(self.gather(torch.as_tensor(weight, device=loss.device).reshape(1)))

    def value(self) -> float | None:
        """Return the mean over all batches; None if there was none.

        Batches without weight, such as those whose labels are all ignored, do not count. With `logging_nan_inf_filter`
        no batch counts whose loss is not finite, unless none is.
        """
        if not self._losses:
            return None
        losses = torch.cat(self._losses).double().cpu()
        weights = torch.cat(self._weights).double().cpu()
        counted = weights > 0
        finite = counted & losses.isfinite()
        if self.args.logging_nan_inf_filter and bool(finite.any()):
            counted = finite
        if not bool(counted.any()):
            return math.nan
        return float((losses[counted] * weights[counted]).sum() / weights[counted].sum())


def compute_sample_mean(losses: Any, leaves_out_non_finite: bool) -> float | None:
    """Return the mean of losses, one for each sample; None if there are none.

    Parameters:
        losses: an array, or a list of one for each batch.
        leaves_out_non_finite: count finite ones alone, unless there is none.
    """
    if losses is None:
        return None
    per_sample = np.concatenate(losses) if isinstance(losses, list) else losses
    finite = np.isfinite(per_sample)
    if leaves_out_non_finite and finite.any():
        per_sample = per_sample[finite]
    return per_sample.mean().item()
