"""The results of a run, as plain values that can be pickled and compared."""

from __future__ import annotations

import functools
import json
import pickle
import random
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

TORCH_FILES = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "scaler.pt", "pytorch_model.bin")

FILES_OF_OURS_ALONE = ("littrainer_", "hyperparameter_search.json")

CONTROL_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")

EVENTS = (
    "on_init_end",
    "on_train_begin",
    "on_train_end",
    "on_epoch_begin",
    "on_epoch_end",
    "on_step_begin",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_substep_end",
    "on_step_end",
    "on_evaluate",
    "on_predict",
    "on_save",
    "on_log",
    "on_prediction_step",
)


@dataclass
class Record:
    """The results of a scenario; each field after the first two is an aspect that is compared.

    `error` is the traceback if the scenario raised; the other fields are empty then.
    `automatic_optimization` is Lightning's switch after the last train(), None on transformers' side.
    """

    error: str | None = None
    automatic_optimization: bool | None = None
    log_history: list[Any] = field(default_factory=list)
    log_keys: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    weights: dict[str, Any] = field(default_factory=dict)
    random_state: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    events: list[Any] = field(default_factory=list)
    callback_arguments: list[Any] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    trainer_states: dict[str, Any] = field(default_factory=dict)
    json_files: dict[str, Any] = field(default_factory=dict)
    checkpoints: dict[str, Any] = field(default_factory=dict)
    predictions: Any = None
    extra: dict[str, Any] = field(default_factory=dict)


@functools.cache
def read_record(folder: Path, name: str) -> Record:
    """Return the record of a scenario, which has an error if its run did not end."""
    path = folder / f"{name}.pickle"
    if not path.exists():
        return Record(error=f"the run left no record of {name!r}; see {folder / 'log'}")
    record = pickle.loads(path.read_bytes())
    assert isinstance(record, Record)
    return record


EVERY_SCENARIO = (
    "log_history",
    "log_keys",
    "outputs",
    "weights",
    "random_state",
    "state",
    "events",
    "callback_arguments",
    "files",
)
WITH_CHECKPOINTS = ("trainer_states", "json_files", "checkpoints")


def plain(value: Any) -> Any:
    """The value out of plain containers, arrays and numbers only."""
    if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, Enum)):
        return value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, (np.ndarray, np.generic)):
        return value
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    if isinstance(value, list):
        return [plain(item) for item in value]
    return f"<{type(value).__name__}>"


def random_state() -> dict[str, Any]:
    """Return the states of the three global random generators."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (kind, np.array(keys), position, has_gauss, gauss),
        "torch": torch.random.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def control_flags(control: Any) -> dict[str, bool]:
    return {flag: getattr(control, flag) for flag in CONTROL_FLAGS}


def trainer_state(trainer: Any) -> dict[str, Any]:
    """Return the Trainer's state, control flags, the model's mode and the rates of the optimizer."""
    fields = {name: value for name, value in vars(trainer.state).items() if name != "log_history"}
    groups = trainer.optimizer.param_groups if trainer.optimizer is not None else []
    return {
        "state": plain(fields),
        "control": control_flags(trainer.control),
        "training": [module.training for module in trainer.model.modules()],
        "groups": [
            {
                "lr": group["lr"],
                "weight_decay": group.get("weight_decay"),
                "shapes": [list(p.shape) for p in group["params"]],
            }
            for group in groups
        ],
        "gradients": sorted(name for name, p in trainer.model.named_parameters() if p.grad is not None),
    }


def output_value(output: Any) -> Any:
    """A TrainOutput or a metrics dictionary, as plain values."""
    if hasattr(output, "training_loss"):
        return {
            "global_step": output.global_step,
            "training_loss": output.training_loss,
            "metrics": plain(output.metrics),
        }
    return plain(output)


def files_below(folder: Path) -> list[str]:
    # Files outside of the common format are named after their side.
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(FILES_OF_OURS_ALONE)]
    return sorted(path.relative_to(folder).as_posix() for path in files)


def checkpoint_contents(folder: Path, files: list[str]) -> dict[str, Any]:
    """Weights, optimizer, scheduler and random states of every checkpoint, by relative path."""
    contents: dict[str, Any] = {}
    for name in files:
        path = folder / name
        if path.suffix == ".safetensors":
            contents[name] = load_file(path)
        elif path.name in TORCH_FILES:
            contents[name] = plain(torch.load(path, map_location="cpu", weights_only=False))
    return contents


def build_record(
    trainer: Any, outputs: tuple[Any, ...], watcher: Any, folder: Path, predictions: Any, extra: dict[str, Any]
) -> Record:
    """The record of a finished run.

    Parameters:
        trainer: The Trainer, after its last call.
        outputs: What its methods returned, in order.
        watcher: The recording callback of the side.
        folder: The run's working directory; every file below it counts.
        predictions: What predict() returned, or None.
        extra: Further values of the scenario's own.
    """
    files = files_below(folder)
    documents = {name: plain(json.loads((folder / name).read_text())) for name in files if name.endswith(".json")}
    states = {name: value for name, value in documents.items() if name.endswith("trainer_state.json")}
    engine = getattr(trainer, "lightning_trainer", None)
    module = getattr(engine, "lightning_module", None)
    # Offloaded weights have no values, except in checkpoints.
    weights = trainer.model.state_dict()
    return Record(
        automatic_optimization=getattr(module, "automatic_optimization", None),
        log_history=plain(trainer.state.log_history),
        log_keys=[list(entry) for entry in trainer.state.log_history],
        outputs=[output_value(output) for output in outputs],
        weights={name: plain(value) for name, value in weights.items() if not getattr(value, "is_meta", False)},
        random_state=random_state(),
        state=trainer_state(trainer),
        events=watcher.events,
        callback_arguments=watcher.arguments,
        files=files,
        trainer_states=states,
        json_files={name: value for name, value in documents.items() if name not in states},
        checkpoints=checkpoint_contents(folder, files),
        predictions=None if predictions is None else plain(tuple(predictions)),
        extra=plain(extra),
    )


def watching_callback(base: Any) -> Any:
    """A callback that notes every event it sees: the event, the step, the epoch and the control flags.

    Parameters:
        base: The side's TrainerCallback.
    """

    class Watcher(base):
        def __init__(self) -> None:
            self.events: list[Any] = []
            self.arguments: list[Any] = []

    def note(event: str) -> Any:
        def on_event(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raised = tuple(flag for flag in CONTROL_FLAGS if getattr(control, flag))
            self.events.append((event, state.global_step, state.epoch, raised))
            self.arguments.append((event, tuple(sorted(name for name, value in kwargs.items() if value is not None))))

        return on_event

    for event in EVENTS:
        setattr(Watcher, event, note(event))
    return Watcher()
