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
from littrainer.callbacks.trainer_context import TrainerContext
from littrainer.lightning_adapter import run_lightning
from littrainer.tracking.base import TrackerCallback

# Attributes that each process creates itself.
ATTRIBUTES_OF_PROCESS = ("_accelerator", "gather_function")


def pack(trainer: TrainerContext) -> bytes:
    """Pickle a Trainer, without its model, its optimizer and the attributes of this process."""
    trainer.release_training_memory()
    try:
        import cloudpickle  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "Trials in several processes need cloudpickle, which is not installed: pip install cloudpickle."
        ) from error
    try:
        return _TrainerPickling(trainer).dump(trainer)
    except Exception as error:
        pickling = _TrainerPickling(trainer)
        culprits = [name for name, value in pickling.state_to_send().items() if not pickling.can_dump(value)]
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


class _TrainerPickling:
    """Pickling of a Trainer, or of values that may refer to it, without the state of this process."""

    def __init__(self, trainer: TrainerContext):
        self.trainer = trainer

    def state_to_send(self) -> dict[str, Any]:
        # A subclass may select the pickled attributes.
        state: Any = self.trainer.__reduce_ex__(pickle.HIGHEST_PROTOCOL)[2]
        return {name: value for name, value in state.items() if name not in ATTRIBUTES_OF_PROCESS}

    def can_dump(self, value: Any) -> bool:
        try:
            self.dump(value)
        except Exception:
            return False
        return True

    def dump(self, value: Any) -> bytes:
        """Pickle a value, followed by the script's definitions that it uses."""
        import cloudpickle

        pickling, trainer = self, self.trainer

        class TrainerPickler(cloudpickle.Pickler):
            def reducer_override(self, obj: Any) -> Any:
                if obj is trainer:
                    is_sent = value is trainer
                    return (object.__new__, (type(obj),), pickling.state_to_send()) if is_sent else (type(None), ())
                if isinstance(obj, TrackerCallback):
                    return object.__new__, (type(obj),), pickling.state_of_tracker(obj)
                if isinstance(obj, type | FunctionType) and obj.__module__ == "__main__":
                    defined_in_script[obj.__name__] = obj
                return super().reducer_override(obj)

        defined_in_script: dict[str, Any] = {}
        buffer = io.BytesIO()
        pickler = TrainerPickler(buffer)
        pickler.dump(value)
        pickler.dump(defined_in_script)
        return buffer.getvalue()

    def state_of_tracker(self, tracker: TrackerCallback) -> dict[str, Any]:
        """Return a tracker's state before a run, without open files and connections."""
        state = {name: value if self.can_dump(value) else None for name, value in vars(tracker).items()}
        state["_initialized"] = state["has_failed"] = False
        if tracker.service:
            # Created with each run; without a service it is the user's.
            state["lightning_logger"] = None
        return state
