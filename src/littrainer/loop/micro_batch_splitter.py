"""Windows that are rerun in smaller micro-batches if memory runs out (`auto_micro_batch`)."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from littrainer.data.resume.rng import get_rng_states, set_rng_states
from littrainer.data.windows import MicroBatch
from littrainer.distributed.collectives import all_gather_object, raise_on_all_ranks
from littrainer.loop.loss_normalization import UNKNOWN, count_rows, detect_split_reduction, select_rows
from littrainer.loop.out_of_memory import free_memory, is_out_of_memory
from littrainer.loop.step_policy import StepPolicy
from littrainer.model.traversal import copy_buffers, list_parameters, restore_buffers
from littrainer.runtime.weak_attributes import weak_property

logger = logging.getLogger(__name__)

Forward = Callable[[nn.Module, Any, Any], torch.Tensor]


class OomMicroBatchSplitter(StepPolicy):
    """Forward and backward passes of a window's micro-batches, in parts once memory has run out.

    Gradients, buffers and random states are copied at the start of a window, so that the window can be rerun.
    Processes accumulate gradients separately; at the end of a window they synchronize `max_elements` and average the
    gradients.

    Attributes:
        max_elements: limit of a part's rows times elements per row; None until memory runs out.
    """

    _settings = weak_property("_trainer")

    def __init__(self, settings: Any):
        self._settings = settings
        self._is_alone = settings.args.world_size == 1
        self.max_elements: int | None = None
        self.last_warned: int | None = None
        self._reduction = UNKNOWN
        self._window: list[MicroBatch] = []
        self._error: Exception | None = None

    def forward_and_backward(self, micro_batch: MicroBatch, forward: Forward) -> torch.Tensor:
        """Run forward and backward pass of a micro-batch, and return its loss.

        Both passes run in the same function, so that no variable keeps the graph alive after memory has run out.

        Raises:
            RuntimeError: memory runs out even with a single row. Several processes raise it together, at the end of the
                window.
            ValueError: the micro-batch cannot be split, or its loss is no sum or mean over rows.
        """
        if not micro_batch.position:
            self._begin(micro_batch)
        self._window.append(micro_batch)
        pending, loss = [micro_batch], None
        while loss is None and self._error is None:
            loss = self._loss_unless_out_of_memory(pending, forward)
            if loss is None:
                self._restore()
                pending = self._window
        if micro_batch.is_last_drawn:
            self._end()
        return torch.zeros((), device=self._settings.args.device) if loss is None else loss

    def record(self) -> dict[str, Any]:
        return {"fitting_elements": self.max_elements}

    def resume(self, record: Mapping[str, Any], is_same_data: bool) -> None:
        self.max_elements = self.last_warned = record.get("fitting_elements")

    def _begin(self, micro_batch: MicroBatch) -> None:
        settings = self._settings
        wrapped = getattr(settings.model_wrapped, "_orig_mod", settings.model_wrapped)
        if not self._is_alone:
            if not isinstance(wrapped, DistributedDataParallel):
                raise ValueError("auto_micro_batch needs DDP around the model, and _wrap_model has put none there.")
            if wrapped.broadcast_buffers and wrapped.modules_buffers:
                wrapped._sync_buffers()
            # Forward passes must not synchronize, since a process may rerun them alone.
            wrapped.require_forward_param_sync = False
        if not self._reduction.is_known:
            _count_rows_and_elements(micro_batch.inputs)
            self._reduction = detect_split_reduction(settings, micro_batch.inputs, micro_batch.num_items_in_window)
        self._window = []
        self._error = None
        parameters = list_parameters(settings.model)
        self._gradients = {parameter: parameter.grad.clone() for parameter in parameters if parameter.grad is not None}
        self._buffers = copy_buffers(settings.model)
        self._random_states = get_rng_states()

    def _restore(self) -> None:
        for parameter in list_parameters(self._settings.model):
            gradient = self._gradients.get(parameter)
            parameter.grad = None if gradient is None else gradient.clone()
        restore_buffers(self._buffers)
        set_rng_states(self._random_states)
        free_memory()

    def _loss_unless_out_of_memory(self, micro_batches: list[MicroBatch], forward: Forward) -> torch.Tensor | None:
        """Return the last loss; None if memory has run out, or an error is pending."""
        try:
            with self._settings.accelerator.no_sync(self._settings.model_wrapped):
                return [self._run_in_parts(micro_batch, forward) for micro_batch in micro_batches][-1]
        except Exception as error:
            if is_out_of_memory(error):
                self._shrink(error)
            elif self._is_alone:
                raise
            else:
                self._error = error
        return None

    def _run_in_parts(self, micro_batch: MicroBatch, forward: Forward) -> torch.Tensor:
        settings, inputs, number = self._settings, micro_batch.inputs, micro_batch.num_items_in_window
        speed, losses = settings.session.speed, []
        rows, elements = _count_rows_and_elements(inputs)
        size = self._choose_size(rows, elements)
        self._last_attempt = size, elements
        for start in range(0, rows, size):
            part = select_rows(inputs, rows, slice(start, start + size))
            # Forward gets a copy, since a script may remove entries from it and `part` is needed below.
            loss = forward(settings.model_wrapped, type(inputs)(part), number)
            if size < rows and not self._reduction.divides:
                loss = self._reduction.weight(loss, part, self._reduction.counts(inputs).sum().to(loss.device))
            speed.enter("backward")
            settings.accelerator.backward(loss)
            losses.append(loss.detach())
            # Free the graph before the next forward pass.
            del loss
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _choose_size(self, rows: int, elements: int) -> int:
        """Halve the rows of a part until they fit."""
        limit = self.max_elements if self._reduction.is_known else None
        while limit is not None and rows > 1 and rows * elements > limit:
            rows = -(-rows // 2)
        return rows

    def _shrink(self, error: Exception) -> None:
        size, elements = self._last_attempt
        if size > 1 and self._reduction.is_known:
            self.max_elements = -(-size // 2) * elements
            return
        reason = f"memory runs out even with {size} row(s) of {elements} elements, which cannot be split"
        advice = "Use a smaller model, shorter samples, activation_checkpointing=True or bf16=True"
        failure = type(error)(f"auto_micro_batch: {reason}. {advice}. ({error})")
        if self._is_alone:
            raise failure from error
        self._error = failure

    def _end(self) -> None:
        settings = self._settings
        if self._error is not None:
            with raise_on_all_ranks("a window of micro-batches"):
                raise self._error
        if not self._is_alone:
            trained = [parameter for parameter in list_parameters(settings.model) if parameter.requires_grad]
            has_gradient = bytes(parameter.grad is not None for parameter in trained)
            limits, flags = zip(*all_gather_object((self.max_elements, has_gradient)), strict=True)
            self.max_elements = min((limit for limit in limits if limit is not None), default=None)
            _all_reduce_gradients(list(compress(trained, map(any, zip(*flags, strict=True)))), len(limits))
        if self.max_elements != self.last_warned and settings.args.process_index == 0:
            rows, elements = max(
                (_count_rows_and_elements(micro_batch.inputs) for micro_batch in self._window), key=math.prod
            )
            logger.warning(
                "auto_micro_batch: memory ran out in optimizer step %d, which was done again in smaller micro-batches; "
                "later steps are split too. Micro-batches of %d instead of %d rows (%d elements each) fit. To begin "
                "with this size, lower per_device_train_batch_size and raise gradient_accumulation_steps to match.",
                *(settings.state.global_step + 1, self._choose_size(rows, elements), rows, elements),
            )
        self.last_warned = self.max_elements


def _count_rows_and_elements(inputs: Any) -> tuple[int, int]:
    entries = dict(inputs.items()) if hasattr(inputs, "items") else {}
    counts = {name: count_rows(entry) for name, entry in entries.items() if count_rows(entry) is not None}
    rows = max(counts.values(), default=0)
    if rows < 1 or set(counts.values()) != {rows}:
        raise ValueError(
            f"auto_micro_batch splits batches by rows, and this one has entries of unequal length, or none: {counts}. "
            "Let data_collator return tensors or lists with one row for each sample, or do not set auto_micro_batch."
        )
    return rows, max([1, *(entry.numel() // rows for entry in entries.values() if isinstance(entry, torch.Tensor))])


def _all_reduce_gradients(parameters: list[nn.Parameter], processes: int) -> None:
    """Average gradients over the processes; a missing gradient counts as zero."""
    works: list[tuple[nn.Parameter, torch.Tensor, Any]] = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad /= processes
        # all_reduce sums memory regardless of strides.
        gradient = parameter.grad if parameter.grad.is_sparse else parameter.grad.contiguous()
        works.append((parameter, gradient, dist.all_reduce(gradient, async_op=True)))
    for parameter, gradient, work in works:
        work.wait()
        parameter.grad = gradient
