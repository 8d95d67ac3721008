"""Checkpoints written by a thread, from copies in host memory, while training goes on (`async_save`)."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Mapping
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from littrainer.checkpoint.atomic_write import in_thread
from littrainer.checkpoint.distributed_save import parts_of_checkpoint, place_of
from littrainer.checkpoint.retention import tidy_checkpoints
from littrainer.checkpoint.writer import CheckpointFiles, SavedTraining, collect_files, note_best_checkpoint
from littrainer.distributed.agreement import failing_together, group_for_writing
from littrainer.errors.lazy_isinstance import is_a

if TYPE_CHECKING:
    from littrainer.callbacks.state import TrainerState
    from littrainer.checkpoint.storage import WholeStorage

logger = logging.getLogger(__name__)

# Methods of a Trainer that a subclass may override, which then have to find the model as it is at that step.
WRITING_METHODS = (
    "_save_checkpoint",
    "save_model",
    "_save",
    "_save_optimizer_and_scheduler",
    "_save_scaler",
    "_save_rng_state",
)


class BackgroundSaveError(RuntimeError):
    """A checkpoint could not be written in the background; the reason is the cause of this error."""


@dataclass
class _Save:
    """One checkpoint that is being written, with the Trainer's state at its step."""

    final: Path
    state: TrainerState
    writing: Future[None]

    def failure(self) -> str:
        error = self.writing.exception()
        return (
            f"{self.final} could not be written in the background ({type(error).__name__}: {error}). Checkpoints "
            "before it are as they were."
        )


class BackgroundSaves:
    """Writes the checkpoints of one training in the background, one at a time.

    The host memory for a copy of model and optimizer is kept from save to save, for as long as this object lives.

    Parameters:
        when_complete: called with a checkpoint's folder and the state of its step when it is complete.
    """

    def __init__(self, when_complete: Callable[[str, TrainerState], None]):
        self._when_complete = when_complete
        self._copies = HostCopies()
        self._current: _Save | None = None
        self._has_told_of_parts = False

    def can_copy(self, storage: WholeStorage) -> bool:
        """Return whether what a checkpoint holds can be copied; if not, warn once, and training waits."""
        if not storage.can_be_copied and not self._has_told_of_parts:
            logger.warning(
                "async_save: what version 1 of FSDP shards cannot be written in the background, so training waits for "
                "its checkpoints. Leave fsdp_config['version'] at 2."
            )
            self._has_told_of_parts = True
        return storage.can_be_copied

    def save(self, training: SavedTraining) -> None:
        """Copy what the checkpoint of this step holds, and begin to write it; the save before has ended."""
        final, args = training.folder, training.args
        note_best_checkpoint(training)
        with contextlib.ExitStack() as stack:
            with parts_of_checkpoint(args, final, stack) as part, training.weights_to_save():
                # What another process completes it has to find: a few bytes, and shards if they are sent to it.
                defers_parts = not place_of(args, final.parent).some_have_own_folder
                files = CheckpointFiles(part, is_deferred=part.seal is not None, defers_parts=defers_parts)
                collect_files(training, files)
                copied = self._copies.copy((files.weights, files.objects, files.parts))
                files.weights, files.objects, files.parts = copied
            group = group_for_writing() if files.parts else None
            state = copy.copy(training.state)
            state.log_history = list(state.log_history)
            unfinished = stack.pop_all()

        def write() -> None:
            with unfinished:
                # Before anything that can fail in one process alone.
                files.write_parts(group)
                if files.is_deferred:
                    files.write()
            if files.is_deferred:
                tidy_checkpoints(args, state, training.run_dir, str(final))

        self._current = _Save(final, state, in_thread(write, f"saving {final.name}"))

    def has_ended(self) -> bool:
        """Return whether this process's part of a checkpoint on its way has been written, or has failed."""
        return self._current is not None and self._current.writing.done()

    def wait(self) -> None:
        """Wait for the checkpoint on its way, if there is one.

        Raises:
            BackgroundSaveError: it could not be written.
        """
        save = self._end_of_current()
        if save is None:
            return
        with failing_together(f"writing {save.final}"):
            if (error := save.writing.exception()) is not None:
                raise BackgroundSaveError(save.failure()) from error
        self._when_complete(str(save.final), save.state)

    def close(self) -> None:
        """Training is over, by an error if a checkpoint is still on its way: wait for it, and log its own error."""
        save = self._end_of_current()
        if save is not None and (error := save.writing.exception()) is not None:
            logger.error(save.failure(), exc_info=error)

    def _end_of_current(self) -> _Save | None:
        save = self._current
        if save is not None:
            futures.wait([save.writing])
            self._current = None
            self._copies.give_back()
        return save


class HostCopies:
    """Copies nested states to host memory; that of copies that were given back is used for the next ones.

    Memory is copied piece by piece as the tensors share it, so that tied weights and views stay tied, and a file
    written from the copies is the one that the originals would give.
    """

    def __init__(self) -> None:
        # Number format, shape, and whether a GPU can copy into them by itself -> buffers that nobody reads any more.
        self._idle: dict[tuple[torch.dtype, torch.Size, bool], list[torch.Tensor]] = {}
        self._in_use: list[tuple[tuple[torch.dtype, torch.Size, bool], torch.Tensor]] = []
        # Of the copy that is being made: piece of memory -> its copy.
        self._pieces: dict[tuple[torch.device, int, int], torch.Tensor] = {}

    @torch.no_grad()
    def copy(self, states: Any) -> Any:
        """Copy states: tensors in dicts, lists and tuples; anything else in them by `copy.deepcopy`."""
        self._pieces = {}
        copied = self._copied(states)
        for device in {device for device, _, _ in self._pieces if device.type == "cuda"}:
            torch.cuda.synchronize(device)
        return copied

    def give_back(self) -> None:
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
            # It may have attributes too, as the state dict of a module has.
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
