"""Progress of a training (`TrainerState`), switches of its loop (`TrainerControl`), and states of callbacks."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from littrainer.runtime.atomic_files import write_atomically
from littrainer.runtime.notes import kind_of

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments

# Attribute of an EarlyStoppingCallback, in the states of callbacks.
PATIENCE_COUNTER = "early_stopping_patience_counter"
COMPLETED = "completed"


class ExportableState:
    """Object whose state is stored in trainer_state.json and restored when training resumes.

    Examples:
        >>> from littrainer import ExportableState, TrainerCallback
        >>> class CountEvaluations(TrainerCallback, ExportableState):
        ...     count = 0
        ...     def on_evaluate(self, args, state, control, **kwargs):
        ...         self.count += 1
        ...     def state(self):
        ...         return {"args": {}, "attributes": {"count": self.count}}
    """

    def state(self) -> dict[str, Any]:
        """Return the state as `{"args": constructor keywords, "attributes": values set afterwards}`."""
        raise NotImplementedError(f"{type(self).__name__} has to define state() to be saved with the trainer's state.")

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Any:
        """Create an object from a result of `state()`, read from trainer_state.json."""
        instance = cls(**state["args"])
        for name, value in state["attributes"].items():
            setattr(instance, name, value)
        return instance


@dataclass
class TrainerControl(ExportableState):
    """Switches by which callbacks steer the training loop.

    Parameters:
        should_training_stop: end training after this step; not cleared.
        should_epoch_stop: end this epoch after this step; cleared when the next epoch begins.
        should_save: save a checkpoint at this step; cleared when the next step begins.
        should_evaluate: evaluate at this step; cleared when the next step begins.
        should_log: log at this step; cleared when the next step begins.
    """

    should_training_stop: bool = field(default=False)
    should_epoch_stop: bool = field(default=False)
    should_save: bool = field(default=False)
    should_evaluate: bool = field(default=False)
    should_log: bool = field(default=False)

    def _new_training(self) -> None:
        self.should_training_stop = False

    def _new_epoch(self) -> None:
        self.should_epoch_stop = False

    def _new_step(self) -> None:
        self.should_save = self.should_evaluate = self.should_log = False

    def state(self) -> dict[str, Any]:
        """Return the five switches."""
        # JSON lacks the truth values of NumPy and torch.
        return {"args": {name: bool(getattr(self, name)) for name in SWITCHES}, "attributes": {}}


LONG_INTEGER = re.compile(r"\d{300}")
# First letters of an annotation -> types in a file.
KINDS: dict[str, Any] = {"int": (int, float), "flo": (int, float), "str": str, "lis": list, "dic": dict}
SWITCHES: tuple[str, ...] = tuple(entry.name for entry in dataclasses.fields(TrainerControl))


@dataclass
class TrainerState:
    """Record of a training's progress, in trainer_state.json.

    Steps are optimizer steps: with gradient accumulation they have several micro-batches.

    Parameters:
        epoch: epochs done, with the fraction of the current one.
        global_step: optimizer steps done.
        max_steps: optimizer steps this training will take.
        logging_steps, eval_steps, save_steps: intervals in optimizer steps, resolved from fractions.
        train_batch_size: samples per micro-batch and device.
        num_train_epochs: epochs this training will take.
        num_input_tokens_seen: tokens fed to the model so far, if counted.
        total_flos: floating-point operations so far (a float, since an int would overflow elsewhere).
        log_history: all logged entries, with their `step`.
        best_metric, best_global_step, best_model_checkpoint: the best evaluation so far and the folder of its model.
        is_local_process_zero, is_world_process_zero: whether this process is the first of its node, of all nodes.
        is_hyper_param_search, trial_name, trial_params: set while a hyperparameter search runs.
        stateful_callbacks: states of exportable callbacks by class name; a list of callbacks is converted.
    """

    epoch: float = field(default=0)
    global_step: int = field(default=0)
    max_steps: int = field(default=0)
    logging_steps: int = field(default=500)
    eval_steps: int = field(default=500)
    save_steps: int = field(default=500)
    train_batch_size: int | None = field(default=None)
    num_train_epochs: int = field(default=0)
    num_input_tokens_seen: int = field(default=0)
    total_flos: float = field(default=0)
    log_history: list[dict[str, float]] = field(default=None)  # type: ignore[arg-type]
    best_metric: float | None = field(default=None)
    best_global_step: int | None = field(default=None)
    best_model_checkpoint: str | None = field(default=None)
    is_local_process_zero: bool = field(default=True)
    is_world_process_zero: bool = field(default=True)
    is_hyper_param_search: bool = field(default=False)
    trial_name: str | None = field(default=None)
    trial_params: dict[str, Any] | None = field(default=None)
    stateful_callbacks: Any = field(default=None)

    def __post_init__(self) -> None:
        if self.log_history is None:
            self.log_history = []
        if not isinstance(self.stateful_callbacks, dict):
            self.stateful_callbacks = export_states(self.stateful_callbacks or [])

    def save_to_json(self, json_path: str) -> None:
        """Write the state to a JSON file, atomically.

        Parameters:
            json_path: the file, in an existing folder.

        Raises:
            OSError: the file cannot be written.
        """
        write_atomically(json_path, self.to_json())

    def to_json(self) -> str:
        """Return the state as JSON."""
        content = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        try:
            return json.dumps(content, indent=2, sort_keys=True) + "\n"
        except TypeError:
            # asdict() is slow: it copies each entry of the log history.
            return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True) + "\n"

    @classmethod
    def load_from_json(cls, json_path: str) -> TrainerState:
        """Read a state that `save_to_json` or transformers wrote; skip unknown fields.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is not JSON, has no step, or a field has a value of another type.
        """
        try:
            text = Path(json_path).read_text("utf-8")
            # Longer integers would raise an OverflowError later.
            if LONG_INTEGER.search(text):
                raise TypeError("it has an integer of 300 digits or more")
            content = json.loads(text)
            if not isinstance(content, dict):
                raise TypeError("it holds no object with fields")
            if "global_step" not in content:
                # Do not start at step 0 because of a misspelled name.
                raise TypeError("global_step is missing")
            kinds = {entry.name: KINDS.get(str(entry.type)[:3], object) for entry in dataclasses.fields(cls)}
            fields = {name: value for name, value in content.items() if name in kinds and value is not None}
            for name, value in fields.items():
                if not isinstance(value, kinds[name]):
                    raise TypeError(f"{name} is {value!r:.100}")
            return cls(**fields)
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{json_path} is not a readable trainer state: {error}. Correct the file, or resume from another "
                "checkpoint."
            ) from error

    def compute_steps(self, args: TrainingArguments, max_steps: int) -> None:
        """Resolve the logging, evaluation and saving intervals.

        Parameters:
            args: training arguments with intervals in optimizer steps; below 1, as fractions of the training.
            max_steps: optimizer steps of the training.
        """
        for name in ("logging_steps", "eval_steps", "save_steps"):
            interval = getattr(args, name)
            if interval is not None:
                setattr(self, name, math.ceil(max_steps * interval) if interval < 1 else interval)

    def init_training_references(self, trainer: Any, max_steps: int, num_train_epochs: int, trial: Any) -> None:
        """Set the length of the training, its search trial, and the rank of this process.

        Parameters:
            trainer: the Trainer that trains.
            max_steps: optimizer steps of the training.
            num_train_epochs: its epochs, rounded up.
            trial: the trial of a search, or None.
        """
        if trainer.hp_name is not None and trial is not None:
            self.trial_name = trainer.hp_name(trial)
        self.trial_params = None if trial is None else hp_params(trial)
        self.max_steps = max_steps
        self.num_train_epochs = num_train_epochs
        self.is_local_process_zero = trainer.is_local_process_zero()
        self.is_world_process_zero = trainer.is_world_process_zero()


def hp_params(trial: Any) -> dict[str, Any]:
    """Return the parameters of a trial by name: the `params` of an Optuna trial, or the dict itself."""
    parameters = trial if isinstance(trial, Mapping) else getattr(trial, "params", None)
    if not isinstance(parameters, Mapping):
        raise RuntimeError(
            f"A trial is {kind_of(trial)}, and has to be an Optuna trial, or a dict of parameters by name."
        )
    return dict(parameters)


def describe_early_stop(counters: Iterable[tuple[float, int]], metric: str | None) -> str | None:
    """Return why early stopping ended a training; None if it did not.

    Parameters:
        counters: patience and evaluations without improvement of each callback.
    """
    for patience, counter in counters:
        if counter >= patience:
            return f"stopped early: {describe_lost_patience(metric or 'the metric', patience)}"
    return None


def describe_lost_patience(metric: str, patience: float) -> str:
    return f"{metric} did not improve for {patience} evaluation{'s' * (patience != 1)}"


def is_exportable(callback: Any) -> bool:
    """Return whether a callback has a state, by the name of its base class, which may be transformers'."""
    return ExportableState.__name__ in [base.__name__ for base in type(callback).__mro__]


def export_states(callbacks: list[Any]) -> dict[str, Any]:
    """Return the states of callbacks by class name; several callbacks of a class have a list."""
    states: dict[str, list[Any]] = {}
    for callback in callbacks:
        if not is_exportable(callback):
            raise TypeError(
                f"{type(callback).__name__} cannot be saved with the trainer's state: it does not derive from "
                "ExportableState."
            )
        states.setdefault(type(callback).__name__, []).append(callback.state())
    return {name: saved[0] if len(saved) == 1 else saved for name, saved in states.items()}
