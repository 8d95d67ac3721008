"""The mean evaluation loss that `eval_loss_weighting` asks for instead of transformers' own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from littrainer.data.loaders import first_dimension
from littrainer.data.windows import count_label_tokens


class ExactLossMean:
    """The mean of the batches' losses, each weighted by what the batch really holds.

    Parameters:
        args: training arguments; `eval_loss_weighting` says whether a batch counts by its samples or by its labels.
        shifts_labels: the loss compares each label with the prediction one position before.
        gather: puts rows of all processes together.

    The loss of a batch is a mean over its samples, or over its labels where each token has one. Weighted by the same,
    the mean over batches is that over the whole set, however it is divided into batches.
    """

    def __init__(self, args: Any, shifts_labels: bool, gather: Callable[[torch.Tensor], torch.Tensor]):
        self.args = args
        self.shifts_labels = shifts_labels
        self.gather = gather
        self._losses: list[torch.Tensor] = []
        self._weights: list[torch.Tensor] = []

    def weight_of(self, inputs: Any) -> torch.Tensor | int:
        """What a batch weighs in this process; to be asked before a step, which may take labels out of the batch."""
        args = self.args
        if args.eval_loss_weighting == "labels" and ("labels" in inputs or "shift_labels" in inputs):
            labels = count_label_tokens([inputs], self.shifts_labels)
            if labels is not None:
                return labels
        samples = first_dimension(inputs)
        return args.eval_batch_size if samples is None else samples

    def add(self, loss: torch.Tensor, weight: torch.Tensor | int) -> None:
        """Take in a batch's loss. Nothing is read from the device before the end."""
        loss = loss.detach().float().mean().reshape(1)
        self._losses.append(self.gather(loss))
        self._weights.append(self.gather(torch.as_tensor(weight, device=loss.device).reshape(1)))

    def value(self) -> float | None:
        """The mean over all batches; None where there was none.

        Batches without weight, as where all labels are ignored, have a loss that is not a number and do not count.
        Where `logging_nan_inf_filter` is set, no batch counts whose loss is not finite, unless none is.
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


def mean_over_samples(losses: Any, leaves_out_non_finite: bool) -> float | None:
    """The mean of losses, one for each sample; None where there are none.

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
