"""What a trial of a Ray search does in its process, with a stand-in for Ray's session."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from littrainer import EarlyStoppingCallback, TrainerCallback
from littrainer.arguments.choices import HPSearchBackend
from littrainer.checkpoint.run_lock import claimed
from littrainer.search.objective import default_compute_objective
from littrainer.search.ray_tune import trial as ray_trial
from littrainer.search.searching import searching
from littrainer.search.trial import run_trial
from tests.scenarios.other_processes import LONGEST_WAIT_SECONDS
from tests.search.trainers import searched_trainer

tune: Any = pytest.importorskip("ray.tune")

CONFIG = {"learning_rate": 0.01}
# The rate falls after each evaluation whose loss is not above the one before.
PLATEAU = {
    "lr_scheduler_type": "reduce_lr_on_plateau",
    "lr_scheduler_kwargs": {"patience": 0, "mode": "max"},
    "metric_for_best_model": "loss",
    "max_steps": 6,
}


@dataclasses.dataclass
class Session:
    """Keeps what a trial reports, and may end it at a report.

    Parameters:
        kept: where checkpoints are kept.
        ends_at: the report that ends or pauses the trial, counted from 1.
    """

    kept: Path
    ends_at: int | None = None
    results: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    checkpoints: list[Path | None] = dataclasses.field(default_factory=list)

    def report(self, metrics: dict[str, Any], *, checkpoint: Any = None) -> None:
        self.results.append(metrics)
        self.checkpoints.append(None)
        if checkpoint is not None:
            self.checkpoints[-1] = self.kept / str(len(self.results))
            shutil.copytree(checkpoint.path, self.kept / str(len(self.results)))
        if len(self.results) == self.ends_at:
            raise SystemExit(0)

    def steps(self) -> list[int]:
        return [result["step"] for result in self.results]


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Session]]:
    """Makes the session that the next trial reports to."""
    numbers = iter(range(100))

    def begin(ends_at: int | None = None, pauses: bool = False) -> Session:
        kept = tmp_path / f"session-{next(numbers)}"
        kept.mkdir()
        found = Session(kept, ends_at)
        monkeypatch.setattr(tune, "report", found.report)
        monkeypatch.setattr(ray_trial._running, "checkpoints_each_report", pauses)
        return found

    yield begin


def trainer_of_trial(folder: Path, **changes: Any) -> Any:
    """A Trainer as it arrives in a trial's process: four steps, evaluated at each second."""
    given = changes.pop("given", None)
    arguments = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, **changes}
    trainer = searched_trainer(folder, given=given, **arguments)
    trainer.compute_objective = default_compute_objective
    trainer.hp_name = lambda trial: "run"
    return trainer


def carry_out(trainer: Any, config: dict[str, Any] = CONFIG, checkpoint: Path | None = None) -> None:
    """The trial, from its beginning or from a checkpoint that was handed to Ray."""
    folder = None if checkpoint is None else ray_trial._checkpoint_in(str(checkpoint))
    with searching(trainer, HPSearchBackend.RAY, "minimize"):
        run_trial(
            trainer, config, folder, None if folder else lambda metrics: ray_trial.report_to_ray(trainer, metrics)
        )


class NotesSaves(TrainerCallback):
    def __init__(self, session: Session):
        self.session = session
        self.reports_before_save: list[int] = []
        self.ends = 0

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.reports_before_save.append(len(self.session.results))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends += 1


def test_a_report_is_made_when_its_step_has_been_saved(tmp_path: Path, session: Callable[..., Session]) -> None:
    found = session()
    notes = NotesSaves(found)
    carry_out(trainer_of_trial(tmp_path, save_strategy="steps", save_steps=2, given={"callbacks": [notes]}))
    assert found.steps() == [2, 4]
    assert notes.reports_before_save == [0, 1]
    assert all(result["objective"] == result["eval_loss"] for result in found.results)


def test_a_checkpoint_goes_along_where_one_is_saved(tmp_path: Path, session: Callable[..., Session]) -> None:
    found = session()
    carry_out(trainer_of_trial(tmp_path, save_strategy="steps", save_steps=4))
    assert [checkpoint is not None for checkpoint in found.checkpoints] == [False, True]


def test_a_scheduler_that_pauses_gets_a_checkpoint_with_each_report(
    tmp_path: Path, session: Callable[..., Session]
) -> None:
    found = session(pauses=True)
    carry_out(trainer_of_trial(tmp_path, save_only_model=True))
    assert [checkpoint is not None for checkpoint in found.checkpoints] == [True, True]
    names = {path.name for path in Path(str(found.checkpoints[0]), "checkpoint-2").iterdir()}
    assert {"optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"} <= names
    assert not (tmp_path / "run").exists()


def test_a_trial_that_ray_ends_tells_its_callbacks_and_gives_back_its_memory(
    tmp_path: Path, session: Callable[..., Session]
) -> None:
    found = session(ends_at=1)
    notes = NotesSaves(found)
    trainer = trainer_of_trial(tmp_path, given={"callbacks": [notes]})
    model_before = trainer.model
    with pytest.raises(SystemExit):
        carry_out(trainer)
    assert found.steps() == [2] and notes.ends == 1
    assert trainer.model is model_before and trainer.optimizer is None


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="linear schedule"),
        pytest.param(PLATEAU, id="plateau"),
        pytest.param({"eval_on_start": True}, id="evaluated before the first step"),
        pytest.param({"eval_strategy": "epoch", "max_steps": -1, "num_train_epochs": 3}, id="at the end of epochs"),
    ],
)
def test_a_trial_paused_at_any_report_ends_as_if_it_had_not_been(
    tmp_path: Path, session: Callable[..., Session], changes: dict[str, Any]
) -> None:
    whole = session(pauses=True)
    carry_out(trainer_of_trial(tmp_path / "whole", **changes))
    for number in range(1, len(whole.results)):
        first = session(ends_at=number, pauses=True)
        with pytest.raises(SystemExit):
            carry_out(trainer_of_trial(tmp_path / f"first-{number}", **changes))
        second = session(pauses=True)
        carry_out(trainer_of_trial(tmp_path / f"second-{number}", **changes), checkpoint=first.checkpoints[-1])
        both = [(result["step"], result["objective"]) for result in first.results + second.results]
        assert both == [(result["step"], result["objective"]) for result in whole.results]


def test_early_stopping_counts_over_a_pause(tmp_path: Path, session: Callable[..., Session]) -> None:
    changes = {
        "max_steps": 8,
        "eval_steps": 1,
        "metric_for_best_model": "loss",
        # The loss grows at each step.
        "greater_is_better": False,
        "learning_rate": 0.5,
    }

    def trainer(name: str) -> Any:
        made = trainer_of_trial(tmp_path / name, given={"callbacks": [EarlyStoppingCallback(2)]}, **changes)
        made.args.restore_callback_states_from_checkpoint = True
        return made

    config = {"learning_rate": 0.5}
    whole = session(pauses=True)
    carry_out(trainer("whole"), config)
    assert len(whole.results) < 8
    first = session(ends_at=len(whole.results) - 1, pauses=True)
    with pytest.raises(SystemExit):
        carry_out(trainer("first"), config)
    second = session(pauses=True)
    carry_out(trainer("second"), config, first.checkpoints[-1])
    assert first.steps() + second.steps() == whole.steps()
    assert ray_trial._has_ended(tune.Checkpoint(str(second.checkpoints[-1])), config)


def test_a_trial_paused_at_its_last_step_has_ended_unless_it_is_given_others_hyperparameters(
    tmp_path: Path, session: Callable[..., Session]
) -> None:
    found = session(pauses=True)
    carry_out(trainer_of_trial(tmp_path))
    before_the_end, at_the_end = (tune.Checkpoint(str(path)) for path in found.checkpoints)
    assert not ray_trial._has_ended(before_the_end, CONFIG)
    assert ray_trial._has_ended(at_the_end, CONFIG)
    assert not ray_trial._has_ended(at_the_end, {"learning_rate": 0.5})


def test_intervals_are_those_that_a_trial_is_given_in_anothers_place(
    tmp_path: Path, session: Callable[..., Session]
) -> None:
    first = session(ends_at=1, pauses=True)
    with pytest.raises(SystemExit):
        carry_out(trainer_of_trial(tmp_path / "first"))
    second = session(pauses=True)
    carry_out(trainer_of_trial(tmp_path / "second"), {**CONFIG, "eval_steps": 1}, first.checkpoints[-1])
    assert second.steps() == [3, 4]


def test_an_own_checkpoint_without_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "weights").touch()
    with pytest.raises(ValueError, match="_tune_save_checkpoint"):
        ray_trial._checkpoint_in(str(tmp_path))


@contextlib.contextmanager
def another_holder(folder: Path) -> Iterator[Callable[[], None]]:
    """While the block runs another thread holds the folder, until it is told to let go."""
    held, told = threading.Event(), threading.Event()

    def hold() -> None:
        with claimed(folder):
            held.set()
            told.wait(LONGEST_WAIT_SECONDS)

    holder = threading.Thread(target=hold)

    def let_go() -> None:
        told.set()
        holder.join(LONGEST_WAIT_SECONDS)

    holder.start()
    held.wait(LONGEST_WAIT_SECONDS)
    try:
        yield let_go
    finally:
        let_go()


def test_a_trial_that_goes_on_waits_for_the_process_before_to_let_go_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of_trial(tmp_path, save_strategy="steps")
    waits = []
    with another_holder(tmp_path) as let_go:

        def wait(seconds: float) -> None:
            waits.append(seconds)
            let_go()

        monkeypatch.setattr(ray_trial, "time", SimpleNamespace(sleep=wait, monotonic=lambda: 0.0))
        with ray_trial._free_folder(trainer, CONFIG):
            assert (tmp_path / ".littrainer_running").is_file()
    assert len(waits) == 1


def test_a_folder_that_is_never_let_go_of_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of_trial(tmp_path, save_strategy="steps")
    monkeypatch.setattr(ray_trial, "SECONDS_UNTIL_A_FOLDER_IS_FREE", -1)
    with another_holder(tmp_path), pytest.raises(RuntimeError, match="Another run"):
        ray_trial._free_folder(trainer, CONFIG).__enter__()


def train_with(raising: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """What Ray calls, with this in the place of the training."""
    monkeypatch.setattr(ray_trial, "_train_trial", lambda config, packed_trainer, setting: raising())
    setting = ray_trial.TrialSetting({}, "minimize", is_redirected=False, checkpoints_each_report=False)
    ray_trial.train_trial(CONFIG, b"", setting)


@pytest.mark.parametrize("raised", [SystemExit("bye"), SystemExit(0), KeyboardInterrupt()], ids=repr)
def test_a_script_that_ends_itself_in_a_trial_is_not_taken_for_ray_ending_the_trial(
    raised: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end() -> None:
        raise raised

    with pytest.raises(ray_trial.EndedByScript) as found:
        train_with(end, monkeypatch)
    assert repr(pickle.loads(pickle.dumps(found.value)).as_raised()) == repr(raised)


def test_a_keyboard_interrupt_of_the_script_is_known_in_the_thread_that_ray_trains_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupts(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    found: list[BaseException] = []

    def train() -> None:
        try:
            train_with(trainer_of_trial(tmp_path, given={"callbacks": [Interrupts()]}).train, monkeypatch)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join(LONGEST_WAIT_SECONDS)
    assert [repr(error) for error in found] == [repr(ray_trial.EndedByScript("KeyboardInterrupt"))]


@pytest.mark.parametrize("is_watched", [False, True])
def test_where_ray_ends_a_trial_its_own_exit_goes_on(monkeypatch: pytest.MonkeyPatch, is_watched: bool) -> None:
    from ray.train._internal import session

    if is_watched:
        # As in a trial whose tracker is Weights & Biases.
        from wandb.sdk.lib.exit_hooks import ExitHooks

        # Puts both back after the test.
        monkeypatch.setattr(sys, "exit", sys.exit)
        monkeypatch.setattr(sys, "excepthook", sys.excepthook)
        ExitHooks().hook()

    # As it ends the thread that waits in a report.
    ends = session._TrainSession._report_training_result
    waiting: Any = SimpleNamespace(
        result_queue=SimpleNamespace(put=lambda *given, **named: None),
        continue_lock=threading.Semaphore(1),
        stop_event=threading.Event(),
    )
    waiting.stop_event.set()
    result: Any = SimpleNamespace(checkpoint=None)
    with pytest.raises(SystemExit):
        train_with(lambda: ends(waiting, result), monkeypatch)
