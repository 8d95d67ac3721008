"""Copies of states in host memory, as they are at one moment, for a thread that writes them while training goes on."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch


class HostCopies:
    """Copies nested states; the memory of copies that were given back is used for the next ones.

    Memory is copied piece by piece as the tensors share it, so that tied weights and views stay tied, and a file
    written from the copies is the one that the originals would give.
    """

    def __init__(self) -> None:
        # Bytes -> buffers of that size that nobody reads any more.
        self._idle: dict[tuple[int, bool], list[torch.Tensor]] = {}
        self._in_use: list[torch.Tensor] = []

    @torch.no_grad()
    def copy(self, states: Any) -> Any:
        """A copy of states as they are now.

        Parameters:
            states: tensors in dicts, lists and tuples; anything else in them is copied with `copy.deepcopy`.
        """
        one_copy = _OneCopy(self)
        copied = one_copy.of(states)
        for device in one_copy.busy_devices:
            torch.cuda.synchronize(device)
        return copied

    def give_back(self) -> None:
        """Nobody reads the copies made so far any more."""
        for buffer in self._in_use:
            self._idle.setdefault((buffer.numel(), buffer.is_pinned()), []).append(buffer)
        self._in_use = []

    def buffer(self, size: int, pinned: bool) -> torch.Tensor:
        """Host memory of `size` bytes; pinned, so that a GPU can copy into it on its own."""
        idle = self._idle.get((size, pinned))
        found = idle.pop() if idle else torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self._in_use.append(found)
        return found


class _OneCopy:
    def __init__(self, copies: HostCopies) -> None:
        self._copies = copies
        # Piece of memory -> its copy.
        self._pieces: dict[tuple[torch.device, int, int], torch.Tensor] = {}
        self.busy_devices: set[torch.device] = set()

    def of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if type(value) in (dict, list, tuple):
            if isinstance(value, dict):
                return {key: self.of(item) for key, item in value.items()}
            return type(value)(self.of(item) for item in value)
        if isinstance(value, Mapping) and hasattr(value, "__setitem__"):
            # Beside its items it may have attributes, as the state dict of a module has.
            copied: Any = copy.copy(value)
            for key, item in value.items():
                copied[key] = self.of(item)
            return copied
        return copy.deepcopy(value)

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        if not plain or tensor.is_meta or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            return tensor if tensor.is_meta else tensor.detach().clone().cpu()
        storage = tensor.untyped_storage()
        key = (tensor.device, storage.data_ptr(), storage.nbytes())
        piece = self._pieces.get(key)
        if piece is None:
            piece = self._pieces[key] = self._piece(storage)
        view = torch.empty(0, dtype=tensor.dtype)
        return view.set_(piece.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())

    def _piece(self, storage: torch.UntypedStorage) -> torch.Tensor:
        on_gpu = storage.device.type == "cuda"
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        buffer = self._copies.buffer(storage.nbytes(), pinned=on_gpu)
        buffer.copy_(source, non_blocking=on_gpu)
        if on_gpu:
            self.busy_devices.add(storage.device)
        return buffer
