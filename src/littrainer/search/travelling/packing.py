"""A Trainer on its way to the process of a trial: as bytes, without what belongs to the process that it was made in.

cloudpickle sends by value what the script itself defines, so that the other process does not run the script.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

from littrainer.callbacks.handler import CallbackHandler
from littrainer.compat.accelerator import AcceleratorFacade
from littrainer.engine import run_lightning
from littrainer.search.travelling.unpicklable import where_it_fails
from littrainer.tracking.base import TrackerCallback

if TYPE_CHECKING:
    from littrainer.trainer import Trainer

# Attributes of a Trainer that a training makes anew, or that belong to the process.
LEFT_BEHIND = frozenset(
    {
        "model",
        "model_wrapped",
        "optimizer",
        "lr_scheduler",
        "accelerator",
        "lightning_trainer",
        "lightning_module",
        "idle_evaluator",
        "validation_rounds",
        "training_run",
        "preemption",
        "update_guard",
        "background_saves",
        "_eval_dataloaders",
        "_signature_columns",
        "_dropped_columns",
        "_tokens",
        "_tr_loss",
        "_sealed_checkpoint",
        "_open_seal",
        "_search",
    }
)
# What callbacks may have kept of a training, as (module, class): None in the other process.
NEVER_SENT = (
    ("lightning.pytorch.trainer.trainer", "Trainer"),
    ("littrainer.engine.module", "TrainerModule"),
    ("littrainer.engine.run_lightning", "Evaluator"),
    ("littrainer.training.run", "TrainingRun"),
)
# Tensors up to this size travel as their bytes; larger ones keep what they share with others.
SMALL_TENSOR_BYTES = 65536
CLOUDPICKLE_IS_MISSING = (
    "Trials in processes of their own need cloudpickle, which is not installed: pip install 'littrainer[tune]'."
)


def packed(trainer: Trainer) -> bytes:
    """A Trainer that has a `model_init` as bytes, for a process that starts with none of the script's state.

    Classes and functions of the script (`__main__`) travel by value, those of modules by name. Model, optimizer,
    schedule and all that Lightning holds stay here, and so do runs that trackers have open.

    Raises:
        TypeError: something that the Trainer holds cannot be pickled; the message says where it is.
        ImportError: cloudpickle is not installed.
    """
    return packed_with(trainer, None)


def packed_with(trainer: Trainer, more: Any) -> bytes:
    """As `packed`, with something else that goes along and may refer to the Trainer or to what it holds.

    Raises:
        TypeError, ImportError: as with `packed`.
    """
    buffer = io.BytesIO()
    pickler = _pickler(buffer, trainer)
    try:
        pickler.dump((trainer, more))
        # What was met on the way; the second part of the stream refers to the first.
        pickler.dump(dict(pickler.met_in_script))
    except Exception as error:
        path, culprit, why = where_it_fails(
            "trainer",
            _state_to_send(trainer),
            lambda value: _pickler(io.BytesIO(), trainer, sends_trainer=False).dump(value),
            error,
        )
        raise TypeError(
            f"The Trainer cannot be sent to the process of a trial: {path} is a {type(culprit).__name__}, and that "
            f"cannot be pickled ({why}). Make it where the trial needs it, in model_init or in a callback's "
            "on_train_begin, or search one trial at a time on Optuna, which runs in this process."
        ) from error
    return buffer.getvalue()


def unpacked(data: bytes) -> Trainer:
    """The Trainer that `packed` was given, ready for `train()` in this process.

    What the script defined is found in this process's `__main__` too, where that has nothing else of the name: pickle
    looks for it there when the arguments are saved.
    """
    return unpacked_with(data)[0]


def unpacked_with(data: bytes) -> tuple[Trainer, Any]:
    """What `packed_with` was given."""
    # Loaded before anything draws random numbers, as when a Trainer is constructed.
    run_lightning.import_lightning()
    unpickler = pickle.Unpickler(io.BytesIO(data))
    trainer, more = unpickler.load()
    names = vars(sys.modules["__main__"])
    for name, value in unpickler.load().items():
        names.setdefault(name, value)
    _settle_in_process(trainer)
    return trainer, more


def _settle_in_process(trainer: Trainer) -> None:
    sent = dict(vars(trainer))
    trainer.model = trainer.model_wrapped = trainer.optimizer = trainer.lr_scheduler = None
    trainer._reset_bookkeeping()
    trainer.create_accelerator_and_postprocess()
    vars(trainer).update(sent)
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, TrackerCallback):
            # Some look up the run of their process there.
            callback.on_init_end(trainer.args, trainer.state, trainer.control)


def _state_to_send(trainer: Trainer) -> dict[str, Any]:
    # A subclass may say itself what of it is pickled.
    state: Any = trainer.__reduce_ex__(pickle.HIGHEST_PROTOCOL)[2]
    kept = {name: value for name, value in state.items() if name not in LEFT_BEHIND}
    if _is_gathering_of_the_trainer(trainer, kept.get("gather_function")):
        del kept["gather_function"]
    return kept


def _is_gathering_of_the_trainer(trainer: Trainer, function: Any) -> bool:
    return getattr(function, "__self__", None) is trainer


def _pickler(buffer: io.BytesIO, trainer: Trainer, sends_trainer: bool = True) -> Any:
    try:
        import cloudpickle
    except ImportError as error:
        raise ImportError(CLOUDPICKLE_IS_MISSING) from error
    never_sent = tuple(_loaded_classes())
    script = sys.modules["__main__"]

    class TrainerPickler(cloudpickle.Pickler):
        """A pickler that knows what of a Trainer belongs to this process."""

        def __init__(self) -> None:
            super().__init__(buffer)
            self.met_in_script: dict[str, Any] = {}

        def reducer_override(self, obj: Any) -> Any:
            if obj is trainer:
                return (_new, (type(obj),), _state_to_send(trainer)) if sends_trainer else (_nothing, ())
            if isinstance(obj, never_sent):
                return _nothing, ()
            if isinstance(obj, AcceleratorFacade):
                return type(obj), (obj._args,)
            if isinstance(obj, CallbackHandler):
                return _new, (type(obj),), {**vars(obj), **dict.fromkeys(HANDED_TO_EVENTS)}
            if isinstance(obj, TrackerCallback):
                return _new, (type(obj),), _state_of_tracker(obj, self._can_be_sent)
            if type(obj) is torch.Tensor and _is_plain_and_small(obj):
                return _tensor_of_bytes, (obj.view(torch.uint8).numpy().tobytes(), obj.dtype, tuple(obj.shape))
            if _is_of_script(obj, script):
                self.met_in_script[obj.__name__] = obj
            return super().reducer_override(obj)

        def _can_be_sent(self, value: Any) -> bool:
            try:
                _pickler(io.BytesIO(), trainer, sends_trainer=False).dump(value)
            except Exception:
                return False
            return True

    return TrainerPickler()


# Of a CallbackHandler: what each training puts there.
HANDED_TO_EVENTS = ("model", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")


def _state_of_tracker(tracker: TrackerCallback, can_be_sent: Callable[[Any], bool]) -> dict[str, Any]:
    """A tracker before it has begun a run: open files and connections are what cannot be pickled of it."""
    state = {name: value if can_be_sent(value) else None for name, value in vars(tracker).items()}
    state["_initialized"] = state["has_failed"] = False
    if tracker.service:
        # Found anew with the run; a tracker without a service is one for a Lightning logger that the user gave.
        state["lightning_logger"] = None
    return state


def _is_of_script(value: Any, script: ModuleType) -> bool:
    if not isinstance(value, (type, FunctionType)) or value.__module__ != "__main__":
        return False
    return vars(script).get(value.__name__) is value


def _loaded_classes() -> list[type]:
    found = (getattr(sys.modules.get(module), name, None) for module, name in NEVER_SENT)
    return [known for known in found if isinstance(known, type)]


def _is_plain_and_small(tensor: torch.Tensor) -> bool:
    """Whether a tensor is no more than its numbers, as those in a dataset's samples are.

    torch pickles each as a file of its own, which takes a hundred times as long.
    """
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and tensor.is_contiguous()
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.dim() > 0
        and 0 < tensor.nbytes <= SMALL_TENSOR_BYTES
        and not tensor.__dict__
    )


def _tensor_of_bytes(content: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)


def _new(cls: Any) -> Any:
    return cls.__new__(cls)


def _nothing() -> None:
    return None
