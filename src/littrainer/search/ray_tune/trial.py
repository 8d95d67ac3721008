"""One trial of a Ray search, in the process that Ray has started for it: train, report, and be ended or paused by Ray.

Ray ends and pauses a trial where it waits in `ray.tune.report`, by a SystemExit there. A report is therefore made when
all that is due at its optimizer step has been done, so that a checkpoint handed to Ray goes on exactly.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from littrainer.arguments.choices import HPSearchBackend, SaveStrategy
from littrainer.callbacks.state import TrainerControl
from littrainer.checkpoint.layout import PREFIX_CHECKPOINT_DIR
from littrainer.checkpoint.reader import read_state
from littrainer.checkpoint.run_lock import claimed
from littrainer.compat import redirect
from littrainer.errors.lazy_isinstance import package_of
from littrainer.optim.parameter_groups import are_others
from littrainer.search.ray_tune.handed_over import delete_abandoned, folder_to_hand_over
from littrainer.search.searching import searching
from littrainer.search.travelling.packing import unpacked
from littrainer.search.travelling.surroundings import set_number_formats
from littrainer.search.trial import run_trial

if TYPE_CHECKING:
    from littrainer.trainer import Trainer

# Entries of each result beside the evaluation's metrics.
OBJECTIVE, STEP, LAST_STEP = "objective", "step", "max_steps"
CHANGES_FOLDER = "RAY_CHDIR_TO_TRIAL_DIR"
# How long a process that is reused waits for the training before to end, in seconds; Ray's own limit is short.
THREAD_TIMEOUT, SECONDS_FOR_AN_ENDED_TRAINING = "TUNE_FUNCTION_THREAD_TIMEOUT_S", 60
# How long a trial that goes on in another process waits for the one before to let go of its folder.
SECONDS_UNTIL_A_FOLDER_IS_FREE = 120
# Tells of every checkpoint that is handed to Ray.
TELLS_OF_CHECKPOINTS = "ray.train._internal.storage"
# They put a function of their own in the place of `sys.exit`, which calls the former one.
WATCH_EXITS = ("wandb",)
SHOWN_NOWHERE = ("ProgressCallback", "PrinterCallback", "NotebookProgressCallback")


@dataclass
class TrialSetting:
    """What a trial's process has to know beside the Trainer.

    Parameters:
        surroundings: those of the process that searches, as `surroundings.surroundings` gives them.
        is_redirected: whether names of transformers are answered by ours there.
        direction: `minimize` or `maximize`.
        checkpoints_each_report: whether the scheduler may pause a trial at any of them.
    """

    surroundings: dict[str, Any]
    direction: str
    is_redirected: bool
    checkpoints_each_report: bool


class EndedByScript(Exception):
    """The script itself has raised SystemExit or KeyboardInterrupt in a trial, which Ray would take for its own.

    Parameters:
        kind: the name of what was raised.
        code: of a SystemExit.
    """

    def __init__(self, kind: str, code: int | str | None = None) -> None:
        super().__init__(kind, code)
        self.kind = kind
        self.code = code

    def as_raised(self) -> BaseException:
        """What ends the script where its search has no processes."""
        return SystemExit(self.code) if self.kind == SystemExit.__name__ else KeyboardInterrupt()


class WaitsForTraining:
    """Mixed into Ray's trainable: its process ends when the training in it has, so that runs of trackers are closed."""

    def cleanup(self) -> None:
        """End the trial, which Ray has told to stop."""
        try:
            super().cleanup()  # type: ignore[misc]
        finally:
            thread = _running.thread
            if thread is not None and thread is not threading.current_thread():
                thread.join(SECONDS_FOR_AN_ENDED_TRAINING)


@dataclass
class _Running:
    thread: threading.Thread | None = None
    folder: str | None = None
    checkpoints_each_report: bool = False


# Of this process, which has one trial at a time.
_running = _Running()


def train_trial(config: dict[str, Any], packed_trainer: bytes, setting: TrialSetting) -> None:
    """Carry out one trial; what Ray calls in the trial's process.

    Parameters:
        config: the hyperparameters that Ray has drawn.
        packed_trainer: the Trainer as `travelling.packed` has it.

    Raises:
        EndedByScript: the script has ended the trial as one ends a script.
    """
    try:
        _train_trial(config, packed_trainer, setting)
    except (SystemExit, KeyboardInterrupt) as error:
        # So it ends or pauses a trial.
        if _raised_in(error) == "ray":
            raise
        code = getattr(error, "code", None)
        kept = code if code is None or isinstance(code, int) else str(code)
        raise EndedByScript(type(error).__name__, kept) from error
    except ValueError as error:
        # At a KeyboardInterrupt Lightning sets a signal's handler, which fails in Ray's thread.
        if _raised_in(error) == signal.__name__ and isinstance(error.__context__, KeyboardInterrupt):
            raise EndedByScript(KeyboardInterrupt.__name__) from error.__context__
        raise


def _raised_in(error: BaseException) -> str:
    """The package whose code raised an error, or called `sys.exit` where a tracker watches that."""
    packages = [package_of(frame) for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((package for package in reversed(packages) if package not in WATCH_EXITS), packages[-1])


def _train_trial(config: dict[str, Any], packed_trainer: bytes, setting: TrialSetting) -> None:
    import ray.tune

    logging.getLogger(TELLS_OF_CHECKPOINTS).setLevel(logging.WARNING)
    os.environ.setdefault(THREAD_TIMEOUT, str(SECONDS_FOR_AN_ENDED_TRAINING))
    _running.thread, _running.checkpoints_each_report = threading.current_thread(), setting.checkpoints_each_report
    _enter(setting)
    delete_abandoned()
    checkpoint = ray.tune.get_checkpoint()
    if checkpoint is not None and _has_ended(checkpoint, config):
        return
    trainer = unpacked(packed_trainer)
    for callback in list(trainer.callback_handler.callbacks):
        if any(kind.__name__ in SHOWN_NOWHERE for kind in type(callback).__mro__):
            trainer.remove_callback(callback)
    # Found anew: Ray shows this process the GPU that it has for the trial, or none.
    for name in ("_device", "_n_gpu"):
        vars(trainer.args).pop(name, None)
    # A trial that was paused goes on as if it had not been.
    trainer.args.restore_callback_states_from_checkpoint = True
    with searching(trainer, HPSearchBackend.RAY, setting.direction):
        if checkpoint is None:
            run_trial(trainer, config, evaluated_at_end=functools.partial(report_to_ray, trainer))
        else:
            with checkpoint.as_directory() as folder, _free_folder(trainer, config):
                # What goes on has reported before.
                run_trial(trainer, config, resume_from_checkpoint=_checkpoint_in(folder))


def _enter(setting: TrialSetting) -> None:
    found = setting.surroundings
    sys.path.extend(path for path in found["path"] if path not in sys.path)
    # Paths of the script, and of its arguments, are relative to where the search was started.
    if CHANGES_FOLDER not in os.environ and os.path.isdir(found["folder"]):
        os.chdir(found["folder"])
    _running.folder = os.getcwd()
    set_number_formats(found)
    if setting.is_redirected:
        redirect.install()


def report_to_ray(trainer: Trainer, metrics: dict[str, Any]) -> None:
    """Hand an evaluation to Ray: while training, as soon as what is due at this optimizer step has been done.

    Parameters:
        metrics: of the evaluation, whose objective `trainer.objective` is.
    """
    state = trainer.state
    result = {**metrics, OBJECTIVE: trainer.objective, STEP: state.global_step, LAST_STEP: state.max_steps}
    if trainer.is_in_train and trainer.training_run is not None:
        trainer.training_run.step.when_done = functools.partial(_hand_over, trainer, result)
    else:
        _hand_over(trainer, result)


def _hand_over(trainer: Trainer, result: dict[str, Any]) -> None:
    import ray.tune

    with folder_to_hand_over() as folder:
        checkpoint = None
        if _is_checkpoint_due(trainer):
            trainer._tune_save_checkpoint(checkpoint_dir=folder)
            checkpoint = ray.tune.Checkpoint.from_directory(folder)
        try:
            ray.tune.report(result, checkpoint=checkpoint)
        except SystemExit:
            if _running.folder is not None:
                # Ray has gone on to the folder of the process's next trial.
                os.chdir(_running.folder)
            trainer.control = trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
            raise


def _is_checkpoint_due(trainer: Trainer) -> bool:
    if not trainer.is_in_train or trainer.training_run is None:
        return False
    if _running.checkpoints_each_report:
        return True
    if trainer.args.save_strategy == SaveStrategy.NO:
        return False
    if trainer.background_saves is not None:
        trainer.background_saves.wait()
    run_dir = Path(trainer._get_output_dir(trial=trainer.training_run.trial))
    return (run_dir / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}").is_dir()


def _has_ended(checkpoint: Any, config: dict[str, Any]) -> bool:
    """Whether a trial was paused at a report after which it would have ended."""
    with checkpoint.as_directory() as folder:
        state = read_state(Path(_checkpoint_in(folder)))
    control = (state.stateful_callbacks or {}).get(TrainerControl.__name__, {})
    stops = isinstance(control, dict) and control.get("args", {}).get("should_training_stop", False)
    return (stops or state.global_step >= state.max_steps) and not are_others(state.trial_params, config)


def _checkpoint_in(folder: str) -> str:
    found = sorted(Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*"))
    if not found:
        raise ValueError(
            f"Ray's checkpoint {folder} holds no {PREFIX_CHECKPOINT_DIR}-<step> folder as _tune_save_checkpoint writes "
            "it, so the trial cannot go on from it."
        )
    return str(found[0])


@contextlib.contextmanager
def _free_folder(trainer: Trainer, config: dict[str, Any]) -> Iterator[None]:
    """Wait until the process that had this trial before has let go of its run folder, and hold it."""
    if trainer.args.save_strategy == SaveStrategy.NO:
        yield
        return
    run_dir = Path(trainer._get_output_dir(trial=config))
    deadline = time.monotonic() + SECONDS_UNTIL_A_FOLDER_IS_FREE
    with contextlib.ExitStack() as held:
        while True:
            try:
                held.enter_context(claimed(run_dir))
                break
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        yield
