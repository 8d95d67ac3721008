"""Finding the module whose weights, inputs or outputs first hold a number that is not finite."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

MARGIN = 17


class DebugUnderflowOverflow:
    """Watches every forward pass of a model and stops at the first nan or infinity, telling what led to it.

    For each call of a module it keeps a frame: name and class of the module, and the smallest and largest absolute
    value of each of its weights, inputs and outputs. Slow, and meant for debugging.

    Parameters:
        model: the model to watch.
        max_frames_to_save: frames that are kept and printed.
        trace_batch_nums: batches, counted from 0, whose frames are all printed; nothing is detected in them.
        abort_after_batch_num: stop after this batch.
    """

    def __init__(
        self,
        model: nn.Module,
        max_frames_to_save: int = 21,
        trace_batch_nums: Sequence[int] | None = None,
        abort_after_batch_num: int | None = None,
    ):
        self.model = model
        self.trace_batch_nums = tuple(trace_batch_nums or ())
        self.abort_after_batch_num = abort_after_batch_num
        self.frames: deque[str] = deque(maxlen=max_frames_to_save)
        self.batch_number = 0
        self.detected_overflow = False
        self._names = {module: name for name, module in model.named_modules()}
        self._handles = [module.register_forward_hook(self._after_forward) for module in self._names]

    def remove(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        frame = self._frame(module, inputs, output)
        if self.batch_number in self.trace_batch_nums:
            print(frame)
            self.detected_overflow = False
        else:
            self.frames.append(frame)
        if self.detected_overflow:
            self._stop_at_overflow(module)
        if module is self.model:
            self._end_batch()

    def _frame(self, module: nn.Module, inputs: Any, output: Any) -> str:
        lines = [f"{'':{MARGIN}} {self._names[module]} {type(module).__name__}"]
        values = [
            *module.named_parameters(recurse=False),
            *_named_leaves("input", inputs),
            *_named_leaves("output", output),
        ]
        for name, value in values:
            lines.append(f"{self._range_of(value):>{MARGIN}} {name}")
        return "\n".join(lines)

    def _range_of(self, value: Any) -> str:
        if value is None:
            return "None"
        if not isinstance(value, torch.Tensor):
            return "not a tensor"
        if value.numel() == 0:
            return "empty"
        size = value.detach().abs()
        if not torch.isfinite(size).all():
            self.detected_overflow = True
        return f"{size.min():8.2e} {size.max():8.2e}"

    def _stop_at_overflow(self, module: nn.Module) -> None:
        print(
            f"\nA number that is not finite appeared in batch {self.batch_number}. The last {len(self.frames)} frames:"
        )
        print("\n".join([f"{'abs min':8} {'abs max':8} of", *self.frames]))
        name = self._names[module] or "the model itself"
        raise ValueError(
            f"debug='underflow_overflow': nan or infinity in the forward pass of {name} ({type(module).__name__}) in "
            f"batch {self.batch_number}. The values that led to it are printed above; lower the learning rate, or "
            "train in bf16 or float32 where they are large."
        )

    def _end_batch(self) -> None:
        last = self.abort_after_batch_num
        self.batch_number += 1
        if last is not None and self.batch_number > last:
            raise ValueError(f"DebugUnderflowOverflow stops after batch {last}, as abort_after_batch_num asks.")


def _named_leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    parts: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, tuple):
        parts = enumerate(value)
    else:
        yield name, value
        return
    for key, part in parts:
        yield from _named_leaves(f"{name}[{key}]", part)
