"""The loss of a micro-batch, and how it is scale_for_accumulation over the window of its optimizer step."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from littrainer.data.collators import LABEL_NAMES, TEXT_LABELS, find_text
from littrainer.data.columns import find_accepted_columns, make_unnamed_batch_error, read_first_sample, suggest_renaming
from littrainer.data.windows import IGNORED_LABEL, count_label_tokens
from littrainer.distributed.collectives import gather_across_processes, get_world_size, reduce_across_processes
from littrainer.model.facts import is_causal_lm, unwrap_user_model
from littrainer.runtime.notes import add_note

logger = logging.getLogger(__name__)

# Set on an override that loses `num_items_in_batch`: its loss is the mean of its micro-batch, whatever the model does.
MICRO_BATCH_MEAN_MARK = "_reduces_to_micro_batch_mean"


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
    # Micro-batches in the current window.
    current_gradient_accumulation_steps: int
    _loss_shifts_labels: bool
    # A LossReduction (loop/loss_normalization.py): what the first window has shown of the model's loss.
    _loss_reduction: Any

    def get_tp_size(self) -> int:
        """Processes that compute each layer together."""


def compute_loss_and_outputs(
    settings: LossSettings, model: Any, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None
) -> tuple[torch.Tensor, Any]:
    """Run the model on a micro-batch; the loss is the model's, or that of `compute_loss_func` or of smoothed labels.

    Parameters:
        num_items_in_batch: label tokens in the window; models and loss functions that take it divide by it.

    Raises:
        ValueError: the model returned no loss.
        TypeError: the batch has no named entries to call the model with.
    """
    labels = None
    if (settings.compute_loss_func is not None or settings.label_smoother is not None) and "labels" in inputs:
        labels = inputs.pop("labels")
    elif settings.compute_loss_func is not None:
        labels = _labels_by_name(settings, inputs, model)
    head = settings._loss_reduction
    # The loss is weighted below, so the model has to return the plain mean: it does not get the number.
    is_weighted = not head.divides and num_items_in_batch is not None
    if settings.model_accepts_loss_kwargs and num_items_in_batch is not None and not is_weighted:
        inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
    if not hasattr(inputs, "keys"):
        raise make_unnamed_batch_error(inputs, model)
    if labels is not None and settings.compute_loss_func is None:
        return _smoothed_loss_and_outputs(settings.label_smoother, model, inputs, labels, num_items_in_batch)
    outputs = model(**inputs)
    if settings.compute_loss_func is not None:
        if labels is None:
            names = " and ".join(map(repr, settings.label_names)) or "'labels'"
            logger.warning("compute_loss_func is called with labels=None: the batch has no %s.", names)
        return settings.compute_loss_func(outputs, labels, num_items_in_batch=num_items_in_batch), outputs
    loss = _loss_in(settings, outputs, model, inputs)
    return head.weighted(loss, inputs, num_items_in_batch) if is_weighted else loss, outputs


def _labels_by_name(settings: LossSettings, inputs: dict[str, Any], model: Any) -> Any:
    """Return the labels under `label_names`, several as a tuple; the model gets those that its forward takes too."""
    names = settings.label_names
    if not names or not all(name in inputs for name in names):
        return None
    accepted = find_accepted_columns(model, [])
    found = tuple(inputs[name] if name in accepted else inputs.pop(name) for name in names)
    return found[0] if len(found) == 1 else found


def _smoothed_loss_and_outputs(
    smoother: Any, model: Any, inputs: dict[str, Any], labels: Any, num_items_in_batch: torch.Tensor | int | None
) -> tuple[torch.Tensor, Any]:
    users = unwrap_user_model(model)
    try:
        outputs = model(**inputs)
        shifted = is_causal_lm(users)
        return smoother(outputs, labels, shift_labels=shifted, num_items_in_batch=num_items_in_batch), outputs
    except (RuntimeError, ValueError) as error:
        is_encoder_decoder = getattr(getattr(users, "config", None), "is_encoder_decoder", False)
        if is_encoder_decoder and not any(name.startswith("decoder_input") for name in inputs):
            advice = "pass data_collator=DataCollatorForSeq2Seq(tokenizer, model=model)"
            add_note(
                error, f"label_smoothing_factor needs decoder_input_ids in the batch of an encoder-decoder: {advice}."
            )
        raise


def _loss_in(settings: LossSettings, outputs: Any, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    if isinstance(outputs, dict):
        loss = outputs.get("loss")
        if isinstance(loss, torch.Tensor):
            return loss
        returned = f"a dict with {', '.join(map(repr, outputs))}"
        if "loss" in outputs:
            returned += f" in which 'loss' is {_described(loss)}"
    else:
        is_filled = hasattr(outputs, "__getitem__") and getattr(outputs, "shape", True) != () and len(outputs) > 0
        loss = outputs[0] if is_filled else None
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            return loss
        returned = _described(outputs)
        if is_filled and not isinstance(outputs, torch.Tensor):
            returned = f"a {type(outputs).__name__} that begins with {_described(loss)}"
    hint = "Return the loss under the key 'loss' or as the first element of a tuple"
    missing = [name for name in settings.label_names if name not in inputs]
    if missing:
        advice = _missing_labels(read_first_sample(settings, not model.training), missing[0], model)
        hint = f"The batch has no {' or '.join(missing)} (it has {', '.join(inputs)}): {advice}"
    raise ValueError(
        f"{type(model).__name__}.forward returned no loss but {returned}. {hint}, or override compute_loss, or pass "
        "compute_loss_func."
    )


def _missing_labels(sample: dict[str, Any], name: str, model: Any) -> str:
    for label in filter(sample.__contains__, (name, *LABEL_NAMES)):
        text = find_text(sample[label])
        if text is not None:
            return TEXT_LABELS.format(label, text)
        return f"{label!r} is None in the data" if sample[label] is None else f"data_collator leaves out {label!r}"
    return suggest_renaming(name, sample, model) or "add labels to the dataset"


def _described(value: Any) -> str:
    if value is None:
        return "None"
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
    empty = "an empty" if isinstance(value, (tuple, list)) and not value else "a"
    return f"{empty} {type(value).__name__}{shape}"


def scale_for_accumulation(
    settings: LossSettings, loss: torch.Tensor, num_items_in_batch: torch.Tensor | int | None
) -> torch.Tensor:
    """The loss as it goes into the backward pass.

    One that was already divided by the label tokens of the window stays as it is; a mean over the micro-batch is
    divided by the number of micro-batches in the window.
    """
    is_divided = settings.loss_is_scaled_for_ga
    if is_divided is None:
        takes_number = settings.model_accepts_loss_kwargs or settings._loss_reduction.is_exact
        by_model = takes_number and num_items_in_batch is not None
        is_divided = by_model or settings.compute_loss_func is not None
        is_divided = is_divided and not reduces_to_micro_batch_mean(settings)
    if loss is None:
        raise invalid_loss_error(loss, "compute_loss")
    micro_batches = settings.current_gradient_accumulation_steps
    # Dividing by 1 gives the same number, and takes two operations.
    return loss if is_divided or micro_batches == 1 else loss / micro_batches


def reduces_to_micro_batch_mean(settings: Any) -> bool:
    """Return whether the loss comes from an override that knows nothing of the window of its optimizer step."""
    # A mock instead of a method has every attribute.
    of_loss, of_step = getattr(settings, "compute_loss", None), getattr(settings, "training_step", None)
    return (
        getattr(of_loss, MICRO_BATCH_MEAN_MARK, None) is True or getattr(of_step, MICRO_BATCH_MEAN_MARK, None) is True
    )


def invalid_loss_error(returned: Any, by: str) -> TypeError:
    """The error for a method that returned something else than a loss.

    Parameters:
        by: the method.
    """
    return TypeError(f"{by} returned {_described(returned)}, and has to return the loss, a tensor with one number.")


def items_in_window(settings: LossSettings, window: list[Any], device: torch.device) -> torch.Tensor | int | None:
    """Label tokens of a window, where the loss is divided by them; None where it is not."""
    head = settings._loss_reduction
    takes_number = settings.model_accepts_loss_kwargs or settings.compute_loss_func is not None or head.is_exact
    # A batch that is no mapping gets a proper error later.
    if not takes_number or not window or not hasattr(window[0], "keys"):
        return None
    number: Any
    if head.is_exact and not (head.divides and "labels" in window[0]):
        number = sum(head.counts(batch).sum().to(device) for batch in window)
    elif "labels" not in window[0]:
        return None
    else:
        number = count_label_tokens(window, settings._loss_shifts_labels)
    if isinstance(number, torch.Tensor) and should_average_over_processes(settings):
        # Processes that compute each layer together have counted the same labels.
        number = reduce_across_processes(number.to(device)) / settings.get_tp_size()
    # A float, as in transformers: dividing a bfloat16 loss by it gives float32.
    return number.to(device) / 1 if isinstance(number, torch.Tensor) else number


def should_average_over_processes(settings: LossSettings) -> bool:
    """Whether label tokens are counted over all processes, so that each token weighs the same in all of them."""
    return settings.args.world_size > 1 and settings.args.average_tokens_across_devices


def scale_for_gradient_mean(
    settings: LossSettings, loss: torch.Tensor, num_items_in_batch: torch.Tensor | int | None
) -> torch.Tensor:
    """The loss, of which the mean of the processes' gradients is to be the gradient of their sum.

    One that is divided by the tokens of all processes is multiplied, in place, by their number; others stay as they
    are.
    """
    takes_number = settings.model_accepts_loss_kwargs or settings.compute_loss_func is not None
    takes_number = takes_number or settings._loss_reduction.is_exact
    if takes_number and num_items_in_batch is not None and should_average_over_processes(settings):
        loss *= settings.args.world_size // settings.get_tp_size()
    return loss


def mean_over_processes(value: torch.Tensor) -> float:
    """The mean of the processes' values of a number, on the host."""
    return gather_across_processes(value).mean().item() if get_world_size() > 1 else value.item()


class HostValues:
    """Values of scalar tensors on the host, until the next read.

    Reading each loss and norm by itself would wait for the device as often as there are any.
    """

    def __init__(self) -> None:
        # By identity; the tensor is kept so that its identity stays its own, and its version shows later changes.
        self._read: dict[int, tuple[torch.Tensor, int, float]] = {}

    def read(self, values: Sequence[Any]) -> None:
        """Read the tensors with one element among `values` in one transfer, and forget those of the read before."""
        # float64 would lose digits; tensors made in inference mode have no version.
        tensors = [value for value in values if type(value) is torch.Tensor and value.dtype is not torch.float64]
        tensors = [tensor for tensor in tensors if tensor.numel() == 1 and not tensor.is_inference()]
        self._read = {}
        if tensors:
            device = tensors[0].device
            scalars = [tensor.detach().reshape(()).to(device, torch.float32) for tensor in tensors]
            for tensor, number in zip(tensors, torch.stack(scalars).tolist(), strict=True):
                self._read[id(tensor)] = tensor, tensor._version, number

    def remember(self, tensor: torch.Tensor, value: float) -> None:
        """Take `value` for that of `tensor` until the tensor changes."""
        self._read[id(tensor)] = tensor, tensor._version, value

    def items(self, values: Sequence[Any]) -> list[float]:
        """Return all numbers, which are read in one transfer if one of them is not known."""
        for value in values:
            if isinstance(value, torch.Tensor):
                known = self._read.get(id(value))
                # A tensor of inference mode, which is never known, has no version.
                if known is None or known[1] != value._version:
                    self.read(values)
                    break
        return [self._read[id(value)][2] if id(value) in self._read else float(value) for value in values]

    def item(self, value: Any) -> float:
        """Return the number, which is read from the device if it is not known."""
        known = self._read.get(id(value))
        return known[2] if known is not None and known[1] == value._version else float(value)


class RunningLoss:
    """The sum of the micro-batches' losses: since it was last logged, and before.

    Losses wait outside of the sum until somebody looks at it. Adding each at once, past the filter for numbers that are
    not finite, takes seven operations of torch for a micro-batch. Nobody looks before the losses are logged, when they
    are read on the host anyway, and there the filter asks once for all of them. The sum is the same, bit for bit.

    Parameters:
        device: where the sum is kept.
        step: the optimizer step at which training begins.
        values: numbers of the device that were read together.

    Attributes:
        before_last_log: the sum up to the last log, on the host.
        step_of_last_log: the optimizer step of the last log.
    """

    # Losses that wait; the health guard keeps as many unread.
    MAX_WAITING = 8192

    def __init__(self, device: torch.device | None = None, step: int = 0, values: HostValues | None = None):
        self.before_last_log = 0.0
        self.step_of_last_log = step
        self.values = HostValues() if values is None else values
        # A number would be copied to the device, which waits for it.
        self._sum = torch.zeros((), device=device)
        # Each with the optimizer steps in the sum before it, since it was last logged.
        self._waiting: list[tuple[torch.Tensor, int]] = []
        self._is_filtered = False

    @property
    def since_last_log(self) -> torch.Tensor:
        """The sum since the last log, a tensor with one element; it may be changed in place, or set."""
        self._add_waiting()
        return self._sum

    @since_last_log.setter
    def since_last_log(self, value: torch.Tensor) -> None:
        self._sum, self._waiting = value, []

    def add(self, loss: torch.Tensor, step: int, filter_non_finite: bool) -> torch.Tensor:
        """Count the loss of a micro-batch, and return a copy of it that lasts.

        Parameters:
            loss: as it goes into the backward pass.
            step: optimizer steps done.
            filter_non_finite: a nan or infinite loss counts as the mean of the sum so far.

        Raises:
            TypeError: it is no tensor.
            RuntimeError: it is more than one number.
        """
        steps_since_logging = step - self.step_of_last_log
        try:
            can_wait = (
                loss.dim() == 0 and loss.dtype is torch.float32 is self._sum.dtype and loss.device == self._sum.device
            )
        except AttributeError:
            raise invalid_loss_error(loss, "training_step or compute_loss") from None
        if not can_wait or filter_non_finite is not self._is_filtered or len(self._waiting) >= self.MAX_WAITING:
            self._add_waiting(reads=False)
            self._is_filtered = filter_non_finite
        # A copy: graphs of a compiled model write the next loss to the same place.
        kept = loss.detach().clone()
        if can_wait:
            self._waiting.append((kept, steps_since_logging))
        elif loss.numel() == 1:
            add_to_running_loss(self._sum, kept, steps_since_logging, filter_non_finite)
        else:
            # As torch's backward pass would have it, which comes next.
            raise RuntimeError(
                f"The loss has the shape {tuple(loss.shape)}, and has to be one number: take its mean, as "
                "reduction='mean' and loss.mean() do, in forward, compute_loss or compute_loss_func."
            )
        return kept

    def unread(self) -> list[torch.Tensor]:
        """Return the tensors that the sum since the last log is made of."""
        return [self._sum, *[loss for loss, _ in self._waiting]]

    def _add_waiting(self, reads: bool = True) -> None:
        tensors = self.unread()
        waiting, self._waiting = self._waiting, []
        if reads and waiting:
            numbers = np.array(self.values.items(tensors), dtype=np.float32)
            if not self._is_filtered or np.isfinite(numbers[1:]).all():
                # In float32 and in order, as torch adds them.
                total = float(np.add.accumulate(numbers)[-1])
                self._sum.fill_(total)
                self.values.remember(self._sum, total)
                return
        for loss, steps_since_logging in waiting:
            add_to_running_loss(self._sum, loss, steps_since_logging, self._is_filtered)


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


@dataclass
class LabelSmoother:
    """Computes the smoothed loss from a model's logits.

    Parameters:
        epsilon: probability taken from the true label and spread evenly over all labels.
        ignore_index: labels of this value do not count.
    """

    epsilon: float = 0.1
    ignore_index: int = IGNORED_LABEL

    def __call__(
        self,
        model_output: Any,
        labels: torch.Tensor,
        shift_labels: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """The loss, divided by `num_items_in_batch`, or by the labels of this micro-batch that count.

        Parameters:
            model_output: holds the logits under `"logits"` or as its first element.
            shift_labels: each position predicts the label of the next one.
        """
        logits = model_output["logits"] if isinstance(model_output, dict) else model_output[0]
        if shift_labels:
            logits, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
        surprise = -nn.functional.log_softmax(logits, dim=-1)
        if labels.dim() < surprise.dim():
            labels = labels.unsqueeze(-1)
        ignored = labels.eq(self.ignore_index)
        # An ignored label is no index, and what is picked for it is masked.
        of_label = surprise.gather(dim=-1, index=labels.clamp(min=0)).masked_fill(ignored, 0.0)
        # Summed in float32, since half precision overflows over a large vocabulary.
        of_all = surprise.sum(dim=-1, keepdim=True, dtype=torch.float32).masked_fill(ignored, 0.0)
        count: Any = num_items_in_batch
        if count is None:
            count = ignored.numel() - ignored.long().sum()
        elif isinstance(count, torch.Tensor):
            count = count.to(of_label.device)
        exact = of_label.sum() / count
        spread = of_all.sum() / (count * surprise.shape[-1])
        return (1 - self.epsilon) * exact + self.epsilon * spread


def make_label_smoother(model: nn.Module, factor: float) -> LabelSmoother | None:
    """What computes the smoothed loss of a model; None where labels are not smoothed.

    Several labels that are true at once have no probability to spread: a model for them trains unsmoothed, with a
    warning.
    """
    if factor == 0:
        return None
    if getattr(getattr(model, "config", None), "problem_type", None) == "multi_label_classification":
        warnings.warn(
            "Label smoothing is not compatible with multi-label classification (config.problem_type), so "
            f"label_smoothing_factor={factor} has no effect.",
            UserWarning,
            stacklevel=2,
        )
        return None
    return LabelSmoother(epsilon=factor)
