"""The loss of a micro-batch, and how it is normalised over the window of its optimizer step."""

from __future__ import annotations

import logging
from typing import Any, Protocol

import numpy as np
import torch

from littrainer.compat.earlier_signatures import returns_the_mean
from littrainer.data.batch_rows import check_has_names
from littrainer.data.collators.default import LABEL_NAMES, TEXT_LABELS, text_in
from littrainer.data.columns import first_sample, renaming
from littrainer.data.windows import count_label_tokens
from littrainer.distributed.collectives import gathered, process_count, reduced
from littrainer.training.label_smoothing import smoothed_loss

logger = logging.getLogger(__name__)


class LossSettings(Protocol):
    """What the loss of a micro-batch depends on besides model and data; a Trainer is one."""

    # `world_size` and `average_tokens_across_devices` of it count.
    args: Any
    compute_loss_func: Any
    label_smoother: Any
    model_accepts_loss_kwargs: bool
    label_names: list[str]
    # Whether losses are divided by the window already; None: they are where the number of its label tokens is taken.
    loss_is_scaled_for_ga: bool | None
    # Micro-batches in the window at hand.
    current_gradient_accumulation_steps: int
    _loss_shifts_labels: bool

    def get_tp_size(self) -> int:
        """Processes that compute each layer together."""


def loss_and_outputs(
    trainer: LossSettings, model: Any, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None
) -> tuple[torch.Tensor, Any]:
    """Run the model on a micro-batch; the loss is the model's, or that of `compute_loss_func` or of smoothed labels.

    Parameters:
        num_items_in_batch: label tokens in the window; models and loss functions that take it divide by it.

    Raises:
        ValueError: the model returned no loss.
        TypeError: the batch has no named entries to call the model with.
    """
    labels = None
    if (trainer.compute_loss_func is not None or trainer.label_smoother is not None) and "labels" in inputs:
        labels = inputs.pop("labels")
    if trainer.model_accepts_loss_kwargs and num_items_in_batch is not None:
        inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
    check_has_names(inputs, model)
    outputs = model(**inputs)
    if trainer.compute_loss_func is not None:
        if labels is None:
            logger.warning("compute_loss_func is called with labels=None: the batch has no 'labels'.")
        return trainer.compute_loss_func(outputs, labels, num_items_in_batch=num_items_in_batch), outputs
    if labels is not None:
        return smoothed_loss(trainer, model, outputs, labels, num_items_in_batch), outputs
    return _loss_in(trainer, outputs, model, inputs), outputs


def _loss_in(trainer: LossSettings, outputs: Any, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    loss: Any = None
    if isinstance(outputs, dict):
        loss = outputs.get("loss")
        if isinstance(loss, torch.Tensor):
            return loss
        returned = f"a dict with {', '.join(map(repr, outputs))}"
        if "loss" in outputs:
            returned += f" in which 'loss' is {_described(loss)}"
        is_loss = False
    elif isinstance(outputs, (tuple, list)) or hasattr(outputs, "__getitem__"):
        is_bare = isinstance(outputs, torch.Tensor) or not len(outputs)
        loss = None if is_bare else outputs[0]
        returned = _described(outputs) if is_bare else f"a {type(outputs).__name__} that begins with {_described(loss)}"
        is_loss = isinstance(loss, torch.Tensor) and loss.numel() == 1
    else:
        returned, is_loss = _described(outputs), False
    if is_loss:
        return loss
    missing = [name for name in trainer.label_names if name not in inputs]
    hint = (
        f"The batch has no {' or '.join(missing)} (it has {', '.join(inputs)}): "
        + _missing_labels(first_sample(trainer, not model.training), missing[0], model)
        if missing
        else "Return the loss under the key 'loss' or as the first element of a tuple"
    )
    raise ValueError(
        f"{type(model).__name__}.forward returned no loss but {returned}. {hint}, or override compute_loss, or pass "
        "compute_loss_func."
    )


def _missing_labels(sample: dict[str, Any], name: str, model: Any) -> str:
    for label in filter(sample.__contains__, (name, *LABEL_NAMES)):
        text = text_in(sample[label])
        if text is not None:
            return TEXT_LABELS.format(label, text)
        return f"{label!r} is None in the data" if sample[label] is None else f"data_collator leaves out {label!r}"
    return renaming(name, sample, model) or "add labels to the dataset"


def _described(value: Any) -> str:
    if value is None:
        return "None"
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
    empty = "an empty" if isinstance(value, (tuple, list)) and not value else "a"
    return f"{empty} {type(value).__name__}{shape}"


def normalised(
    trainer: LossSettings, loss: torch.Tensor, num_items_in_batch: torch.Tensor | int | None
) -> torch.Tensor:
    """The loss as it goes into the backward pass.

    One that was already divided by the label tokens of the window stays as it is; a mean over the micro-batch is
    divided by the number of micro-batches in the window.
    """
    is_divided = trainer.loss_is_scaled_for_ga
    if is_divided is None:
        by_model = trainer.model_accepts_loss_kwargs and num_items_in_batch is not None
        is_divided = by_model or trainer.compute_loss_func is not None
        is_divided = is_divided and not returns_the_mean(trainer)
    if loss is None:
        raise no_loss_returned(loss, "compute_loss")
    return loss if is_divided else loss / trainer.current_gradient_accumulation_steps


def no_loss_returned(returned: Any, by: str) -> TypeError:
    """The error for a method that returned something else than a loss.

    Parameters:
        by: the method.
    """
    return TypeError(f"{by} returned {_described(returned)}, and has to return the loss, a tensor with one number.")


def items_in_window(trainer: LossSettings, window: list[Any], device: torch.device) -> torch.Tensor | int | None:
    """Label tokens of a window, where the loss is divided by them; None where it is not."""
    takes_number = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    # Of a batch without names it is said later what is wrong with it.
    if not takes_number or not window or not hasattr(window[0], "keys") or "labels" not in window[0]:
        return None
    number = count_label_tokens(window, trainer._loss_shifts_labels)
    if isinstance(number, torch.Tensor) and averages_over_processes(trainer):
        # Processes that compute each layer together have counted the same labels.
        number = reduced(number.to(device)) / trainer.get_tp_size()
    # A float, as transformers has it: dividing a bfloat16 loss by it gives float32.
    return number.to(device) / 1 if isinstance(number, torch.Tensor) else number


def averages_over_processes(trainer: LossSettings) -> bool:
    """Whether label tokens are counted over all processes, so that each token weighs the same in all of them."""
    return trainer.args.world_size > 1 and trainer.args.average_tokens_across_devices


def scaled_for_mean_gradient(
    trainer: LossSettings, loss: torch.Tensor, num_items_in_batch: torch.Tensor | int | None
) -> torch.Tensor:
    """The loss, of which the mean of the processes' gradients is to be the gradient of their sum.

    One that is divided by the tokens of all processes is multiplied, in place, by their number; others stay as they
    are.
    """
    takes_number = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    if takes_number and num_items_in_batch is not None and averages_over_processes(trainer):
        loss *= trainer.args.world_size // trainer.get_tp_size()
    return loss


def mean_over_processes(value: torch.Tensor) -> float:
    """The mean of the processes' values of a number, on the host."""
    return gathered(value).mean().item() if process_count() > 1 else value.item()


class PendingLosses:
    """Losses of micro-batches that are not in the running sum yet; they are added up when somebody looks at it.

    Adding each at once, past the filter for numbers that are not finite, takes seven operations of torch for a
    micro-batch. Nobody looks before the losses are logged, when they are read on the host anyway, and there the filter
    asks once for all of them. The sum is the same, bit for bit.
    """

    # One tensor each, which on a GPU takes half a kilobyte.
    MOST = 1024

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []
        # Optimizer steps in the sum before each of them, since it was last logged.
        self._steps: list[int] = []
        self._is_filtered = False

    def take(self, trainer: Any, loss: torch.Tensor) -> None:
        """Take the loss of the micro-batch at hand, for the sum of a Trainer."""
        # Not by its name, since whoever asks for the sum by that has these losses added to it.
        running = vars(trainer)["_tr_loss"]
        steps_since_logging = trainer.state.global_step - trainer._globalstep_last_logged
        self.append(running, loss, steps_since_logging, trainer.args.logging_nan_inf_filter)

    def append(self, running: torch.Tensor, loss: torch.Tensor, steps_since_logging: int, filtered: bool) -> None:
        """Take a loss, which `add_to_running_loss` would add to the running sum."""
        try:
            can_wait = (
                loss.dim() == 0 and loss.dtype is torch.float32 is running.dtype and loss.device == running.device
            )
        except AttributeError:
            raise no_loss_returned(loss, "training_step or compute_loss") from None
        if not can_wait or filtered is not self._is_filtered or len(self._losses) >= self.MOST:
            self.add_to(running, reads=False)
            self._is_filtered = filtered
        if can_wait:
            # A copy: graphs of a compiled model write the next loss to the same place.
            self._losses.append(loss.detach().clone())
            self._steps.append(steps_since_logging)
        elif loss.numel() == 1:
            add_to_running_loss(running, loss.detach(), steps_since_logging, filtered)
        else:
            # As torch's backward pass would have it, which comes next.
            raise RuntimeError(
                f"The loss has the shape {tuple(loss.shape)}, and has to be one number: take its mean, as "
                "reduction='mean' and loss.mean() do, in forward, compute_loss or compute_loss_func."
            )

    def discard(self) -> None:
        """The sum that they belong to is gone."""
        self._losses, self._steps = [], []

    def add_to(self, running: torch.Tensor, reads: bool = True) -> None:
        """Add them to the running sum, in place.

        Parameters:
            reads: they may be read on the host.
        """
        if not self._losses:
            return
        losses, steps = self._losses, self._steps
        self.discard()
        # As few as these are added faster than they are read.
        if reads and len(losses) > 2:
            numbers = torch.stack([running, *losses]).cpu().numpy()
            if not self._is_filtered or np.isfinite(numbers[1:]).all():
                # One by one in float32, as torch adds them.
                running.fill_(float(np.add.accumulate(numbers)[-1]))
                return
        for loss, steps_since_logging in zip(losses, steps, strict=True):
            add_to_running_loss(running, loss, steps_since_logging, self._is_filtered)


def add_to_running_loss(
    running: torch.Tensor, loss: torch.Tensor, steps_since_logging: int, filter_non_finite: bool
) -> None:
    """Add a micro-batch's loss to the running sum in place, without a device sync.

    Parameters:
        steps_since_logging: optimizer steps in the sum so far.
        filter_non_finite: a nan or infinite loss counts as the mean of the sum so far.
    """
    if filter_non_finite:
        loss = torch.where(torch.isfinite(loss), loss, running / (1 + steps_since_logging))
    running += loss
