"""What a head divides its loss by, found out in the first window, and what `loss_normalization="exact"` makes of it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from littrainer.data.resume.rng import get_rng_states, set_rng_states
from littrainer.data.windows import IGNORED_LABEL
from littrainer.distributed.collectives import broadcast_object, gather_across_processes, get_rank
from littrainer.loop.loss import (
    LossSettings,
    compute_loss_and_outputs,
    reduces_to_micro_batch_mean,
    should_average_over_processes,
)
from littrainer.loop.out_of_memory import is_out_of_memory
from littrainer.loop.overrides import find_overrides
from littrainer.model.facts import base_model, unwrap_user_model
from littrainer.runtime.nested_values import map_nested
from littrainer.strategies.full_state import is_sharded

logger = logging.getLogger(__name__)

EXACT = "exact"
# Units that a mean loss averages over.
SAMPLES, LABELS, SHIFTED_LABELS = "samples", "labels", "labels after the first of each row"
# Relative: the rounding of half precision, and of sums in another order.
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 2e-3}
TOLERANCE = 2e-5
INDEXING_OPERATORS = {"gather", "scatter", "scatter_add", "index_select", "index", "index_put", "take", "embedding"}


@dataclass(frozen=True)
class LossReduction:
    """How the loss of a micro-batch is normalised over the window of its optimizer step.

    Parameters:
        is_known: the first window has been looked at.
        is_exact: each sample, or label, weighs the same in all micro-batches and processes.
        divides: the loss is divided by `num_items_in_batch` already: by the model, or by the script's own function.
        unit: what it is a mean over, if it is not.
        label_name: the labels among the inputs.
    """

    is_known: bool = True
    is_exact: bool = False
    divides: bool = True
    unit: str = SAMPLES
    label_name: str = "labels"

    def counts(self, inputs: Any) -> torch.Tensor:
        """Return for each row of a micro-batch how many samples or labels of it count."""
        labels, tokens = inputs.get(self.label_name), inputs.get("input_ids")
        if not isinstance(labels, torch.Tensor) or not labels.dim():
            tensors = (value for value in inputs.values() if isinstance(value, torch.Tensor) and value.dim())
            return torch.ones(next((len(tensor) for tensor in tensors), 1))
        if labels.is_floating_point() or (self.unit == SAMPLES and labels.dim() > 1):
            return labels.new_ones(len(labels))
        if self.unit == SHIFTED_LABELS:
            labels = inputs["shift_labels"] if "shift_labels" in inputs else labels[..., 1:]
        counted = labels.ne(IGNORED_LABEL)
        if self.label_name == "start_positions" and isinstance(tokens, torch.Tensor):
            # Heads for questions pass over answers that begin behind the tokens.
            counted = labels.lt(tokens.shape[-1])
        return counted.reshape(len(labels), -1).sum(1)

    def weighted(self, loss: torch.Tensor, inputs: Any, number: torch.Tensor | int) -> torch.Tensor:
        """Return the part of a micro-batch's mean loss in that of its window, whose counts sum up to a number."""
        count = self.counts(inputs).sum().to(loss.device)
        # Without a label the mean is nan.
        return torch.where(count > 0, loss * (count / number), torch.zeros_like(loss))


UNKNOWN = LossReduction(is_known=False)


def detect_loss_reduction(
    settings: LossSettings, model: nn.Module, window: list[Any], device: torch.device, is_own: bool = False
) -> LossReduction:
    """Find out how a head normalises its loss, and warn if its loss would depend on the layout of the batch.

    There are forward passes only if nothing else tells, and none with a loss function of the script's. Of the script's
    `compute_loss` is only tried whether it returns a mean, if the loss has to be exact.

    Parameters:
        model: as it is wrapped for several processes.
        window: the micro-batches of an optimizer step.
        is_own: the script has its own `compute_loss`, as a subclass of the Trainer may have too.

    Raises:
        ValueError: that `compute_loss` takes `num_items_in_batch`, and returns the mean of its micro-batch.
    """
    if not window:
        return UNKNOWN
    args, is_exact = settings.args, settings.args.loss_normalization == EXACT
    is_own = is_own or bool(find_overrides(settings, ["compute_loss"]))
    is_other = settings.compute_loss_func is not None or settings.loss_is_scaled_for_ga is not None
    # An own `compute_loss` may call the one of the Trainer, whose loss is to be exact.
    is_other = is_other or reduces_to_micro_batch_mean(settings) or (is_own and not is_exact)
    if is_other or not hasattr(window[0], "keys") or not (is_exact or len(window) > 1 or args.world_size > 1):
        return LossReduction(is_exact=is_exact)
    base = base_model(unwrap_user_model(model))
    if settings.model_accepts_loss_kwargs and "num_items_in_batch" in inspect.signature(base.forward).parameters:
        return LossReduction(is_exact=is_exact)
    head = _by_type(settings, model, window[0])
    can_be_tried, trial = _can_be_tried(model), functools.partial(_Trial, settings, model, window, head, device)
    if is_exact:
        is_mean = is_own and can_be_tried and trial().is_own_mean()
        if can_be_tried and not is_own and not (head.divides and settings.label_smoother is not None):
            head = trial().outcome()
        # Counts are summed over the processes.
        head, is_mean = broadcast_object((head, is_mean))
        if not is_mean:
            return head
        raise ValueError(
            f"loss_normalization={EXACT!r} and {type(settings).__name__}, whose compute_loss takes "
            "num_items_in_batch and returns a mean: divide the sum of the micro-batch's losses by it."
        )
    if isinstance(window[0].get(head.label_name), torch.Tensor) and can_be_tried:
        trial().warn_of_layout()
    return LossReduction()


def detect_split_reduction(settings: Any, inputs: Any, number: torch.Tensor | int | None) -> LossReduction:
    """Find out whether the loss of a micro-batch is the sum of those of its parts, or their mean by what counts.

    Its rows are run through the model and the script's `compute_loss`, without gradients, or as many of them as fit.

    Parameters:
        settings, number: the Trainer, and the label tokens in the window.

    Returns:
        a head that says `divides` for the sum; an unknown one without two rows that have labels, or without loss.

    Raises:
        ValueError: it is neither, as that of a loss which compares the rows, or it cannot be computed.
    """
    args, model = settings.args, settings.model
    head = _by_type(settings, model, inputs)
    counts = head.counts(inputs)
    rows = counts.nonzero().flatten().tolist()
    found: LossReduction | None = UNKNOWN
    reason = "is neither a sum nor a mean over rows, as one that compares the rows of a batch"
    # What a forward pass computes in half precision may be returned in float32.
    is_half = args.bf16 or args.fp16 or args.tf32 or any(one.dtype in TOLERANCES for one in model.parameters())
    while len(rows) > 1:
        trial = _Trial(settings, model, [rows_of(inputs, len(counts), rows)], head, args.device)
        trial.loss_of = functools.partial(settings.compute_loss, return_outputs=True)
        trial.number, trial.tolerance = number, max(TOLERANCES.values()) if is_half else TOLERANCE
        try:
            with settings.compute_loss_context_manager(), settings.session.tracked.paused():
                found = trial.of_parts()
        except Exception as error:
            if is_out_of_memory(error) and len(rows) > 2:
                rows = rows[: len(rows) // 2]
                continue
            found, reason = None, f"could not be tried before the first step ({type(error).__name__}: {error})"
        break
    found, reason = broadcast_object((found, reason))
    if found is None:
        raise ValueError(
            f"auto_micro_batch cannot split a micro-batch of {type(unwrap_user_model(model)).__name__}: its loss {reason}. "
            "Leave auto_micro_batch out, and lower per_device_train_batch_size if memory runs out."
        )
    return found


def _by_type(settings: LossSettings, model: Any, inputs: Any) -> LossReduction:
    label_name = next((name for name in ("labels", *settings.label_names) if name in inputs), "labels")
    base = base_model(unwrap_user_model(model))
    code = getattr(inspect.unwrap(type(base).forward), "__code__", None)
    # Heads that hand further keywords to transformers' loss functions.
    divides = settings.model_accepts_loss_kwargs and "loss_function" in getattr(code, "co_names", ())
    divides = divides or settings.label_smoother is not None
    labels = inputs.get(label_name)
    has_rows_of_labels = isinstance(labels, torch.Tensor) and labels.dim() > 1 and not labels.is_floating_point()
    unit = (LABELS, SHIFTED_LABELS)[settings._loss_shifts_labels] if has_rows_of_labels else SAMPLES
    return LossReduction(is_exact=True, divides=divides, unit=unit, label_name=label_name)


def _can_be_tried(model: Any) -> bool:
    # In a model that is split all processes have to go through the same forward passes.
    is_split = is_sharded(model) or any(hasattr(parameter, "ds_numel") for parameter in model.parameters())
    return not is_split and not type(model).__module__.startswith("deepspeed")


class _NoIgnoredIndex(TorchDispatchMode):
    """Raises if a head takes a label of -100 for an index, by which a GPU would stop for good."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.rstrip("_")
        if name in INDEXING_OPERATORS or (name.startswith("nll_loss") and args[-1] != IGNORED_LABEL):
            for leaf in tree_leaves(args[1:]):
                if isinstance(leaf, torch.Tensor) and not leaf.is_floating_point() and leaf.eq(IGNORED_LABEL).any():
                    raise IndexError(f"{name} gets the label {IGNORED_LABEL} as an index")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _tried() -> Iterator[list[str]]:
    """Note that a trial failed, and go on, unless memory ran out or the device is dead."""
    failures: list[str] = []
    try:
        yield failures
    except Exception as error:
        if is_out_of_memory(error) or isinstance(error, getattr(torch, "AcceleratorError", ())):
            raise
        failures.append(f"{type(error).__name__}: {error}")


class _Trial:
    """Forward passes of one micro-batch, for a head of which type and shapes have told as much as they do."""

    def __init__(
        self, settings: LossSettings, model: Any, window: list[Any], head: LossReduction, device: torch.device
    ):
        self.settings, self.model, self.window, self.head = settings, unwrap_user_model(model), window, head
        self.device = device
        self.loss_of: Any = functools.partial(compute_loss_and_outputs, settings)
        self.number: Any = None
        self.tolerance = TOLERANCE
        # A micro-batch without labels reveals nothing.
        inputs = window[0] if len(window) == 1 else max(window, key=lambda batch: int(head.counts(batch).sum()))
        self.inputs: dict[str, Any] = map_nested(
            lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, dict(inputs)
        )

    def outcome(self) -> LossReduction:
        """Return what the loss is divided by already, or what it is a mean over."""
        head, name = self.head, type(self.model).__name__
        taken = "what it divides by num_items_in_batch" if head.divides else f"a mean over {head.unit}"
        reason = "is neither a mean over samples nor one over labels"
        with _tried() as failures, preserve_model_state(self.model):
            is_divided = self._undivided_share() == 0
            unit = None if is_divided else self._unit()
            if is_divided or unit is not None:
                return replace(head, divides=is_divided, unit=unit or head.unit)
            head = replace(head, divides=False)
        if failures:
            reason = f"could not be tried before the first step ({failures[0]})"
        self._warn(f"loss_normalization={EXACT!r}: the loss of {name} {reason}. It is taken for {taken}.")
        return head

    def is_own_mean(self) -> bool:
        """Whether the script's own `compute_loss` returns a mean: as much for a row as for the same row twice."""
        settings: Any = self.settings
        counts, losses = self.head.counts(self.inputs), [0.0, 1.0]
        rows = [rows_of(self.inputs, len(counts), [int(counts.argmax())] * number) for number in (1, 2)]
        # `compute_loss` may fail outside of training, or call the Trainer's.
        with _tried(), preserve_model_state(self.model), settings.session.tracked.paused():
            self.loss_of = functools.partial(settings.compute_loss, return_outputs=True)
            settings.session.loss_reduction = self.head
            losses = [self._loss(inputs, counts.sum().to(self.device))[0].item() for inputs in rows]
            settings.session.loss_reduction = UNKNOWN
        return losses[0] != 0 and math.isclose(*losses, rel_tol=max(TOLERANCES.values()))

    def of_parts(self) -> LossReduction | None:
        """Return how losses of parts make up that of the whole: None if they do not, unknown if it is 0 or nan."""
        with preserve_model_state(self.model):
            loss, *losses = [self._loss(part)[0].item() for part in self._halves()]
            if loss == 0 or not math.isfinite(loss):
                return UNKNOWN
            is_sum = math.isclose(sum(losses), loss, rel_tol=self.tolerance)
            unit = self.head.unit if is_sum else self._unit()
        return None if unit is None else replace(self.head, divides=is_sum, unit=unit)

    def warn_of_layout(self) -> None:
        """Warn if the loss depends on the number of micro-batches or processes, or labels do not weigh the same."""
        settings, steps = self.settings, len(self.window)
        processes = settings.args.world_size // settings.get_tp_size() if should_average_over_processes(settings) else 1
        ratios = {unit: self._ratio_of_counts(unit) for unit in (self.head.unit, SAMPLES)}
        # Answers to questions are not counted.
        takes_number = settings.model_accepts_loss_kwargs and self.head.label_name == "labels"
        factor = steps * processes if takes_number else 1
        share, unit = 0.0, None
        # A rare head fails in evaluation mode.
        with _tried(), preserve_model_state(self.model):
            share = self._undivided_share() if takes_number else 1.0
            if share and factor == 1 and max(ratios.values()) > 1:
                unit = self._unit()
        ratio = ratios[SAMPLES if unit == SAMPLES else self.head.unit]
        if share > 0 and factor > 1:
            layout = f"{steps} micro-batch{'es' if steps > 1 else ''}"
            layout += f" in each of {processes} processes" if processes > 1 else ""
            part = "its loss" if share > 0.999 else "a part of its loss"
            trouble = (
                f"takes num_items_in_batch and does not divide {part} by it, so that with {layout} in an optimizer "
                f"step {part} and the gradients are {factor} times too large, as in transformers"
            )
        elif unit is not None and ratio > 1:
            one = "sample" if unit == SAMPLES else "label"
            trouble = (
                f"returns means over the {one}s of a micro-batch, so that a {one} of a micro-batch with few weighs up "
                f"to {ratio:.3g} times as much as one with many in the same optimizer step, as in transformers"
            )
        else:
            return
        advice = f"Set loss_normalization={EXACT!r} for a loss that does not depend on the layout of the batch."
        self._warn(f"{type(self.model).__name__} {trouble}. {advice}")

    def _ratio_of_counts(self, unit: str) -> float:
        # All processes call this, with windows that need not be as long.
        head = replace(self.head, unit=unit)
        counts = [number for number in (float(head.counts(batch).sum()) for batch in self.window) if number]
        ends = torch.tensor([min(counts, default=math.inf), max(counts, default=0.0)], device=self.device)
        ends = gather_across_processes(ends).reshape(-1, 2) if self.settings.args.world_size > 1 else ends[None]
        return (ends[:, 1].max() / ends[:, 0].min()).item()

    def _loss(self, inputs: dict[str, Any], number: Any = None) -> tuple[torch.Tensor, Any]:
        loss, outputs = self.loss_of(
            self.model, dict(inputs), num_items_in_batch=self.number if number is None else number
        )
        return loss.mean(), outputs

    def _undivided_share(self) -> float:
        """Return the part of the loss that does not depend on `num_items_in_batch`, from 0 to 1."""
        if not (self.settings.model_accepts_loss_kwargs or self.settings.label_smoother is not None):
            return 1.0
        infinite = torch.tensor(float("inf"), device=self.device)
        left = self._loss(self.inputs, infinite)[0].abs().item()
        return left and left / self._loss(self.inputs)[0].abs().item()

    def _unit(self) -> str | None:
        head, inputs = self.head, self.inputs
        names = [name for name in self.settings.label_names if isinstance(inputs.get(name), torch.Tensor)]
        if len({inputs[name].dim() for name in names}) > 1:
            # The loss has several terms, such as masked tokens and the next sentence.
            return None
        units = [SAMPLES] if head.unit == SAMPLES else [head.unit, *{LABELS, SHIFTED_LABELS} - {head.unit}, SAMPLES]
        loss, outputs = self._loss(inputs)
        found = list(outputs.values()) if hasattr(outputs, "values") else list(outputs)
        tensors = [value for value in found if isinstance(value, torch.Tensor) and value.dim()]
        tolerance = max([self.tolerance, *(TOLERANCES.get(tensor.dtype, 0.0) for tensor in (loss, *tensors))])
        if head.unit != SAMPLES:
            labels = inputs[head.label_name]
            for logits in (tensor for tensor in tensors if tensor.shape[:-1] == labels.shape):
                for unit in units[:2]:
                    if math.isclose(_cross_entropy(logits, inputs, labels, unit), loss.item(), rel_tol=tolerance):
                        return unit
        whole, *parts = self._halves()
        fitting = self._fitting(units, whole, parts, tolerance)
        # Rows with as many labels each tell units apart if some labels of the second half do not count.
        if len(fitting) > 1:
            for name in {head.label_name, "shift_labels"} & inputs.keys():
                labels = parts[1][name]
                counted = labels.ne(IGNORED_LABEL)
                labels = labels.masked_fill(counted & (counted.cumsum(-1) % 2 == 0), IGNORED_LABEL)
                parts[1][name], whole[name] = labels, torch.cat([parts[0][name], labels])
            with _NoIgnoredIndex():
                fitting = self._fitting(fitting, whole, parts, tolerance) or fitting
        return fitting[0] if fitting else None

    def _halves(self) -> list[dict[str, Any]]:
        """Return both parts of the micro-batch together, then each of them."""
        rows = len(self.head.counts(self.inputs))
        first, second = ([*range(rows // 2)], [*range(rows // 2, rows)]) if rows > 1 else ([0], [0])
        return [rows_of(self.inputs, rows, indices) for indices in (first + second, first, second)]

    def _fitting(self, units: list[str], whole: Any, parts: list[Any], tolerance: float) -> list[str]:
        """Return the units over which the loss of a micro-batch is the mean of those of its two parts."""
        loss, losses, found = self._loss(whole)[0], torch.stack([self._loss(part)[0] for part in parts]), []
        for unit in units:
            head = replace(self.head, unit=unit)
            counts = torch.stack([head.counts(part).sum() for part in parts]).to(losses.device)
            mean = torch.where(counts > 0, losses * counts, 0.0).sum() / counts.sum()
            if math.isclose(mean.item(), loss.item(), rel_tol=tolerance):
                found.append(unit)
        return found

    def _warn(self, text: str) -> None:
        if get_rank() == 0:
            logger.warning(text)


def row_count(value: Any) -> Any:
    """Return the rows of an entry of a batch; None if it has none, as a number, and -1 for a mapping."""
    if hasattr(value, "ndim"):
        return len(value) if value.ndim else None
    return -1 if hasattr(value, "keys") else len(value) if isinstance(value, (list, tuple)) else None


def rows_of(inputs: Any, rows: int, indices: slice | list[int]) -> dict[str, Any]:
    """Return some rows of a batch; an entry that does not have as many rows is left as it is."""

    def chosen(value: Any) -> Any:
        if row_count(value) != rows:
            return value
        if isinstance(indices, list) and isinstance(value, (list, tuple)):
            return [value[index] for index in indices]
        return value[indices]

    return {name: chosen(value) for name, value in inputs.items()}


def _cross_entropy(logits: torch.Tensor, inputs: Any, labels: torch.Tensor, unit: str) -> float:
    """Return the mean over labels; nan if some of them are no classes."""
    if unit == SHIFTED_LABELS and "shift_labels" in inputs:
        labels = inputs["shift_labels"]
    elif unit == SHIFTED_LABELS:
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    counted = labels.ne(IGNORED_LABEL)
    if not counted.any() or labels[counted].min() < 0 or labels.max() >= logits.shape[-1]:
        return math.nan
    # Row by row: a copy of all logits in float32 may not fit.
    losses = [
        nn.functional.cross_entropy(row.reshape(-1, row.shape[-1]).float(), targets.flatten(), reduction="sum")
        for row, targets in zip(logits, labels, strict=True)
    ]
    return (torch.stack(losses).sum() / counted.sum()).item()


@contextlib.contextmanager
def preserve_model_state(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, without gradients; put back modes, buffers and generators afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    states = get_rng_states()
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for buffer, value in buffers:
            buffer.data.copy_(value)
        set_rng_states(states)
