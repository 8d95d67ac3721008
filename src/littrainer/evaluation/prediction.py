"""Loss, labels and predictions of an evaluation batch, and the mean loss of all batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from littrainer.callbacks.trainer_context import TrainerContext
from littrainer.data.loaders import find_batch_size
from littrainer.data.windows import count_label_tokens
from littrainer.runtime.nested_values import detach_nested


def can_compute_loss(inputs: Mapping[str, Any], label_names: Sequence[str], can_return_loss: bool) -> bool:
    if label_names:
        return all(inputs.get(name) is not None for name in label_names)
    return_loss = inputs.get("return_loss")
    return bool(can_return_loss if return_loss is None else return_loss)


def compute_loss(
    trainer: TrainerContext, model: Any, inputs: Any, num_items_in_batch: Any, is_loss_only: bool
) -> tuple[torch.Tensor, Any]:
    """Return mean loss and outputs of the Trainer's `compute_loss`, and track its loss terms."""
    session = trainer.session
    if trainer.args.use_liger_kernel and is_loss_only:
        # Liger's fused loss needs no logits.
        inputs = {**inputs, "skip_logits": True}
    needed_logits, session.needs_logits = session.needs_logits, not is_loss_only
    try:
        result: Any = trainer.compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
    finally:
        session.needs_logits = needed_logits
    if trainer.args.log_loss_terms:
        result = session.eval_loss_terms.add_loss_terms(result, find_batch_size(inputs) or 1)
    return unpack_loss(result, type(trainer).__name__)


def unpack_loss(result: Any, class_name: str) -> tuple[torch.Tensor, Any]:
    """Return mean loss and outputs of a `compute_loss` that was called with `return_outputs=True`."""
    if result is None or isinstance(result, torch.Tensor):
        raise TypeError(
            f"{class_name}.compute_loss returned {'None' if result is None else 'the loss alone'}, "
            "and evaluations call it with return_outputs=True: let it return (loss, outputs) then."
        )
    loss, outputs = result
    loss = loss.detach()
    return loss.mean() if loss.dim() else loss, outputs


def contains_loss(outputs: Any) -> bool:
    """Return whether outputs contain a loss, by name or as first element."""
    if isinstance(outputs, dict):
        return "loss" in outputs
    is_sequence = isinstance(outputs, (tuple, list)) and len(outputs) > 0
    return is_sequence and isinstance(outputs[0], torch.Tensor) and outputs[0].dim() == 0


def get_ignored_outputs(model: Any) -> Sequence[str]:
    config = getattr(model, "config", None)
    return [] if config is None else getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])


def extract_labels(inputs: Mapping[str, Any], label_names: Sequence[str]) -> Any:
    labels = detach_nested(tuple(inputs.get(name) for name in label_names))
    return labels[0] if len(labels) == 1 else labels


def extract_logits(
    outputs: Any, ignore_keys: Sequence[str], labels: Any, has_loss: bool, compared_labels: Sequence[str] | None
) -> Any:
    """Return the predictions of a model's outputs: a single entry, or a tuple of several.

    Parameters:
        compared_labels: names of labels that metrics compare with the predictions; None skips the check.
    """
    if isinstance(outputs, dict):
        excluded = [*ignore_keys, "loss"] if has_loss else ignore_keys
        logits: Any = tuple(value for name, value in outputs.items() if name not in excluded)
    else:
        logits = outputs[1:] if has_loss else outputs
    if labels is not None and compared_labels is not None:
        names = [name for name in outputs if name not in (*ignore_keys, "loss")] if isinstance(outputs, dict) else None
        check_rows(logits, labels, names, compared_labels)
    logits = detach_nested(logits)
    # A tensor with a single row has length 1 too, and is not unpacked.
    return logits[0] if isinstance(logits, (list, tuple)) and len(logits) == 1 else logits


def check_rows(logits: Any, labels: Any, names: list[str] | None, label_names: Sequence[str]) -> None:
    """Raise a ValueError if no output has as many rows as the labels; either may have flattened tokens as rows."""
    first_label = labels[0] if isinstance(labels, (list, tuple)) and labels else labels
    outputs = list(logits) if isinstance(logits, (list, tuple)) else [logits]
    tensors = [output for output in outputs if isinstance(output, torch.Tensor)]
    if not isinstance(first_label, torch.Tensor) or first_label.dim() == 0 or len(tensors) < len(outputs):
        return
    # Scalars, such as parts of a loss, have no rows.
    row_outputs = [output for output in tensors if output.dim()]
    if not row_outputs or any(_have_matching_rows(output, first_label) for output in row_outputs):
        return
    names = names or [f"output {number}" for number in range(len(tensors))]
    shapes = [f"{name} of shape {tuple(output.shape)}" for name, output in zip(names, tensors, strict=True)]
    raise ValueError(
        f"The model returned {', '.join(shapes)} for a batch whose {label_names[0]!r} have {len(first_label)} rows: "
        "compute_metrics needs a prediction for each. Return outputs that keep the batch as their first dimension, "
        "check what the data collator does to the labels, or shape both in preprocess_logits_for_metrics."
    )


def _have_matching_rows(output: torch.Tensor, labels: torch.Tensor) -> bool:
    # Scripts may flatten the tokens of outputs or labels.
    rows = labels.shape[0]
    return output.shape[0] in (rows, labels.numel()) or rows == output.shape[:2].numel()


class ExactLossMean:
    """Mean loss over all samples or labels, independent of batch sizes.

    Parameters:
        args: `eval_loss_weighting` selects samples or labels as weight of a batch.
        shifts_labels: the loss compares each label with the prediction at the previous position.
    """

    def __init__(self, args: Any, shifts_labels: bool, gather: Callable[[torch.Tensor], torch.Tensor]):
        self.args = args
        self.shifts_labels = shifts_labels
        self.gather = gather
        self._losses: list[torch.Tensor] = []
        self._weights: list[torch.Tensor] = []

    def get_batch_weight(self, inputs: Any) -> torch.Tensor | int:
        """Return a batch's weight in this process; call before a step, which may remove labels."""
        args = self.args
        if args.eval_loss_weighting == "labels" and ("labels" in inputs or "shift_labels" in inputs):
            labels = count_label_tokens([inputs], self.shifts_labels)
            if labels is not None:
                return labels
        samples = find_batch_size(inputs)
        return args.eval_batch_size if samples is None else samples

    def add(self, loss: torch.Tensor, weight: torch.Tensor | int) -> None:
        """Gather and keep the loss and weight of a batch; a collective call."""
        loss = loss.detach().float().mean().reshape(1)
        self._losses.append(self.gather(loss))
        self._weights.append(self.gather(torch.as_tensor(weight, device=loss.device).reshape(1)))

    def value(self) -> float | None:
        """Return the mean over batches with a positive weight; None without batches.

        `logging_nan_inf_filter` excludes batches with a non-finite loss, unless all are non-finite.
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


def compute_sample_mean(losses: Any, filter_nonfinite: bool) -> float | None:
    """Return the mean over samples; `filter_nonfinite` excludes non-finite losses, unless all are non-finite."""
    if losses is None:
        return None
    per_sample = np.concatenate(losses) if isinstance(losses, list) else losses
    finite = np.isfinite(per_sample)
    if filter_nonfinite and finite.any():
        per_sample = per_sample[finite]
    return per_sample.mean().item()
