"""Copies of a checkpoint's tensors in host memory, which a thread writes while training continues."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from littrainer.runtime.lazy_isinstance import is_a


class HostCopies:
    """Copies nested states to host memory; that of copies that were given back is used for the next ones.

    Memory is copied piece by piece as the tensors share it, so that tied weights and views stay tied, and a file
    written from the copies is the one that the originals would give.
    """

    def __init__(self) -> None:
        # Number format, shape, and whether a GPU can copy into them by itself -> buffers that nobody reads any more.
        self._idle: dict[tuple[torch.dtype, torch.Size, bool], list[torch.Tensor]] = {}
        self._in_use: list[tuple[tuple[torch.dtype, torch.Size, bool], torch.Tensor]] = []
        # Piece of memory -> its copy, in the copy that is being made.
        self._pieces: dict[tuple[torch.device, int, int], torch.Tensor] = {}

    @torch.no_grad()
    def copy(self, states: Any) -> Any:
        """Copy states: tensors in dicts, lists and tuples; anything else in them by `copy.deepcopy`."""
        self._pieces = {}
        copied = self._copied(states)
        for device in {device for device, _, _ in self._pieces if device.type == "cuda"}:
            torch.cuda.synchronize(device)
        return copied

    def release(self) -> None:
        """Nobody reads the copies made so far any more."""
        for kind, buffer in self._in_use:
            self._idle.setdefault(kind, []).append(buffer)
        self._in_use, self._pieces = [], {}

    def _copied(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if type(value) in (list, tuple):
            return type(value)(map(self._copied, value))
        if isinstance(value, Mapping) and hasattr(value, "__setitem__"):
            # A mapping may have attributes too, as the state dict of a module has.
            copied: Any = copy.copy(value)
            for key, item in value.items():
                copied[key] = self._copied(item)
            return copied
        return copy.deepcopy(value)

    def _tensor(self, tensor: Any) -> torch.Tensor:
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        if not plain or tensor.is_conj() or tensor.is_neg():
            if not is_a(tensor, "sharded tensor"):
                return tensor.detach().clone().cpu()
            # Without gradients it gives its own part, to which the copy's memory is handed.
            copied: Any = torch.empty_like(tensor, device="cpu")
            copied.to_local().set_(self._tensor(tensor.to_local()))
            return copied
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        key = (tensor.device, storage.data_ptr(), size)
        if key not in self._pieces:
            # A tensor that has its memory to itself, as most have, is copied as it is, by one operation of torch.
            if tensor.nbytes == size and tensor.is_contiguous():
                piece = self._pieces[key] = self._copy_of(tensor)
                return piece
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            self._pieces[key] = self._copy_of(whole)
        view = torch.empty(0, dtype=tensor.dtype)
        return view.set_(self._pieces[key].untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())

    def _copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        kind = (tensor.dtype, tensor.shape, tensor.is_cuda)
        idle = self._idle.get(kind)
        buffer = idle.pop() if idle else torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._in_use.append((kind, buffer))
        return buffer.copy_(tensor, non_blocking=tensor.is_cuda)
