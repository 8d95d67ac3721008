"""The loss of a micro-batch, and its normalization over the window of its optimizer step."""

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
from littrainer.data.columns import (
    advise_on_model_kind,
    find_accepted_columns,
    make_unnamed_batch_error,
    read_first_sample,
    suggest_renaming,
)
from littrainer.data.windows import IGNORED_LABEL, count_label_tokens
from littrainer.distributed.collectives import gather_across_processes, get_world_size, reduce_across_processes
from littrainer.loop.chunked_loss import call_without_logits, is_loss_chunked
from littrainer.model.facts import is_causal_lm, unwrap_user_model
from littrainer.runtime.notes import add_note

logger = logging.getLogger(__name__)

# Attribute that marks a script's compute_loss or training_step without `num_items_in_batch`: such a method returns the
# mean of its micro-batch.
MICRO_BATCH_MEAN_MARK = "_reduces_to_micro_batch_mean"


class LossSettings(Protocol):
    """Settings of the loss, which a Trainer has."""

    args: Any
    compute_loss_func: Any
    label_smoother: Any
    model_accepts_loss_kwargs: bool
    label_names: list[str]
    # True if losses are divided by the window's label tokens already; if None, `scale_for_accumulation` decides.
    loss_is_scaled_for_ga: bool | None
    current_gradient_accumulation_steps: int
    _loss_shifts_labels: bool
    # A LossReduction (loop/loss_normalization.py).
    _loss_reduction: Any
    # True in an evaluation that needs logits, which `chunked_loss` leaves out.
    _needs_logits: bool
    # `compute_loss` has computed a loss over chunks.
    _has_chunked_loss: bool

    def _get_batch_copies(self) -> int:
        """Return the number of processes with the same batch."""


def compute_loss_and_outputs(
    settings: LossSettings, model: Any, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None
) -> tuple[torch.Tensor, Any]:
    """Run the model, and return the loss and the outputs.

    The loss is that of `compute_loss_func` if there is such a function, else of the label smoother, else of the model.

    Raises:
        ValueError: the model returned no loss.
        TypeError: the batch has no named entries.
    """
    labels, is_chunked = None, settings.args.chunked_loss and is_loss_chunked(settings._needs_logits)
    # A chunked loss is smoothed within the model.
    smoother = None if is_chunked else settings.label_smoother
    if (settings.compute_loss_func is not None or smoother is not None) and "labels" in inputs:
        labels = inputs.pop("labels")
    elif settings.compute_loss_func is not None:
        labels = _get_labels(settings, inputs, model)
    reduction = settings._loss_reduction
    # A plain mean is weighted below. Passing `num_items_in_batch` might make the model divide as well.
    is_weighted = not reduction.divides and num_items_in_batch is not None
    if settings.model_accepts_loss_kwargs and num_items_in_batch is not None and not is_weighted:
        inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
    if not hasattr(inputs, "keys"):
        raise make_unnamed_batch_error(inputs, model)
    if labels is not None and settings.compute_loss_func is None:
        return _smoothed_loss_and_outputs(smoother, model, inputs, labels, num_items_in_batch)
    if is_chunked:
        smoother = settings.label_smoother if "labels" in inputs else None
        outputs, smoothed = call_without_logits(model, inputs, smoother, num_items_in_batch)
        settings._has_chunked_loss = True
    else:
        outputs, smoothed = model(**inputs), None
    if settings.compute_loss_func is not None:
        if labels is None:
            names = " and ".join(map(repr, settings.label_names)) or "'labels'"
            logger.warning("compute_loss_func is called with labels=None: the batch has no %s.", names)
        return settings.compute_loss_func(outputs, labels, num_items_in_batch=num_items_in_batch), outputs
    loss = _extract_loss(settings, outputs, model, inputs)
    # With sequence parallelism the outputs' loss, smoothed too, is a sum over processes, and has no auxiliary terms.
    if smoothed is not None and settings._get_batch_copies() == 1:
        # Auxiliary loss terms are left out, as by a smoother; `0 * loss` keeps them in the graph, as DDP and FSDP need.
        return smoothed + 0 * loss, outputs
    return reduction.weight(loss, inputs, num_items_in_batch) if is_weighted else loss, outputs


def _get_labels(settings: LossSettings, inputs: dict[str, Any], model: Any) -> Any:
    """Return the entries `label_names` of the batch, as a tuple if there are several; None if any is missing.

    Labels that `forward` does not take are removed from the batch.
    """
    names = settings.label_names
    if not names or not all(name in inputs for name in names):
        return None
    accepted = find_accepted_columns(model, [])
    labels = tuple(inputs[name] if name in accepted else inputs.pop(name) for name in names)
    return labels[0] if len(labels) == 1 else labels


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


def _extract_loss(settings: LossSettings, outputs: Any, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    if isinstance(outputs, dict):
        loss = outputs.get("loss")
        if isinstance(loss, torch.Tensor):
            return loss
        returned = f"a dict with {', '.join(map(repr, outputs))}"
        if "loss" in outputs:
            returned += f" in which 'loss' is {_describe_value(loss)}"
    else:
        is_filled = hasattr(outputs, "__getitem__") and getattr(outputs, "shape", True) != () and len(outputs) > 0
        loss = outputs[0] if is_filled else None
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            return loss
        returned = _describe_value(outputs)
        if is_filled and not isinstance(outputs, torch.Tensor):
            returned = f"a {type(outputs).__name__} that begins with {_describe_value(loss)}"
    hint = advise_on_model_kind(model) or "Return the loss under the key 'loss' or as the first element of a tuple"
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


def _describe_value(value: Any) -> str:
    if value is None:
        return "None"
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
    empty = "an empty" if isinstance(value, (tuple, list)) and not value else "a"
    return f"{empty} {type(value).__name__}{shape}"


def scale_for_accumulation(
    settings: LossSettings, loss: torch.Tensor, num_items_in_batch: torch.Tensor | int | None
) -> torch.Tensor:
    """Divide the loss by the number of micro-batches, unless it is divided by the window's label tokens already."""
    is_divided = settings.loss_is_scaled_for_ga
    if is_divided is None:
        accepts_number = settings.model_accepts_loss_kwargs or settings._loss_reduction.is_exact
        is_divided = (accepts_number and num_items_in_batch is not None) or settings.compute_loss_func is not None
        is_divided = is_divided and not reduces_to_micro_batch_mean(settings)
    if loss is None:
        raise invalid_loss_error(loss, "compute_loss")
    micro_batches = settings.current_gradient_accumulation_steps
    # A division by 1 would cost two operations.
    return loss if is_divided or micro_batches == 1 else loss / micro_batches


def reduces_to_micro_batch_mean(settings: Any) -> bool:
    """Return whether the loss comes from a compute_loss or training_step that takes no `num_items_in_batch`."""
    # `is True`, since mocks have every attribute.
    return (
        getattr(getattr(settings, "compute_loss", None), MICRO_BATCH_MEAN_MARK, None) is True
        or getattr(getattr(settings, "training_step", None), MICRO_BATCH_MEAN_MARK, None) is True
    )


def invalid_loss_error(returned: Any, method: str) -> TypeError:
    return TypeError(
        f"{method} returned {_describe_value(returned)}, and has to return the loss, a tensor with one number."
    )


def items_in_window(settings: LossSettings, window: list[Any], device: torch.device) -> torch.Tensor | int | None:
    """Return the number of label tokens in a window; None if the loss is not divided by it."""
    reduction = settings._loss_reduction
    accepts_number = settings.model_accepts_loss_kwargs or settings.compute_loss_func is not None or reduction.is_exact
    # A batch that is no mapping raises a clear error later.
    if not accepts_number or not window or not hasattr(window[0], "keys"):
        return None
    number: Any
    if reduction.is_exact and not (reduction.divides and "labels" in window[0]):
        number = sum(reduction.counts(batch).sum().to(device) for batch in window)
    elif "labels" not in window[0]:
        return None
    else:
        number = count_label_tokens(window, settings._loss_shifts_labels)
    if isinstance(number, torch.Tensor) and should_sum_over_processes(settings):
        # Processes with the same batch have counted the same labels.
        number = reduce_across_processes(number.to(device)) / settings._get_batch_copies()
    # Dividing by 1 makes the number a float tensor, as in transformers: a bfloat16 loss divided by a float tensor is
    # float32, and divided by an integer tensor would stay bfloat16.
    return number.to(device) / 1 if isinstance(number, torch.Tensor) else number


def should_sum_over_processes(settings: LossSettings) -> bool:
    """Return whether label tokens are counted over all processes, so that all tokens weigh the same."""
    return settings.args.world_size > 1 and settings.args.average_tokens_across_devices


def scale_for_gradient_mean(
    settings: LossSettings, loss: torch.Tensor, num_items_in_batch: torch.Tensor | int | None
) -> torch.Tensor:
    """Multiply the loss in place by the number of data-parallel processes, if it is divided by the tokens of all.

    DDP averages gradients over the processes, while gradients of such losses have to be summed.
    """
    accepts_number = settings.model_accepts_loss_kwargs or settings.compute_loss_func is not None
    accepts_number = accepts_number or settings._loss_reduction.is_exact
    if accepts_number and num_items_in_batch is not None and should_sum_over_processes(settings):
        loss *= settings.args.world_size // settings._get_batch_copies()
    return loss


def mean_over_processes(value: torch.Tensor) -> float:
    return gather_across_processes(value).mean().item() if get_world_size() > 1 else value.item()


class HostValues:
    """Cache of scalar tensors' values on the host, since each single read would wait for the device."""

    def __init__(self) -> None:
        # id of a tensor -> the tensor (kept, so that no other tensor gets its id), its version, and its value.
        self._read: dict[int, tuple[torch.Tensor, int, float]] = {}

    def prefetch(self, values: Sequence[Any]) -> None:
        """Replace the cache, in a single transfer."""
        # Float64 tensors are left out, since the transfer is in float32, and inference tensors, since they have no
        # version, which would show in-place changes.
        tensors = [value for value in values if type(value) is torch.Tensor and value.dtype is not torch.float64]
        tensors = [tensor for tensor in tensors if tensor.numel() == 1 and not tensor.is_inference()]
        self._read = {}
        if tensors:
            device = tensors[0].device
            with torch.no_grad():
                # The comparison is faster than conversions that change nothing.
                scalars = [
                    tensor
                    if tensor.dim() == 0 and tensor.dtype is torch.float32 and tensor.device == device
                    else tensor.reshape(()).to(device, torch.float32)
                    for tensor in tensors
                ]
                numbers = torch.stack(scalars).tolist()
            for tensor, number in zip(tensors, numbers, strict=True):
                self._read[id(tensor)] = tensor, tensor._version, number

    def put(self, tensor: torch.Tensor, value: float) -> None:
        self._read[id(tensor)] = tensor, tensor._version, value

    def to_list(self, values: Sequence[Any]) -> list[float]:
        """Return all numbers, after at most a single transfer for all tensors that `prefetch` can cache."""
        for value in values:
            if isinstance(value, torch.Tensor):
                entry = self._read.get(id(value))
                # Inference tensors, which have no version, are never cached.
                if entry is None or entry[1] != value._version:
                    self.prefetch(values)
                    break
        return [self._read[id(value)][2] if id(value) in self._read else float(value) for value in values]

    def to_float(self, value: Any) -> float:
        entry = self._read.get(id(value))
        return entry[2] if entry is not None and entry[1] == value._version else float(value)


class RunningLoss:
    """Sums of the micro-batches' losses: since the last log, and up to the last log.

    Losses are stored until a log reads the sum, and added then, since adding and filtering a loss takes seven torch
    operations. The sum is the same, bit for bit, as if each loss had been added immediately.

    Attributes:
        before_last_log: sum up to the last log, on the host.
    """

    MAX_PENDING = 8192

    def __init__(self, device: torch.device | None = None, step: int = 0, values: HostValues | None = None):
        self.before_last_log = 0.0
        self.step_of_last_log = step
        self.values = HostValues() if values is None else values
        # Not torch.tensor(0.0), whose copy to the device would wait.
        self._sum = torch.zeros((), device=device)
        # Two lists, since a tuple for each loss would start Python's garbage collection earlier.
        self._pending: list[torch.Tensor | float] = []
        self._pending_steps: list[int] = []
        self._is_filtered = False

    @property
    def since_last_log(self) -> torch.Tensor:
        """Sum since the last log, which may be set or changed in place."""
        self._add_pending()
        return self._sum

    @since_last_log.setter
    def since_last_log(self, value: torch.Tensor) -> None:
        self._sum = value
        self._pending, self._pending_steps = [], []

    def add(self, loss: torch.Tensor, step: int, filter_non_finite: bool) -> torch.Tensor | float:
        """Add the loss of a micro-batch, and return its value if it is on the CPU, else a copy.

        Parameters:
            filter_non_finite: count a nan or infinite loss as the mean loss of a step since the last log.

        Raises:
            TypeError: the loss is no tensor.
            RuntimeError: the loss is more than one number.
        """
        steps_since_logging = step - self.step_of_last_log
        try:
            can_be_pending = (
                loss.dim() == 0 and loss.dtype is torch.float32 is self._sum.dtype and loss.device == self._sum.device
            )
        except AttributeError:
            raise invalid_loss_error(loss, "training_step or compute_loss") from None
        if not can_be_pending or filter_non_finite is not self._is_filtered or len(self._pending) >= self.MAX_PENDING:
            self._add_pending(on_host=len(self._pending) >= self.MAX_PENDING)
            self._is_filtered = filter_non_finite
        if can_be_pending:
            # CUDA graphs of a compiled model overwrite the loss.
            number = loss.item() if is_on_cpu(loss) else loss.detach().clone()
            self._pending.append(number)
            self._pending_steps.append(steps_since_logging)
            return number
        if loss.numel() != 1:
            # The error class that torch's backward would raise.
            raise RuntimeError(
                f"The loss has the shape {tuple(loss.shape)}, and has to be one number: take its mean, as "
                "reduction='mean' and loss.mean() do, in forward, compute_loss or compute_loss_func."
            )
        loss_copy = loss.detach().clone()
        add_to_running_loss(self._sum, loss_copy, steps_since_logging, filter_non_finite)
        return loss_copy

    def unread(self) -> list[torch.Tensor | float]:
        """Return the numbers that make up the sum since the last log."""
        return [self._sum, *self._pending]

    def _add_pending(self, on_host: bool = True) -> None:
        numbers = self.unread()
        pending = list(zip(self._pending, self._pending_steps, strict=True))
        self._pending, self._pending_steps = [], []
        if on_host and pending:
            values = np.array(self.values.to_list(numbers), dtype=np.float32)
            if not self._is_filtered or np.isfinite(values[1:]).all():
                # In float32 and in order, as torch adds.
                total = float(np.add.accumulate(values)[-1])
                self._sum.fill_(total)
                self.values.put(self._sum, total)
                return
        for loss, steps_since_logging in pending:
            loss = torch.as_tensor(loss, dtype=torch.float32)
            add_to_running_loss(self._sum, loss, steps_since_logging, self._is_filtered)


def is_on_cpu(loss: torch.Tensor) -> bool:
    """Return whether a loss is a plain tensor on the CPU, which can be read without a device sync."""
    return type(loss) is torch.Tensor and loss.is_cpu


def add_to_running_loss(
    running: torch.Tensor, loss: torch.Tensor, steps_since_logging: int, filter_non_finite: bool
) -> None:
    """Add a loss in place, without a device sync.

    Parameters:
        filter_non_finite: count a nan or infinite loss as the mean loss of a step since the last log.
    """
    if filter_non_finite:
        loss = torch.where(torch.isfinite(loss), loss, running / (1 + steps_since_logging))
    running += loss


@dataclass
class LabelSmoother:
    """Loss of a model's logits with smoothed labels.

    Parameters:
        epsilon: probability that is moved from the true label to all labels evenly.
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
        """Return the loss, divided by `num_items_in_batch` or the labels that count.

        Parameters:
            shift_labels: whether each position predicts the label of the next position.
        """
        logits = model_output["logits"] if isinstance(model_output, dict) else model_output[0]
        if shift_labels:
            logits, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
        nll = -nn.functional.log_softmax(logits, dim=-1)
        if labels.dim() < nll.dim():
            labels = labels.unsqueeze(-1)
        ignored = labels.eq(self.ignore_index)
        # Ignored labels are no valid indices.
        of_label = nll.gather(dim=-1, index=labels.clamp(min=0)).masked_fill(ignored, 0.0)
        # Half precision would overflow over a large vocabulary.
        of_all = nll.sum(dim=-1, keepdim=True, dtype=torch.float32).masked_fill(ignored, 0.0)
        count: Any = num_items_in_batch
        if count is None:
            count = ignored.numel() - ignored.long().sum()
        elif isinstance(count, torch.Tensor):
            count = count.to(of_label.device)
        smoothed = of_all.sum() / (count * nll.shape[-1])
        return (1 - self.epsilon) * (of_label.sum() / count) + self.epsilon * smoothed


def make_label_smoother(model: nn.Module, factor: float) -> LabelSmoother | None:
    """Return the label smoother of a model; None, with a warning, for multi-label classification."""
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
