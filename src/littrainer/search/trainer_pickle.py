"""A Trainer as bytes, which the processes of trials get: the workers of `n_jobs`, and Ray Tune's.

cloudpickle sends by value what the script itself defines, so that the other process does not run the script.
"""

from __future__ import annotations

import io
import pickle
import sys
from types import FunctionType
from typing import Any

from littrainer.callbacks.progress import PrinterCallback, ProgressCallback, default_progress_callback
from littrainer.engine import run_lightning
from littrainer.search.trial import release_memory
from littrainer.tracking.base import TrackerCallback

# What belongs to the process, and is made there again.
LEFT_BEHIND = ("_accelerator", "gather_function")


def packed(trainer: Any) -> bytes:
    """Pickle a Trainer that has a `model_init`, without what belongs to this process; its model and optimizer go.

    Raises:
        TypeError: the Trainer holds something that cannot be pickled.
        ImportError: cloudpickle is not installed.
    """
    release_memory(trainer)
    buffer = io.BytesIO()
    try:
        pickler = _pickler(buffer, trainer)
    except ImportError as error:
        raise ImportError(
            "Trials in several processes need cloudpickle, which is not installed: pip install cloudpickle."
        ) from error
    try:
        pickler.dump(trainer)
        pickler.dump(dict(pickler.met_in_script))
    except Exception as error:
        culprits = [name for name, value in _state_to_send(trainer).items() if not _can_be_pickled(value, trainer)]
        raise TypeError(
            f"The Trainer cannot be sent to the process of a trial, because of trainer.{', trainer.'.join(culprits)} "
            f"({error}). Make what cannot be pickled where the trial needs it, in model_init or in a callback's "
            "on_train_begin, or search one trial at a time (n_jobs=1 on Optuna)."
        ) from error
    return buffer.getvalue()


def unpacked(data: bytes) -> Any:
    """Return the Trainer that `packed` was given, ready for `train()` in this process.

    It prints its logs, since the bars of several trainings would write over each other.
    """
    # Lightning is loaded before anything draws random numbers, as when a Trainer is constructed.
    run_lightning.import_lightning()
    unpickler = pickle.Unpickler(io.BytesIO(data))
    trainer = unpickler.load()
    # pickle looks for the script's classes there, when the arguments are saved.
    names = vars(sys.modules["__main__"])
    for name, value in unpickler.load().items():
        names.setdefault(name, value)
    sent = dict(vars(trainer))
    trainer.create_accelerator_and_postprocess()
    vars(trainer).update(sent)
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, TrackerCallback):
            # Some look up the run of their process there.
            callback.on_init_end(trainer.args, trainer.state, trainer.control)
    bars = [trainer.pop_callback(kind) for kind in (ProgressCallback, default_progress_callback())]
    if any(bar is not None for bar in bars):
        trainer.add_callback(PrinterCallback)
    return trainer


def _state_to_send(trainer: Any) -> dict[str, Any]:
    # A subclass may say itself what of it is pickled.
    state: Any = trainer.__reduce_ex__(pickle.HIGHEST_PROTOCOL)[2]
    return {name: value for name, value in state.items() if name not in LEFT_BEHIND}


def _can_be_pickled(value: Any, trainer: Any) -> bool:
    try:
        _pickler(io.BytesIO(), trainer, sends_trainer=False).dump(value)
    except Exception:
        return False
    return True


def _pickler(buffer: io.BytesIO, trainer: Any, sends_trainer: bool = True) -> Any:
    import cloudpickle

    class TrainerPickler(cloudpickle.Pickler):
        """A pickler that knows what of a Trainer belongs to this process."""

        def __init__(self) -> None:
            super().__init__(buffer)
            self.met_in_script: dict[str, Any] = {}

        def reducer_override(self, obj: Any) -> Any:
            if obj is trainer:
                return (_new, (type(obj),), _state_to_send(trainer)) if sends_trainer else (type(None), ())
            if isinstance(obj, TrackerCallback):
                return _new, (type(obj),), _state_of_tracker(obj, trainer)
            if isinstance(obj, type | FunctionType) and obj.__module__ == "__main__":
                self.met_in_script[obj.__name__] = obj
            return super().reducer_override(obj)

    return TrainerPickler()


def _state_of_tracker(tracker: TrackerCallback, trainer: Any) -> dict[str, Any]:
    """Return a tracker's state before it has begun a run: open files and connections cannot be pickled."""
    state = {name: value if _can_be_pickled(value, trainer) else None for name, value in vars(tracker).items()}
    state["_initialized"] = state["has_failed"] = False
    if tracker.service:
        # It is made with the run; a tracker without a service is one for a Lightning logger that the user gave.
        state["lightning_logger"] = None
    return state


def _new(cls: Any) -> Any:
    return cls.__new__(cls)
