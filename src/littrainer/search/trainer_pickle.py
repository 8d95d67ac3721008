"""Serialization of a Trainer for the processes of trials, of `n_jobs` and of Ray Tune.

cloudpickle pickles the script's definitions by value, so that the other process does not run the script.
"""

from __future__ import annotations

import io
import pickle
import sys
from types import FunctionType
from typing import Any

from littrainer.callbacks.progress import PrinterCallback, ProgressCallback, default_progress_callback
from littrainer.lightning_adapter import run_lightning
from littrainer.search.trial import SearchTrainer, release_memory
from littrainer.tracking.base import TrackerCallback

# Attributes that each process creates itself.
ATTRIBUTES_OF_PROCESS = ("_accelerator", "gather_function")


def pack(trainer: SearchTrainer) -> bytes:
    """Pickle a Trainer, without its model, its optimizer and the attributes of this process."""
    release_memory(trainer)
    try:
        import cloudpickle  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "Trials in several processes need cloudpickle, which is not installed: pip install cloudpickle."
        ) from error
    try:
        return _dump(trainer, trainer)
    except Exception as error:
        culprits = [name for name, value in _state_to_send(trainer).items() if not _can_be_pickled(value, trainer)]
        raise TypeError(
            f"The Trainer cannot be sent to the process of a trial, because of trainer.{', trainer.'.join(culprits)} "
            f"({error}). Make what cannot be pickled where the trial needs it, in model_init or in a callback's "
            "on_train_begin, or search one trial at a time (n_jobs=1 on Optuna)."
        ) from error


def unpack(data: bytes) -> Any:
    """Return a packed Trainer, ready for `train()` in this process.

    It prints its logs, since several progress bars would overwrite each other.
    """
    # As in the Trainer's constructor, before any random numbers are drawn.
    run_lightning.import_lightning()
    unpickler = pickle.Unpickler(io.BytesIO(data))
    trainer = unpickler.load()
    # pickle looks up the script's classes there when it saves the arguments.
    for name, value in unpickler.load().items():
        vars(sys.modules["__main__"]).setdefault(name, value)
    state = dict(vars(trainer))
    trainer.create_accelerator_and_postprocess()
    vars(trainer).update(state)
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, TrackerCallback):
            # Some trackers look up the run of their process here.
            callback.on_init_end(trainer.args, trainer.state, trainer.control)
    bars = [trainer.pop_callback(kind) for kind in (ProgressCallback, default_progress_callback())]
    if any(bar is not None for bar in bars):
        trainer.add_callback(PrinterCallback)
    return trainer


def _state_to_send(trainer: SearchTrainer) -> dict[str, Any]:
    # A subclass may select the pickled attributes.
    state: Any = trainer.__reduce_ex__(pickle.HIGHEST_PROTOCOL)[2]
    return {name: value for name, value in state.items() if name not in ATTRIBUTES_OF_PROCESS}


def _can_be_pickled(value: Any, trainer: SearchTrainer) -> bool:
    try:
        _dump(value, trainer)
    except Exception:
        return False
    return True


def _dump(value: Any, trainer: SearchTrainer) -> bytes:
    """Pickle a Trainer, or a value that may refer to it, followed by the script's definitions that it uses."""
    import cloudpickle

    class TrainerPickler(cloudpickle.Pickler):
        """A pickler that omits the state of this process."""

        def reducer_override(self, obj: Any) -> Any:
            if obj is trainer:
                return (object.__new__, (type(obj),), _state_to_send(trainer)) if value is trainer else (type(None), ())
            if isinstance(obj, TrackerCallback):
                return object.__new__, (type(obj),), _state_of_tracker(obj, trainer)
            if isinstance(obj, type | FunctionType) and obj.__module__ == "__main__":
                defined_in_script[obj.__name__] = obj
            return super().reducer_override(obj)

    defined_in_script: dict[str, Any] = {}
    buffer = io.BytesIO()
    pickler = TrainerPickler(buffer)
    pickler.dump(value)
    pickler.dump(defined_in_script)
    return buffer.getvalue()


def _state_of_tracker(tracker: TrackerCallback, trainer: SearchTrainer) -> dict[str, Any]:
    """Return a tracker's state before a run, without open files and connections."""
    state = {name: value if _can_be_pickled(value, trainer) else None for name, value in vars(tracker).items()}
    state["_initialized"] = state["has_failed"] = False
    if tracker.service:
        # Created with each run; without a service it is the user's.
        state["lightning_logger"] = None
    return state
