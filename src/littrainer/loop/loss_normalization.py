"""The reduction of a model's loss, detected in the first window, and its use by `loss_normalization="exact"`."""

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
    should_sum_over_processes,
)
from littrainer.loop.out_of_memory import is_out_of_memory
from littrainer.loop.overrides import find_overrides
from littrainer.model.facts import base_model, unwrap_user_model
from littrainer.runtime.nested_values import map_nested
from littrainer.strategies.full_state import is_sharded

logger = logging.getLogger(__name__)

EXACT = "exact"
SAMPLES, LABELS, SHIFTED_LABELS = "samples", "labels", "labels after the first of each row"
# Relative tolerances for half precision, and for sums in another order.
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 2e-3}
TOLERANCE = 2e-5
INDEXING_OPERATORS = {"gather", "scatter", "scatter_add", "index_select", "index", "index_put", "take", "embedding"}


@dataclass(frozen=True)
class LossReduction:
    """The reduction of a micro-batch's loss, and its normalization over the window.

    Parameters:
        is_known: the first window has been examined.
        is_exact: each sample, or label, has the same weight in all micro-batches and processes.
        divides: the model or the script's loss function divides by `num_items_in_batch`.
        unit: unit of the mean, if the loss is a mean.
    """

    is_known: bool = True
    is_exact: bool = False
    divides: bool = True
    unit: str = SAMPLES
    label_name: str = "labels"

    def counts(self, inputs: Any) -> torch.Tensor:
        """Count the samples or labels of each row."""
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
            # SQuAD losses ignore spans that begin after the last token.
            counted = labels.lt(tokens.shape[-1])
        return counted.reshape(len(labels), -1).sum(1)

    def weight(self, loss: torch.Tensor, inputs: Any, total: torch.Tensor | int) -> torch.Tensor:
        """Weight a mean loss by its share of the window's total count."""
        count = self.counts(inputs).sum().to(loss.device)
        # Without labels the mean is nan.
        return torch.where(count > 0, loss * (count / total), torch.zeros_like(loss))


UNKNOWN = LossReduction(is_known=False)


def detect_loss_reduction(
    settings: LossSettings, model: nn.Module, window: list[Any], device: torch.device, is_overridden: bool = False
) -> LossReduction:
    """Detect how the model reduces its loss, and warn if it depends on the layout of the batch.

    Forward passes are run only if signatures and types do not suffice. An overridden `compute_loss` is tested only with
    loss_normalization="exact", and only for a mean.

    Raises:
        ValueError: an overridden `compute_loss` takes `num_items_in_batch` and returns the mean of its micro-batch.
    """
    if not window:
        return UNKNOWN
    args, is_exact = settings.args, settings.args.loss_normalization == EXACT
    is_overridden = is_overridden or bool(find_overrides(settings, "compute_loss"))
    is_opaque = settings.compute_loss_func is not None or settings.loss_is_scaled_for_ga is not None
    # An own `compute_loss` may call the Trainer's, whose loss must be exact.
    is_opaque = is_opaque or reduces_to_micro_batch_mean(settings) or (is_overridden and not is_exact)
    if is_opaque or not hasattr(window[0], "keys") or not (is_exact or len(window) > 1 or args.world_size > 1):
        return LossReduction(is_exact=is_exact)
    base = base_model(unwrap_user_model(model))
    if settings.model_accepts_loss_kwargs and "num_items_in_batch" in inspect.signature(base.forward).parameters:
        return LossReduction(is_exact=is_exact)
    reduction = _guess_reduction(settings, model, window[0])
    can_probe, probe = _can_probe(model), functools.partial(_Probe, settings, model, window, reduction, device)
    if is_exact:
        is_mean = is_overridden and can_probe and probe().is_override_mean()
        if can_probe and not is_overridden and not (reduction.divides and settings.label_smoother is not None):
            reduction = probe().detect()
        # Counts are summed over the processes.
        reduction, is_mean = broadcast_object((reduction, is_mean))
        if not is_mean:
            return reduction
        raise ValueError(
            f"loss_normalization={EXACT!r} and {type(settings).__name__}, whose compute_loss takes "
            "num_items_in_batch and returns a mean: divide the sum of the micro-batch's losses by it."
        )
    if isinstance(window[0].get(reduction.label_name), torch.Tensor) and can_probe:
        probe().warn_of_layout()
    return LossReduction()


def detect_split_reduction(settings: Any, inputs: Any, number: torch.Tensor | int | None) -> LossReduction:
    """Detect, without gradients, whether a loss is the sum or the weighted mean of the losses of its parts.

    Returns:
        a reduction that `divides` for a sum; `UNKNOWN` without two rows that have labels, or without loss.

    Raises:
        ValueError: the loss is neither, or cannot be computed.
    """
    args, model = settings.args, settings.model
    guess = _guess_reduction(settings, model, inputs)
    counts = guess.counts(inputs)
    rows = counts.nonzero().flatten().tolist()
    reduction: LossReduction | None = UNKNOWN
    reason = "is neither a sum nor a mean over rows, as one that compares the rows of a batch"
    # Results of half precision may be returned in float32.
    is_half = args.bf16 or args.fp16 or args.tf32 or any(weight.dtype in TOLERANCES for weight in model.parameters())
    while len(rows) > 1:
        probe = _Probe(settings, model, [select_rows(inputs, len(counts), rows)], guess, args.device)
        probe.compute_loss = functools.partial(settings.compute_loss, return_outputs=True)
        probe.number = number
        probe.tolerance = max(TOLERANCES.values()) if is_half else TOLERANCE
        try:
            with settings.compute_loss_context_manager(), settings.session.tracked.paused():
                reduction = probe.detect_split()
        except Exception as error:
            if is_out_of_memory(error) and len(rows) > 2:
                rows = rows[: len(rows) // 2]
                continue
            reduction, reason = None, f"could not be tried before the first step ({type(error).__name__}: {error})"
        break
    reduction, reason = broadcast_object((reduction, reason))
    if reduction is None:
        raise ValueError(
            f"auto_micro_batch cannot split a micro-batch of {type(unwrap_user_model(model)).__name__}: its loss "
            f"{reason}. Leave auto_micro_batch out, and lower per_device_train_batch_size if memory runs out."
        )
    return reduction


def _guess_reduction(settings: LossSettings, model: Any, inputs: Any) -> LossReduction:
    label_name = next((name for name in ("labels", *settings.label_names) if name in inputs), "labels")
    base = base_model(unwrap_user_model(model))
    code = getattr(inspect.unwrap(type(base).forward), "__code__", None)
    # `forward` passes further keywords to a loss function of transformers.
    divides = settings.model_accepts_loss_kwargs and "loss_function" in getattr(code, "co_names", ())
    divides = divides or settings.label_smoother is not None
    labels = inputs.get(label_name)
    has_rows_of_labels = isinstance(labels, torch.Tensor) and labels.dim() > 1 and not labels.is_floating_point()
    unit = (LABELS, SHIFTED_LABELS)[settings._loss_shifts_labels] if has_rows_of_labels else SAMPLES
    return LossReduction(is_exact=True, divides=divides, unit=unit, label_name=label_name)


def _can_probe(model: Any) -> bool:
    # Processes of a sharded model must run the same forward passes.
    shards_weights = is_sharded(model) or any(hasattr(parameter, "ds_numel") for parameter in model.parameters())
    return not shards_weights and not type(model).__module__.startswith("deepspeed")


class _NoIgnoredIndex(TorchDispatchMode):
    """A mode that raises if the label -100 is used as an index, which would end in a device-side assert."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.rstrip("_")
        if name in INDEXING_OPERATORS or (name.startswith("nll_loss") and args[-1] != IGNORED_LABEL):
            for leaf in tree_leaves(args[1:]):
                if isinstance(leaf, torch.Tensor) and not leaf.is_floating_point() and leaf.eq(IGNORED_LABEL).any():
                    raise IndexError(f"{name} gets the label {IGNORED_LABEL} as an index")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _suppress_failures() -> Iterator[list[str]]:
    """Collect errors of a probe, except if memory ran out or the device failed."""
    failures: list[str] = []
    try:
        yield failures
    except Exception as error:
        if is_out_of_memory(error) or isinstance(error, getattr(torch, "AcceleratorError", ())):
            raise
        failures.append(f"{type(error).__name__}: {error}")


class _Probe:
    """Forward passes of a micro-batch that verify or correct a guessed reduction."""

    def __init__(
        self, settings: LossSettings, model: Any, window: list[Any], guess: LossReduction, device: torch.device
    ):
        self.settings = settings
        self.model = unwrap_user_model(model)
        self.window = window
        self.guess = guess
        self.device = device
        self.compute_loss: Any = functools.partial(compute_loss_and_outputs, settings)
        self.number: Any = None
        self.tolerance = TOLERANCE
        # A micro-batch without labels reveals nothing.
        inputs = window[0] if len(window) == 1 else max(window, key=lambda batch: int(guess.counts(batch).sum()))
        self.inputs: dict[str, Any] = map_nested(
            lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, dict(inputs)
        )

    def detect(self) -> LossReduction:
        """Detect a division by `num_items_in_batch`, or the unit of the mean."""
        reduction, name = self.guess, type(self.model).__name__
        default = "what it divides by num_items_in_batch" if reduction.divides else f"a mean over {reduction.unit}"
        reason = "is neither a mean over samples nor one over labels"
        with _suppress_failures() as failures, preserve_model_state(self.model):
            is_divided = self._measure_undivided_share() == 0
            unit = None if is_divided else self._detect_unit()
            if is_divided or unit is not None:
                return replace(reduction, divides=is_divided, unit=unit or reduction.unit)
            reduction = replace(reduction, divides=False)
        if failures:
            reason = f"could not be tried before the first step ({failures[0]})"
        self._warn(f"loss_normalization={EXACT!r}: the loss of {name} {reason}. It is taken for {default}.")
        return reduction

    def is_override_mean(self) -> bool:
        """Return whether the script's `compute_loss` gives the same for a row as for the row repeated."""
        settings: Any = self.settings
        counts, losses = self.guess.counts(self.inputs), [0.0, 1.0]
        batches = [select_rows(self.inputs, len(counts), [int(counts.argmax())] * number) for number in (1, 2)]
        # `compute_loss` may fail outside of training, or call the Trainer's.
        with _suppress_failures(), preserve_model_state(self.model), settings.session.tracked.paused():
            self.compute_loss = functools.partial(settings.compute_loss, return_outputs=True)
            settings.session.loss_reduction = self.guess
            losses = [self._loss(inputs, counts.sum().to(self.device))[0].item() for inputs in batches]
            settings.session.loss_reduction = UNKNOWN
        return losses[0] != 0 and math.isclose(*losses, rel_tol=max(TOLERANCES.values()))

    def detect_split(self) -> LossReduction | None:
        """Return whether losses of parts are added or averaged; None if neither, `UNKNOWN` if the loss is 0 or nan."""
        with preserve_model_state(self.model):
            loss, *losses = [self._loss(part)[0].item() for part in self._split_in_halves()]
            if loss == 0 or not math.isfinite(loss):
                return UNKNOWN
            is_sum = math.isclose(sum(losses), loss, rel_tol=self.tolerance)
            unit = self.guess.unit if is_sum else self._detect_unit()
        return None if unit is None else replace(self.guess, divides=is_sum, unit=unit)

    def warn_of_layout(self) -> None:
        """Warn if the loss depends on the number of micro-batches or processes, or weighs labels differently."""
        settings, steps = self.settings, len(self.window)
        processes = (
            settings.args.world_size // settings._get_batch_copies() if should_sum_over_processes(settings) else 1
        )
        ratios = {unit: self._compute_count_ratio(unit) for unit in (self.guess.unit, SAMPLES)}
        # Span labels are not counted.
        accepts_number = settings.model_accepts_loss_kwargs and self.guess.label_name == "labels"
        factor = steps * processes if accepts_number else 1
        share, unit = 0.0, None
        # Some models fail in evaluation mode.
        with _suppress_failures(), preserve_model_state(self.model):
            share = self._measure_undivided_share() if accepts_number else 1.0
            if share and factor == 1 and max(ratios.values()) > 1:
                unit = self._detect_unit()
        ratio = ratios[SAMPLES if unit == SAMPLES else self.guess.unit]
        if share > 0 and factor > 1:
            layout = f"{steps} micro-batch{'es' if steps > 1 else ''}"
            layout += f" in each of {processes} processes" if processes > 1 else ""
            part = "its loss" if share > 0.999 else "a part of its loss"
            trouble = (
                f"takes num_items_in_batch and does not divide {part} by it, so that with {layout} in an optimizer "
                f"step {part} and the gradients are {factor} times too large, as in transformers"
            )
        elif unit is not None and ratio > 1:
            item = "sample" if unit == SAMPLES else "label"
            trouble = (
                f"returns means over the {item}s of a micro-batch, so that a {item} of a micro-batch with few weighs "
                f"up to {ratio:.3g} times as much as one with many in the same optimizer step, as in transformers"
            )
        else:
            return
        advice = f"Set loss_normalization={EXACT!r} for a loss that does not depend on the layout of the batch."
        self._warn(f"{type(self.model).__name__} {trouble}. {advice}")

    def _compute_count_ratio(self, unit: str) -> float:
        """Return the ratio of the largest to the smallest count over all processes."""
        reduction = replace(self.guess, unit=unit)
        counts = [number for number in (float(reduction.counts(batch).sum()) for batch in self.window) if number]
        ends = torch.tensor([min(counts, default=math.inf), max(counts, default=0.0)], device=self.device)
        ends = gather_across_processes(ends).reshape(-1, 2) if self.settings.args.world_size > 1 else ends[None]
        return (ends[:, 1].max() / ends[:, 0].min()).item()

    def _loss(self, inputs: dict[str, Any], number: Any = None) -> tuple[torch.Tensor, Any]:
        number = self.number if number is None else number
        loss, outputs = self.compute_loss(self.model, dict(inputs), num_items_in_batch=number)
        return loss.mean(), outputs

    def _measure_undivided_share(self) -> float:
        """Return the part of the loss that does not depend on `num_items_in_batch`, from 0 to 1."""
        if not (self.settings.model_accepts_loss_kwargs or self.settings.label_smoother is not None):
            return 1.0
        infinite = torch.tensor(float("inf"), device=self.device)
        undivided = self._loss(self.inputs, infinite)[0].abs().item()
        return undivided and undivided / self._loss(self.inputs)[0].abs().item()

    def _detect_unit(self) -> str | None:
        guess, inputs = self.guess, self.inputs
        names = [name for name in self.settings.label_names if isinstance(inputs.get(name), torch.Tensor)]
        if len({inputs[name].dim() for name in names}) > 1:
            # The loss has several terms, such as masked tokens and next sentence.
            return None
        units = [SAMPLES] if guess.unit == SAMPLES else [guess.unit, *{LABELS, SHIFTED_LABELS} - {guess.unit}, SAMPLES]
        loss, outputs = self._loss(inputs)
        values = list(outputs.values()) if hasattr(outputs, "values") else list(outputs)
        tensors = [value for value in values if isinstance(value, torch.Tensor) and value.dim()]
        tolerance = max([self.tolerance, *(TOLERANCES.get(tensor.dtype, 0.0) for tensor in (loss, *tensors))])
        if guess.unit != SAMPLES:
            labels = inputs[guess.label_name]
            for logits in (tensor for tensor in tensors if tensor.shape[:-1] == labels.shape):
                for unit in units[:2]:
                    if math.isclose(_cross_entropy(logits, inputs, labels, unit), loss.item(), rel_tol=tolerance):
                        return unit
        batch, *halves = self._split_in_halves()
        matches = self._match_units(units, batch, halves, tolerance)
        # Rows with equally many labels fit several units: ignore every second label of the second half.
        if len(matches) > 1:
            for name in {guess.label_name, "shift_labels"} & inputs.keys():
                labels = halves[1][name]
                counted = labels.ne(IGNORED_LABEL)
                halves[1][name] = labels.masked_fill(counted & (counted.cumsum(-1) % 2 == 0), IGNORED_LABEL)
                batch[name] = torch.cat([halves[0][name], halves[1][name]])
            with _NoIgnoredIndex():
                matches = self._match_units(matches, batch, halves, tolerance) or matches
        return matches[0] if matches else None

    def _split_in_halves(self) -> list[dict[str, Any]]:
        """Return the micro-batch and its halves; a single row is repeated."""
        rows = len(self.guess.counts(self.inputs))
        first, second = ([*range(rows // 2)], [*range(rows // 2, rows)]) if rows > 1 else ([0], [0])
        return [select_rows(self.inputs, rows, indices) for indices in (first + second, first, second)]

    def _match_units(self, units: list[str], batch: Any, halves: list[Any], tolerance: float) -> list[str]:
        """Return the units over which the losses of the halves average to the loss of the batch."""
        loss, losses = self._loss(batch)[0], torch.stack([self._loss(half)[0] for half in halves])
        matches = []
        for unit in units:
            reduction = replace(self.guess, unit=unit)
            counts = torch.stack([reduction.counts(half).sum() for half in halves]).to(losses.device)
            mean = torch.where(counts > 0, losses * counts, 0.0).sum() / counts.sum()
            if math.isclose(mean.item(), loss.item(), rel_tol=tolerance):
                matches.append(unit)
        return matches

    def _warn(self, text: str) -> None:
        if get_rank() == 0:
            logger.warning(text)


def count_rows(value: Any) -> Any:
    """Return the rows of an entry; None for a value without rows, and -1 for a mapping."""
    if hasattr(value, "ndim"):
        return len(value) if value.ndim else None
    return -1 if hasattr(value, "keys") else len(value) if isinstance(value, (list, tuple)) else None


def select_rows(inputs: Any, rows: int, indices: slice | list[int]) -> dict[str, Any]:
    """Select rows; entries with another number of rows are unchanged."""

    def select(value: Any) -> Any:
        if count_rows(value) != rows:
            return value
        if isinstance(indices, list) and isinstance(value, (list, tuple)):
            return [value[index] for index in indices]
        return value[indices]

    return {name: select(value) for name, value in inputs.items()}


def _cross_entropy(logits: torch.Tensor, inputs: Any, labels: torch.Tensor, unit: str) -> float:
    """Return the mean over labels; nan if a label is no class."""
    if unit == SHIFTED_LABELS and "shift_labels" in inputs:
        labels = inputs["shift_labels"]
    elif unit == SHIFTED_LABELS:
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    counted = labels.ne(IGNORED_LABEL)
    if not counted.any() or labels[counted].min() < 0 or labels.max() >= logits.shape[-1]:
        return math.nan
    # Row by row, since a float32 copy of all logits may not fit.
    losses = [
        nn.functional.cross_entropy(row.reshape(-1, row.shape[-1]).float(), targets.flatten(), reduction="sum")
        for row, targets in zip(logits, labels, strict=True)
    ]
    return (torch.stack(losses).sum() / counted.sum()).item()


@contextlib.contextmanager
def preserve_model_state(model: nn.Module) -> Iterator[None]:
    """Run a block in evaluation mode without gradients, and restore modes, buffers and generators."""
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
