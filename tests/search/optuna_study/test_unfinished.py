"""Searches whose process was ended, and the next call that goes on with them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest

from littrainer.checkpoint.run_lock import CLAIM_NAME, give_back_claim, take_claim
from littrainer.search.optuna_study.unfinished import AGAIN, CLAIM_FOLDER_PREFIX, ERROR, NOTE_PREFIX, SEARCH, carried_on
from littrainer.search.record import read_record
from tests.scenarios.other_processes import LONGEST_WAIT_SECONDS
from tests.search.optuna_study.killed_search import N_TRIALS, search

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def study() -> Any:
    return optuna.create_study(study_name="rates", sampler=optuna.samplers.RandomSampler(seed=1))


def for_trainer(folder: Path) -> Any:
    return SimpleNamespace(args=SimpleNamespace(output_dir=str(folder)))


def notes(study: Any) -> list[Any]:
    return [note for name, note in study.user_attrs.items() if name.startswith(NOTE_PREFIX)]


def draw_and_end(study: Any, search_id: str, how: str = "COMPLETE", search: Any = None) -> Any:
    """Run a trial that draws one number, of a search that may note it; `how` is its state, RUNNING if it never ends."""
    trial = study.ask()
    trial.set_user_attr(SEARCH, search_id)
    trial.suggest_float("rate", 0.0, 1.0)
    if search is not None:
        search.note_draws(trial.number)
    if how == "COMPLETE":
        study.tell(trial, 1.0)
    elif how == "FAIL":
        trial.set_user_attr(ERROR, "ValueError: too high")
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
    return trial


def interrupted_search(study: Any, folder: Path, n_trials: int | None = 5, ended: int = 2) -> str:
    """A search of which some trials have ended and one was interrupted; returns its id."""
    with pytest.raises(KeyboardInterrupt), carried_on(study, for_trainer(folder), n_trials, is_stored=True) as begun:
        for _ in range(ended):
            draw_and_end(study, begun.id, search=begun)
        draw_and_end(study, begun.id, "RUNNING")
        raise KeyboardInterrupt
    return begun.id


def test_a_killed_search_goes_on_to_the_trials_that_it_would_have_had(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    command = [sys.executable, "-m", "tests.search.optuna_study.killed_search", str(tmp_path), "3"]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        timeout=LONGEST_WAIT_SECONDS,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    storage = f"sqlite:///{tmp_path}/studies.db"
    killed = optuna.load_study(study_name="killed", storage=storage)
    assert [trial.state.name for trial in killed.trials] == ["COMPLETE"] * 3 + ["RUNNING"]

    best = search(tmp_path / "out", storage)
    assert f"3 of its {N_TRIALS} trials have ended; trial 3 is done again." in caplog.text
    trials = optuna.load_study(study_name="killed", storage=storage).trials
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 3 + ["FAIL"] + ["COMPLETE"] * 2

    undisturbed_storage = optuna.storages.InMemoryStorage()
    undisturbed_best = search(tmp_path / "undisturbed", undisturbed_storage)
    undisturbed = optuna.load_study(study_name="killed", storage=undisturbed_storage).trials
    completed = [trial for trial in trials if trial.state.name == "COMPLETE"]
    assert [trial.params for trial in completed] == [trial.params for trial in undisturbed]
    assert [trial.value for trial in completed] == [trial.value for trial in undisturbed]
    assert best[1:] == undisturbed_best[1:]
    record = read_record(tmp_path / "out").trials
    assert [(trial.state, trial.error) for trial in record[3:5]] == [
        ("failed", "it was interrupted"),
        ("complete", None),
    ]
    assert not list((tmp_path / "out").glob(f"{CLAIM_FOLDER_PREFIX}*"))


def test_a_search_that_was_interrupted_goes_on_with_the_next_call(tmp_path: Path, study: Any) -> None:
    first = interrupted_search(study, tmp_path)
    with carried_on(study, for_trainer(tmp_path), 5, is_stored=True) as again:
        assert (again.id, again.ended, again.n_left) == (first, 2, 3)
        done_again = study.ask()
        assert done_again.user_attrs == {AGAIN: 2}
        rate = done_again.suggest_float("rate", 0.0, 1.0)
    assert rate == study.trials[2].params["rate"]
    assert study.trials[2].state.name == "FAIL"


def test_an_interrupted_search_draws_what_it_would_have_drawn(tmp_path: Path, study: Any) -> None:
    undisturbed = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    undisturbed.optimize(lambda trial: trial.suggest_float("rate", 0.0, 1.0), n_trials=5)
    interrupted_search(study, tmp_path)
    study.sampler = optuna.samplers.RandomSampler(seed=1)
    with carried_on(study, for_trainer(tmp_path), 5, is_stored=True) as again:
        for _ in range(3):
            draw_and_end(study, again.id)
    rates = [trial.params["rate"] for trial in study.trials if trial.state.name == "COMPLETE"]
    assert rates == [trial.params["rate"] for trial in undisturbed.trials]


SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": lambda: optuna.samplers.RandomSampler(seed=3),
    "tpe": lambda: optuna.samplers.TPESampler(seed=3, n_startup_trials=2),
    "joint tpe": lambda: optuna.samplers.TPESampler(seed=3, n_startup_trials=2, multivariate=True),
    "nsga": lambda: optuna.samplers.NSGAIISampler(seed=3, population_size=3),
    "points": lambda: pytest.importorskip("scipy") and optuna.samplers.QMCSampler(seed=3),
    "brute": lambda: optuna.samplers.BruteForceSampler(seed=3),
}


class Killed(BaseException):
    """Ends a search as a signal does: Optuna does not see it."""


def squares(trial: Any) -> float:
    rate, decay = trial.suggest_float("rate", 0.0, 1.0, step=0.01), trial.suggest_float("decay", 0.0, 1.0, step=0.01)
    return float((rate - 0.3) ** 2 + decay**2)


def search_killed_in(killed_in: tuple[int, ...], sampler: Callable[[], Any], folder: Path, n_trials: int) -> list[Any]:
    """Parameters of the completed trials of a search that is killed in some of its trials and gone on with."""
    study = optuna.create_study()

    def objective(trial: Any) -> float:
        trial.set_user_attr(SEARCH, begun.id)
        value = squares(trial)
        if trial.number in killed_in:
            raise Killed
        begun.note_draws(trial.number)
        return value

    for _ in (*killed_in, None):
        study.sampler = sampler()
        with contextlib.suppress(Killed), carried_on(study, for_trainer(folder), n_trials, is_stored=True) as begun:
            study.optimize(objective, n_trials=begun.n_left)
    return [trial.params for trial in study.trials if trial.state.name == "COMPLETE"]


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_killed_search_draws_on_with_every_sampler(tmp_path: Path, name: str) -> None:
    undisturbed = search_killed_in((), SAMPLERS[name], tmp_path, 7)
    assert len(undisturbed) == 7
    assert search_killed_in((2, 5), SAMPLERS[name], tmp_path, 7) == undisturbed


@pytest.mark.parametrize("killed_in", [(2,), (0, 3)])
def test_a_killed_search_over_a_grid_does_each_point_once(tmp_path: Path, killed_in: tuple[int, ...]) -> None:
    grid = {"rate": [0.1, 0.2], "decay": [0.3, 0.4]}
    found = search_killed_in(killed_in, lambda: optuna.samplers.GridSampler(grid, seed=1), tmp_path, 4)
    points = [{"rate": rate, "decay": decay} for rate in grid["rate"] for decay in grid["decay"]]
    assert sorted(found, key=str) == sorted(points, key=str)


def test_what_was_given_for_a_trial_is_done_again_where_it_was_not_asked_for_yet(tmp_path: Path, study: Any) -> None:
    study.enqueue_trial({"rate": 0.25})
    with pytest.raises(Killed), carried_on(study, for_trainer(tmp_path), 1, is_stored=True) as begun:
        study.ask().set_user_attr(SEARCH, begun.id)
        raise Killed
    with carried_on(study, for_trainer(tmp_path), 1, is_stored=True) as again:
        assert draw_and_end(study, again.id).suggest_float("rate", 0.0, 1.0) == 0.25


def test_a_search_killed_while_it_is_taken_over_draws_once_for_an_interrupted_trial(
    tmp_path: Path, study: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    undisturbed.optimize(lambda trial: trial.suggest_float("rate", 0.0, 1.0), n_trials=5)
    interrupted_search(study, tmp_path)

    def killed(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(study, "add_trial", killed)
        with pytest.raises(Killed), carried_on(study, for_trainer(tmp_path), 5, is_stored=True):
            pass
    study.sampler = optuna.samplers.RandomSampler(seed=1)
    with carried_on(study, for_trainer(tmp_path), 5, is_stored=True) as again:
        for _ in range(3):
            draw_and_end(study, again.id)
    rates = [trial.params["rate"] for trial in study.trials if trial.state.name == "COMPLETE"]
    assert rates == [trial.params["rate"] for trial in undisturbed.trials]


def test_after_a_trial_that_ended_its_search_others_are_drawn(tmp_path: Path, study: Any) -> None:
    with pytest.raises(ValueError, match="wrong"), carried_on(study, for_trainer(tmp_path), 4, is_stored=True) as begun:
        draw_and_end(study, begun.id, "FAIL", begun)
        raise ValueError("wrong")
    study.sampler = optuna.samplers.RandomSampler(seed=1)
    with carried_on(study, for_trainer(tmp_path), 4, is_stored=True) as again:
        draw_and_end(study, again.id)
    assert study.trials[0].params != study.trials[1].params


def test_a_trial_that_failed_by_itself_counts_and_is_not_done_again(tmp_path: Path, study: Any) -> None:
    with pytest.raises(ValueError, match="wrong"), carried_on(study, for_trainer(tmp_path), 4, is_stored=True) as begun:
        draw_and_end(study, begun.id, "FAIL")
        raise ValueError("wrong")
    with carried_on(study, for_trainer(tmp_path), 4, is_stored=True) as again:
        assert (again.ended, again.n_left) == (1, 3)
    assert len(study.trials) == 1


def test_a_search_that_is_interrupted_twice_does_each_trial_again_once(tmp_path: Path, study: Any) -> None:
    first = interrupted_search(study, tmp_path)
    with pytest.raises(KeyboardInterrupt), carried_on(study, for_trainer(tmp_path), 5, is_stored=True) as again:
        draw_and_end(study, again.id)
        draw_and_end(study, again.id, "RUNNING")
        raise KeyboardInterrupt
    with carried_on(study, for_trainer(tmp_path), 5, is_stored=True) as once_more:
        assert (once_more.id, once_more.ended, once_more.n_left) == (first, 3, 2)
    waiting = [trial for trial in study.trials if trial.state.name == "WAITING"]
    assert [trial.user_attrs for trial in waiting] == [{AGAIN: 4}]


def test_a_finished_search_is_forgotten_and_the_next_call_runs_as_many_trials_more(tmp_path: Path, study: Any) -> None:
    with carried_on(study, for_trainer(tmp_path), 2, is_stored=True) as first:
        draw_and_end(study, first.id)
        assert notes(study)[0]["n_trials"] == 2
        assert (tmp_path / f"{CLAIM_FOLDER_PREFIX}{first.id}" / CLAIM_NAME).exists()
    assert notes(study) == [None]
    assert not list(tmp_path.iterdir())
    with carried_on(study, for_trainer(tmp_path), 2, is_stored=True) as second:
        assert second.id != first.id
        assert (second.ended, second.n_left) == (0, 2)


def test_a_search_for_another_number_of_trials_is_not_gone_on_with(tmp_path: Path, study: Any) -> None:
    first = interrupted_search(study, tmp_path, n_trials=5)
    with carried_on(study, for_trainer(tmp_path), 7, is_stored=True) as other:
        assert other.id != first
        assert other.n_left == 7


def test_a_search_that_still_runs_is_left_alone(tmp_path: Path, study: Any) -> None:
    with carried_on(study, for_trainer(tmp_path), 3, is_stored=True) as running:
        trial = draw_and_end(study, running.id, "RUNNING")
        with carried_on(study, for_trainer(tmp_path), 3, is_stored=True) as other:
            assert other.id != running.id
            assert other.n_left == 3
        assert study.trials[trial.number].state.name == "RUNNING"


def test_of_two_calls_one_goes_on_with_an_interrupted_search(tmp_path: Path, study: Any) -> None:
    first = interrupted_search(study, tmp_path)
    with (
        carried_on(study, for_trainer(tmp_path), 5, is_stored=True) as one,
        carried_on(study, for_trainer(tmp_path), 5, is_stored=True) as two,
    ):
        assert one.id == first
        assert two.id != first
        assert two.n_left == 5


def killed_search(study: Any, folder: Path, **changes: Any) -> str:
    """A search whose process was killed, so that its note says nothing of an end, and whose claim lies nowhere."""
    search_id = interrupted_search(study, folder)
    name = f"{NOTE_PREFIX}{search_id}"
    study.set_user_attr(name, {**study.user_attrs[name], "was_stopped": False, **changes})
    return search_id


def test_a_search_whose_output_folder_was_deleted_is_gone_on_with_where_its_process_has_ended(
    tmp_path: Path, study: Any
) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(LONGEST_WAIT_SECONDS)
    first = killed_search(study, tmp_path, pid=ended.pid)
    with carried_on(study, for_trainer(tmp_path), 5, is_stored=True) as again:
        assert again.id == first


def test_a_search_of_another_host_that_cannot_be_seen_is_left_alone_and_told_of(
    tmp_path: Path, study: Any, caplog: pytest.LogCaptureFixture
) -> None:
    first = killed_search(study, tmp_path, host=f"not-{socket.gethostname()}")
    with carried_on(study, for_trainer(tmp_path), 5, is_stored=True) as other:
        assert other.id != first
    assert f"on not-{socket.gethostname()} began a search in this study and has not finished it" in caplog.text
    assert study.trials[2].state.name == "RUNNING"


def test_a_search_of_another_host_whose_claim_is_free_is_gone_on_with(tmp_path: Path, study: Any) -> None:
    first = killed_search(study, tmp_path, host=f"not-{socket.gethostname()}")
    Path(study.user_attrs[f"{NOTE_PREFIX}{first}"]["claim"]).mkdir()
    with carried_on(study, for_trainer(tmp_path), 5, is_stored=True) as again:
        assert again.id == first


def test_a_search_of_another_host_whose_claim_is_held_is_left_alone(tmp_path: Path, study: Any) -> None:
    first = killed_search(study, tmp_path, host=f"not-{socket.gethostname()}")
    key = take_claim(Path(study.user_attrs[f"{NOTE_PREFIX}{first}"]["claim"]))
    try:
        with carried_on(study, for_trainer(tmp_path), 5, is_stored=True) as other:
            assert other.id != first
    finally:
        give_back_claim(key)


def test_where_nothing_can_be_written_a_search_runs_unnoted_and_says_so(
    tmp_path: Path, study: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    with carried_on(study, for_trainer(tmp_path / "file"), 5, is_stored=True) as unnoted:
        assert unnoted.n_left == 5
    assert notes(study) == []
    assert "If this search is killed, it has to be begun anew" in caplog.text


def test_a_study_that_ends_with_the_process_is_not_noted(tmp_path: Path, study: Any) -> None:
    with carried_on(study, for_trainer(tmp_path), 5, is_stored=False) as search:
        search.note_draws(0)
        assert search.n_left == 5
    assert study.user_attrs == {} and not list(tmp_path.iterdir())


def test_a_search_that_stopped_elsewhere_is_gone_on_with(tmp_path: Path, study: Any) -> None:
    first = interrupted_search(study, tmp_path / "there")
    with carried_on(study, for_trainer(tmp_path / "here"), 5, is_stored=True) as again:
        assert again.id == first
        assert again.claim is not None and again.claim.parent == tmp_path / "here"


def test_a_search_by_time_alone_goes_on_by_time(tmp_path: Path, study: Any) -> None:
    first = interrupted_search(study, tmp_path, n_trials=None)
    with carried_on(study, for_trainer(tmp_path), None, is_stored=True) as again:
        assert (again.id, again.ended, again.n_left) == (first, 2, None)


def test_trials_side_by_side_leave_no_draws_to_repeat(tmp_path: Path, study: Any) -> None:
    with carried_on(study, for_trainer(tmp_path), 5, is_stored=True, jobs=2):
        assert notes(study)[0]["generators"] is None
