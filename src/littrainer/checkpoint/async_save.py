"""Checkpoints written by a thread, from copies in host memory, while training goes on (`async_save`)."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Mapping
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from littrainer.checkpoint.atomic_write import in_thread, rotate_checkpoints
from littrainer.checkpoint.checksums import Stamp
from littrainer.checkpoint.distributed_save import StagedPart, filled_together
from littrainer.checkpoint.layout import PREFIX_CHECKPOINT_DIR
from littrainer.checkpoint.storage import storage_of
from littrainer.checkpoint.weights import carries_adapters, without_wrappers, write_weights
from littrainer.checkpoint.writer import (
    CheckpointStates,
    collect_states,
    note_best_checkpoint,
    note_changes_of_callbacks,
    write_companions,
    write_states,
)
from littrainer.distributed.agreement import failing_together

if TYPE_CHECKING:
    from littrainer.callbacks.state import TrainerState
    from littrainer.trainer import Trainer

logger = logging.getLogger(__name__)

# Methods of a Trainer that a subclass may have its own of, which then have to find the model as it is at that step.
WRITING_METHODS = (
    "_save_checkpoint",
    "save_model",
    "_save",
    "_save_optimizer_and_scheduler",
    "_save_scaler",
    "_save_rng_state",
)
# Libraries whose `save_pretrained` writes the weights it is given, and none of its own.
WRITES_WHAT_IT_IS_GIVEN = ("transformers",)


class BackgroundSaveError(RuntimeError):
    """A checkpoint could not be written in the background; the reason is the cause of this error."""


@dataclass
class _Save:
    """One checkpoint on its way.

    Parameters:
        final: its folder.
        state: the Trainer's state at its step.
        writing: the thread's work, which ends with the stamps of its files.
    """

    final: Path
    state: TrainerState
    writing: Future[dict[str, Stamp]]


class BackgroundSaves:
    """Writes the checkpoints of one training in the background, one at a time.

    The host memory for a copy of model and optimizer is kept from save to save, for as long as this object lives.

    Parameters:
        trainer: whose training it is.
    """

    def __init__(self, trainer: Trainer):
        self._trainer = trainer
        self._copies = HostCopies()
        self._current: _Save | None = None
        self._has_told_of_parts = False

    @classmethod
    def for_training(cls, trainer: Trainer) -> BackgroundSaves | None:
        """The one that `async_save` asks for; None where it is not set, or a subclass writes checkpoints itself."""
        if not trainer.args.async_save:
            return None
        overridden = trainer._own_methods(*WRITING_METHODS)
        if overridden:
            logger.warning(
                "async_save: %s has its own %s, which has to find the model as it is at that step, so training waits "
                "for its checkpoints.",
                type(trainer).__name__,
                ", ".join(overridden),
            )
            return None
        return cls(trainer)

    def can_copy(self) -> bool:
        """Whether what a checkpoint holds can be copied; where it cannot, that is told once, and training waits."""
        if storage_of(self._trainer).can_be_copied:
            return True
        if not self._has_told_of_parts:
            logger.warning(
                "async_save: each process writes its part of the model itself, so training waits for its checkpoints."
            )
            self._has_told_of_parts = True
        return False

    def save(self, trial: Any) -> None:
        """Copy what the checkpoint of this step holds, and begin to write it; the save before is waited for.

        Raises:
            BackgroundSaveError: the save before has failed, or there is no memory for the copy.
        """
        self.wait()
        trainer = self._trainer
        if trainer.hp_search_backend is None and trial is None:
            trainer.store_flos()
        run_dir = trainer._get_output_dir(trial=trial)
        final = Path(run_dir) / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
        note_best_checkpoint(trainer, run_dir)
        logger.info(f"Saving model checkpoint to {final}")
        with contextlib.ExitStack() as stack:
            with filled_together(trainer, final, stack) as part:
                weights, states = self._collected(part, run_dir)
                if part.seal is None:
                    # A few bytes, which the process that completes the checkpoint has to find.
                    write_states(states, part.folder)
                else:
                    weights, states.files = self._copied(final, (weights, states.files))
            trainer.control.should_save = False
            state = copy.copy(trainer.state)
            state.log_history = list(state.log_history)
            limit, best = trainer.args.save_total_limit, trainer.state.best_model_checkpoint
            unfinished = stack.pop_all()
        seal = part.seal

        def write() -> dict[str, Stamp]:
            with unfinished:
                if seal is not None:
                    if weights is not None:
                        write_weights(trainer.model, part.folder, weights)
                    seal.add_all()
                    write_states(states, part.folder, seal)
            if seal is not None:
                rotate_checkpoints(run_dir, limit, best, use_mtime=True, newest=str(final))
            return part.stamps

        self._current = _Save(final, state, in_thread(write, f"saving {final.name}"))

    def _collected(self, part: StagedPart, run_dir: str) -> tuple[Any, CheckpointStates]:
        """Weights to write, None where there are none or they are written already, and states beside them."""
        trainer = self._trainer
        held = storage_of(trainer)
        weights: Any = held.weights(trainer)
        optimizer_state = None if trainer.args.save_only_model else held.optimizer_state(trainer)
        if part.seal is not None:
            # Tokenizers must not be used by two threads at once, so their files are written here.
            write_companions(trainer, str(part.folder))
            if weights is None and writes_given_weights(trainer.model):
                weights = trainer.model.state_dict()
            elif weights is None:
                write_weights(trainer.model, part.folder)
        return weights, collect_states(trainer, optimizer_state)

    def _copied(self, final: Path, states: Any) -> Any:
        try:
            return self._copies.copy(states)
        except (MemoryError, RuntimeError) as error:
            raise BackgroundSaveError(
                f"{final}: model and optimizer could not be copied to host memory, as async_save needs it. Make room "
                "there, or leave async_save at False."
            ) from error

    def has_ended(self) -> bool:
        """Whether this process's part of a checkpoint on its way has been written, or has failed."""
        return self._current is not None and self._current.writing.done()

    def wait(self) -> None:
        """Wait for the checkpoint on its way, if there is one, and tell the callbacks.

        Raises:
            BackgroundSaveError: it could not be written.
        """
        save = self._end_of_current()
        if save is None:
            return
        with failing_together(f"writing {save.final}"):
            if (error := save.writing.exception()) is not None:
                raise BackgroundSaveError(_failure(save)) from error
        trainer = self._trainer
        control = trainer.control
        asked_meanwhile = control.should_save
        stamps = save.writing.result()
        trainer._sealed_checkpoint = (save.final, stamps) if stamps else None
        with failing_together(f"on_save of callbacks for {save.final}"):
            trainer.control = trainer.callback_handler.on_save(trainer.args, save.state, control)
        trainer.control.should_save = trainer.control.should_save or asked_meanwhile
        note_changes_of_callbacks(trainer)
        if trainer.args.push_to_hub:
            trainer._push_from_checkpoint(str(save.final))

    def close(self) -> None:
        """Training is over, by an error if a checkpoint is still on its way: wait for it, and log its own error."""
        save = self._end_of_current()
        if save is not None and (error := save.writing.exception()) is not None:
            logger.error(_failure(save), exc_info=error)

    def _end_of_current(self) -> _Save | None:
        save = self._current
        if save is None:
            return None
        futures.wait([save.writing])
        self._current = None
        self._copies.give_back()
        return save


def _failure(save: _Save) -> str:
    error = save.writing.exception()
    return (
        f"{save.final} could not be written in the background ({type(error).__name__}: {error}). Checkpoints before it "
        "are as they were."
    )


def writes_given_weights(model: Any) -> bool:
    """Whether this model's weights can be written from a copy of its state dict.

    Adapters and quantized weights are taken from the model itself, and so may be what a `save_pretrained` of a user's
    own writes; these are written before training goes on.
    """
    inner = without_wrappers(model)
    if carries_adapters(inner) or getattr(inner, "hf_quantizer", None) is not None:
        return False
    save_pretrained = getattr(type(inner), "save_pretrained", None)
    return save_pretrained is None or (save_pretrained.__module__ or "").partition(".")[0] in WRITES_WHAT_IT_IS_GIVEN


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
