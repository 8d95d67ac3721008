"""Windows that are done again in smaller micro-batches if memory runs out (`auto_micro_batch`).

Forward and backward pass of a micro-batch lie in one place, so that nothing holds what a failed one has computed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from littrainer.data.resume.rng import get_rng_states, set_rng_states
from littrainer.data.windows import MicroBatch
from littrainer.distributed.collectives import all_gather_object, raise_on_all_ranks
from littrainer.loop.loss_normalization import UNKNOWN, detect_split_reduction, row_count, rows_of
from littrainer.loop.out_of_memory import free_memory, is_out_of_memory
from littrainer.model.traversal import copy_buffers, list_parameters, restore_buffers
from littrainer.runtime.weak_attributes import weak_property

logger = logging.getLogger(__name__)

Forward = Callable[[nn.Module, Any, Any], torch.Tensor]


class OomMicroBatchSplitter:
    """Runs the micro-batches of a window forward and backward, in parts if memory has run out before.

    What a window begins with (gradients, buffers, generators) is kept until it is done. Several processes add gradients
    up by themselves; at the end of a window they agree on what fits, and average the gradients.

    Parameters:
        settings: the Trainer, whose model, accelerator and loss count.

    Attributes:
        max_elements: the most rows x elements of a row that are known to fit into memory; None until memory runs out.
        last_warned: the `max_elements` that a warning has named.
    """

    _settings = weak_property("_trainer")

    def __init__(self, settings: Any):
        self._settings = settings
        self._is_alone = settings.args.world_size == 1
        self.max_elements: int | None = None
        self.last_warned: int | None = None
        # How the losses of parts make up that of a micro-batch.
        self._head = UNKNOWN
        self._window: list[MicroBatch] = []
        self._error: Exception | None = None

    def forward_micro_batch(self, micro_batch: MicroBatch, forward: Forward) -> torch.Tensor:
        """Run a micro-batch forward and backward, and return its loss.

        Parameters:
            forward: takes model, inputs and the label tokens of the window; returns the loss to call backward on.

        Raises:
            RuntimeError: memory runs out even with one row; in several processes, at the end of the window.
            ValueError: the micro-batch cannot be split, or its loss is no sum or mean over rows.
        """
        if not micro_batch.position:
            self._begin(micro_batch)
        self._window.append(micro_batch)
        pending, loss = [micro_batch], None
        while loss is None and self._error is None:
            loss = self._loss_unless_out_of_memory(pending, forward)
            if loss is None:
                self._put_back()
                pending = self._window
        if micro_batch.is_last_drawn:
            self._end()
        return torch.zeros((), device=self._settings.args.device) if loss is None else loss

    def _begin(self, micro_batch: MicroBatch) -> None:
        settings = self._settings
        wrapped = getattr(settings.model_wrapped, "_orig_mod", settings.model_wrapped)
        if not self._is_alone:
            if not isinstance(wrapped, DistributedDataParallel):
                raise ValueError("auto_micro_batch needs DDP around the model, and _wrap_model has put none there.")
            if wrapped.broadcast_buffers and wrapped.modules_buffers:
                wrapped._sync_buffers()
            # No forward pass does so, since one process may do it again alone.
            wrapped.require_forward_param_sync = False
        if not self._head.is_known:
            _rows_and_elements(micro_batch.inputs)
            self._head = detect_split_reduction(settings, micro_batch.inputs, micro_batch.num_items_in_window)
        self._window, self._error = [], None
        self._gradients = {one: one.grad.clone() for one in list_parameters(settings.model) if one.grad is not None}
        self._buffers = copy_buffers(settings.model)
        self._random_states = get_rng_states()

    def _put_back(self) -> None:
        for parameter in list_parameters(self._settings.model):
            before = self._gradients.get(parameter)
            parameter.grad = None if before is None else before.clone()
        restore_buffers(self._buffers)
        set_rng_states(self._random_states)
        free_memory()

    def _loss_unless_out_of_memory(self, micro_batches: list[MicroBatch], forward: Forward) -> torch.Tensor | None:
        """Return the loss of the last one; None if memory has run out, or an error waits for the other processes."""
        try:
            with self._settings.accelerator.no_sync(self._settings.model_wrapped):
                return [self._forward_and_backward(one, forward) for one in micro_batches][-1]
        except Exception as error:
            if is_out_of_memory(error):
                self._shrink(error)
            elif self._is_alone:
                raise
            else:
                self._error = error
        return None

    def _forward_and_backward(self, micro_batch: MicroBatch, forward: Forward) -> torch.Tensor:
        settings, inputs, number = self._settings, micro_batch.inputs, micro_batch.num_items_in_window
        speed, losses = settings.session.speed, []
        rows, elements = _rows_and_elements(inputs)
        size = self._size_that_fits(rows, elements)
        self._tried = size, elements
        for start in range(0, rows, size):
            part = rows_of(inputs, rows, slice(start, start + size))
            # A copy, from which a script may take entries out.
            loss = forward(settings.model_wrapped, type(inputs)(part), number)
            if size < rows and not self._head.divides:
                loss = self._head.weighted(loss, part, self._head.counts(inputs).sum().to(loss.device))
            speed.enter("backward")
            settings.accelerator.backward(loss)
            losses.append(loss.detach())
            # With what its graph may still hold.
            del loss
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _size_that_fits(self, rows: int, elements: int) -> int:
        """Return the rows of a part: all, half of them, a quarter, ..."""
        limit = self.max_elements if self._head.is_known else None
        while limit is not None and rows > 1 and rows * elements > limit:
            rows = -(-rows // 2)
        return rows

    def _shrink(self, error: Exception) -> None:
        size, elements = self._tried
        if size > 1 and self._head.is_known:
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
            # The other processes raise it too.
            with raise_on_all_ranks("a window of micro-batches"):
                raise self._error
        if not self._is_alone:
            trained = [one for one in list_parameters(settings.model) if one.requires_grad]
            each = all_gather_object((self.max_elements, bytes(one.grad is not None for one in trained)))
            self.max_elements = min((one for one, _ in each if one is not None), default=None)
            with_gradient = map(any, zip(*(has_gradient for _, has_gradient in each), strict=True))
            _average([one for one, is_so in zip(trained, with_gradient, strict=True) if is_so], len(each))
        if self.max_elements != self.last_warned and settings.args.process_index == 0:
            rows, elements = max((_rows_and_elements(one.inputs) for one in self._window), key=math.prod)
            logger.warning(
                "auto_micro_batch: memory ran out in optimizer step %d, which was done again in smaller micro-batches; "
                "later ones are as small. %d of %d rows with %d elements each fit. To begin so, lower "
                "per_device_train_batch_size and raise gradient_accumulation_steps to match.",
                *(settings.state.global_step + 1, self._size_that_fits(rows, elements), rows, elements),
            )
        self.last_warned = self.max_elements


def _rows_and_elements(inputs: Any) -> tuple[int, int]:
    """Return the rows of a micro-batch, and the elements that a row has in its largest entry."""
    entries = dict(inputs.items()) if hasattr(inputs, "items") else {}
    found = {name: row_count(entry) for name, entry in entries.items() if row_count(entry) is not None}
    rows = max(found.values(), default=0)
    if rows < 1 or set(found.values()) != {rows}:
        raise ValueError(
            f"auto_micro_batch splits batches by rows, and this one has entries of unequal length, or none: {found}. "
            "Let data_collator return tensors or lists with one row for each sample, or leave it out."
        )
    return rows, max([1, *(one.numel() // rows for one in entries.values() if isinstance(one, torch.Tensor))])


def _average(parameters: list[nn.Parameter], processes: int) -> None:
    """Let gradients be their mean over the processes, some of which may have none."""
    works: list[tuple[nn.Parameter, torch.Tensor, Any]] = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad /= processes
        # all_reduce sums memory, in whatever order the elements are there.
        gradient = parameter.grad if parameter.grad.is_sparse else parameter.grad.contiguous()
        works.append((parameter, gradient, dist.all_reduce(gradient, async_op=True)))
    for parameter, gradient, work in works:
        work.wait()
        parameter.grad = gradient
