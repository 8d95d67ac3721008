"""Copies of tensors in host memory, for background saves."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from littrainer.runtime.lazy_isinstance import is_a


class HostCopies:
    """Copier of nested states to host memory, which reuses released buffers and keeps tied weights tied."""

    def __init__(self) -> None:
        self._idle: dict[tuple[torch.dtype, torch.Size, bool], list[torch.Tensor]] = {}
        self._in_use: list[tuple[tuple[torch.dtype, torch.Size, bool], torch.Tensor]] = []
        self._storages: dict[tuple[torch.device, int, int], torch.Tensor] = {}

    @torch.no_grad()
    def copy(self, states: Any) -> Any:
        """Copy tensors in dicts, lists and tuples, and anything else by `copy.deepcopy`."""
        self._storages = {}
        copied = self._copy(states)
        for device in {device for device, _, _ in self._storages if device.type == "cuda"}:
            torch.cuda.synchronize(device)
        return copied

    def release(self) -> None:
        for kind, buffer in self._in_use:
            self._idle.setdefault(kind, []).append(buffer)
        self._in_use, self._storages = [], {}

    def _copy(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._copy_tensor(value)
        if type(value) in (list, tuple):
            return type(value)(map(self._copy, value))
        if isinstance(value, Mapping) and hasattr(value, "__setitem__"):
            copied: Any = copy.copy(value)
            for key, item in value.items():
                copied[key] = self._copy(item)
            return copied
        return copy.deepcopy(value)

    def _copy_tensor(self, tensor: Any) -> torch.Tensor:
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        if not plain or tensor.is_conj() or tensor.is_neg():
            if not is_a(tensor, "sharded tensor"):
                return tensor.detach().clone().cpu()
            copied: Any = torch.empty_like(tensor, device="cpu")
            copied.to_local().set_(self._copy_tensor(tensor.to_local()))
            return copied
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        key = (tensor.device, storage.data_ptr(), size)
        if key not in self._storages:
            # Fast path for a tensor that fills its whole storage, so that no view of the storage's bytes is needed.
            if tensor.nbytes == size and tensor.is_contiguous():
                copied = self._storages[key] = self._copy_to_buffer(tensor)
                return copied
            storage_bytes = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            self._storages[key] = self._copy_to_buffer(storage_bytes)
        view = torch.empty(0, dtype=tensor.dtype)
        return view.set_(self._storages[key].untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())

    def _copy_to_buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        kind = (tensor.dtype, tensor.shape, tensor.is_cuda)
        idle = self._idle.get(kind)
        buffer = idle.pop() if idle else torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._in_use.append((kind, buffer))
        return buffer.copy_(tensor, non_blocking=tensor.is_cuda)
