"""Batches on their way to an accelerator: the next one is copied while the step with the one before it is computed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from littrainer.ecosystem import known_classes


@functools.cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of CUDA that carries all copies of this process to a device.

    Memory that was allocated for one stream is kept for it: with a stream for each pass over a loader, each would hold
    a batch of its own.
    """
    return torch.cuda.Stream(device)


@dataclass(frozen=True)
class DeviceCopies:
    """Where a loader's batches go, and how.

    Parameters:
        device: an accelerator.
        non_blocking: host memory is never waited for. Else a batch has left it before the next one is prepared, so that
            a collator may fill the same memory again. Neither waits for what the device computes.

    On CUDA a stream of its own carries the copies: in the stream of the computation they would begin when the step
    before has ended, and copies that wait would wait for that step too.
    """

    device: torch.device
    non_blocking: bool = False

    def begun(self, batches: Iterator[Any]) -> Iterator[BatchCopy]:
        """Copies of batches, each of which begins when it is handed out here."""
        stream = copy_stream(self.device) if self.device.type == "cuda" else None
        for batch in batches:
            copy = BatchCopy(self, batch)
            if stream is not None:
                copy.begin(stream)
            yield copy
            if not self.non_blocking:
                copy.leave_host()

    def on_device(self, batch: Any) -> Any:
        """A batch on the device, copied at once as far as it lies elsewhere."""
        return _mapped(self._moved, batch)

    def _moved(self, leaf: Any) -> Any:
        if not callable(getattr(leaf, "to", None)):
            return leaf
        try:
            return leaf.to(self.device, non_blocking=self.non_blocking)
        except TypeError:
            # An object of the script's own, whose method need not take more than the device.
            return leaf.to(self.device)


@dataclass
class BatchCopy:
    """One batch on its way.

    Parameters:
        copies: where it goes.
        batch: what the collator made.
    """

    copies: DeviceCopies
    batch: Any
    _event: Any = None
    _copied: list[torch.Tensor] = field(default_factory=list)

    def begin(self, stream: Any) -> None:
        """Copy in a stream of CUDA, without waiting for the end."""
        with torch.cuda.stream(stream):
            self.batch = _mapped(self._begun, self.batch)
            self._event = stream.record_event()

    def _begun(self, leaf: Any) -> Any:
        if type(leaf) in known_classes("batch of transformers"):
            # Its `to` replaces its data, too.
            leaf.data = {name: self._begun(value) for name, value in leaf.data.items()}
            return leaf
        # The allocator has to be told of each tensor that another stream uses, which sparse and nested ones, and
        # objects of other kinds, do not let it: these are copied when they are needed.
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or leaf.is_nested:
            return leaf
        if leaf.device.type != "cpu":
            return leaf
        self._copied.append(leaf.to(self.copies.device, non_blocking=True))
        return self._copied[-1]

    def leave_host(self) -> None:
        """Wait until the host memory of the batch has been read; a step later that is long done."""
        if self._event is not None:
            self._event.synchronize()

    def arrived(self) -> Any:
        """The batch on the device, for the stream that is current now; the host does not wait."""
        if self._event is not None:
            current = torch.cuda.current_stream(self.copies.device)
            current.wait_event(self._event)
            for tensor in self._copied:
                # Memory of one stream that another one reads is not given away before that one is done.
                tensor.record_stream(current)
            self._copied.clear()
        return self.copies.on_device(self.batch)


def copies_to(device: torch.device, settings: Any) -> DeviceCopies | None:
    """How the batches of a Trainer's loaders get to its device; None where they are there already.

    Parameters:
        settings: of the accelerator; `non_blocking` counts.
    """
    if device.type == "cpu":
        return None
    return DeviceCopies(device, bool(getattr(settings, "non_blocking", False)))


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to what a batch holds, and to objects that move themselves as a whole."""
    if callable(getattr(value, "to", None)):
        return function(value)
    if isinstance(value, Mapping):
        return type(value)({name: _mapped(function, item) for name, item in value.items()})  # type: ignore[call-arg]
    if isinstance(value, (list, tuple)):
        items = (_mapped(function, item) for item in value)
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return function(value)
