"""Trials side by side: in processes of their own, and in this test with processes that are none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest

from littrainer import Trainer
from littrainer.distributed.failure_report import is_running
from littrainer.search.failures import SearchMistake
from littrainer.search.record import COMPLETE, FAILED, read_record
from littrainer.search.side_by_side import pool, trial_process
from littrainer.search.side_by_side.conversation import Setting
from littrainer.search.side_by_side.pool import SideBySide
from littrainer.search.side_by_side.trial_process import TrialProcess, TrialProcessDied
from littrainer.search.side_by_side.worker import _content_of
from littrainer.search.travelling.packing import unpacked
from tests.compat.processes import environment
from tests.scenarios.once_per_session import carried_out_once
from tests.scenarios.other_processes import LONGEST_WAIT_SECONDS, wait_until
from tests.search.trainers import rate_space, searched_trainer

SCRIPT = Path(__file__).with_name("side_by_side_script.py")


# ---- With real processes ---------------------------------------------------------------------------------------------


def ended_trials(folder: Path) -> int:
    record = folder / "out" / "hyperparameter_search.json"
    trials = json.loads(record.read_text())["trials"] if record.exists() else []
    return sum(trial["state"] in (COMPLETE, FAILED) for trial in trials)


def run_script(folder: Path) -> None:
    """Run the script, and press Ctrl-C while its last trial runs."""
    with (
        (folder / "out.txt").open("w") as out,
        (folder / "err.txt").open("w") as err,
        subprocess.Popen(
            [sys.executable, "-m", "littrainer", "run", str(SCRIPT), str(folder)],
            cwd=folder,
            env=environment(),
            stdout=out,
            stderr=err,
        ) as process,
    ):

        def last_trial_runs() -> bool:
            assert process.poll() is None, (folder / "err.txt").read_text()
            return (folder / "waiting").exists() and ended_trials(folder) == 3

        try:
            wait_until(last_trial_runs, "the last trial runs")
            process.send_signal(signal.SIGINT)
            process.wait(LONGEST_WAIT_SECONDS)
        finally:
            process.kill()
    (folder / "status").write_text(json.dumps([process.returncode, process.pid]))


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """What the script has left and printed."""
    folder = carried_out_once(tmp_path_factory, "side_by_side", run_script)
    out, err = ((folder / name).read_text() for name in ("out.txt", "err.txt"))
    status, searcher = json.loads((folder / "status").read_text())
    assert status == 0, err
    study = optuna.load_study(storage=f"sqlite:///{folder}/study.db", study_name="side by side")
    return SimpleNamespace(
        folder=folder,
        printed=json.loads(out.splitlines()[-1]),
        out=out,
        err=err,
        trials=read_record(folder / "out").trials,
        attributes=[trial.user_attrs for trial in study.trials],
        searcher=searcher,
    )


def test_a_trial_has_the_numbers_that_it_has_in_the_scripts_process(searched: Any) -> None:
    assert searched.trials[0].state == COMPLETE
    assert searched.trials[0].objective == searched.printed["alone"]


def test_what_the_script_defines_and_its_redirection_hold_in_a_trials_process(searched: Any) -> None:
    attributes = searched.attributes[0]
    assert attributes["process"] != searched.searcher
    assert attributes["trainer"].startswith("littrainer.")
    assert attributes["seen"] == [[str(searched.folder)], searched.printed["folder"], 1]
    assert (searched.folder / "out" / "run-0" / "checkpoint-3" / "training_args.bin").exists()


def test_a_trial_that_fails_fails_with_its_own_error(searched: Any) -> None:
    assert searched.trials[1].state == FAILED
    assert searched.trials[1].error == "DoesNotFit: width of 7 does not fit"


def test_one_whose_process_dies_fails_with_its_last_words(searched: Any) -> None:
    assert searched.trials[2].state == FAILED
    assert "The process of trial 2 was ended by SIGKILL" in searched.trials[2].error
    assert "these were my last words" in searched.trials[2].error


def test_ctrl_c_ends_the_search_and_all_its_processes(searched: Any) -> None:
    assert searched.printed["interrupted"]
    assert [trial.state for trial in searched.trials] == [COMPLETE, FAILED, FAILED, FAILED]
    assert not [number for number in {one["process"] for one in searched.attributes} if is_running(number)]


def test_what_a_trial_prints_has_its_number_and_no_bars(searched: Any) -> None:
    assert "[trial 0] a model is made" in searched.out
    assert "[trial 0] {'eval_loss':" in searched.out
    assert "[trial 2] these were my last words" in searched.err
    assert not [line for line in searched.err.splitlines() if line.startswith("[trial") and "it/s" in line]


def test_a_process_that_cannot_begin_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_process, "SECONDS_TO_END", LONGEST_WAIT_SECONDS)
    with tempfile.TemporaryFile() as empty:
        setting = Setting({"path": sys.path, "folder": "/there/is/none"}, empty.fileno(), 1)
        process = TrialProcess(setting, dict(os.environ))
        with pytest.raises(TrialProcessDied, match=r"of trial 7 ended with status 1\. Its last words:\n[^$]*KeyError"):
            process.carry_out(SimpleNamespace(number=7))


def test_a_trials_process_ends_with_the_one_that_searches(tmp_path: Path) -> None:
    worker = (
        "import sys, time; from littrainer.search.side_by_side.worker import end_with; "
        "end_with(int(sys.argv[1])); print(flush=True); time.sleep(600)"
    )
    starter = (
        "import os, subprocess, sys; "
        "one = subprocess.Popen([sys.executable, '-c', sys.argv[1], str(os.getpid())], stdout=subprocess.PIPE); "
        "one.stdout.readline(); print(one.pid, flush=True); one.wait()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", starter, worker], env=environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        number = int(process.stdout.readline())
        process.kill()
    wait_until(lambda: not is_running(number), "the trial's process has ended")


# ---- With stand-ins for them -----------------------------------------------------------------------------------------


class StandIn:
    """A process of trials in this one; what a trial does is its `work`."""

    made: list[StandIn]

    def __init__(self, setting: Any, variables: dict[str, str]):
        self.number = len(self.made)
        self.calls: list[str] = []
        self.told = threading.Event()
        self.made.append(self)

    def carry_out(self, trial: Any) -> Any:
        self.calls.append(f"trial {trial.number}")
        return trial.work(self)

    def interrupt(self) -> None:
        self.calls.append("interrupted")
        self.told.set()

    def kill(self) -> None:
        self.calls.append("killed")

    def close(self) -> None:
        self.calls.append("closed")

    def end(self) -> None:
        self.calls.append("ended")


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[StandIn]:
    made: list[StandIn] = []
    monkeypatch.setattr(StandIn, "made", made, raising=False)
    monkeypatch.setattr(pool, "TrialProcess", StandIn)
    return made


def trial(number: int, work: Callable[[StandIn], Any] = lambda process: 0.5) -> Any:
    return SimpleNamespace(number=number, work=work)


def failing_with(error: BaseException) -> Callable[[StandIn], Any]:
    def work(process: StandIn) -> Any:
        raise error

    return work


def until_told(process: StandIn) -> Any:
    assert process.told.wait(LONGEST_WAIT_SECONDS)
    raise TrialProcessDied("interrupted")


def started(trials: SideBySide, one: Any, raised: list[BaseException]) -> threading.Thread:
    """A thread that carries out a trial, once that has begun."""
    begun = threading.Event()
    work = one.work

    def noting(process: StandIn) -> Any:
        begun.set()
        return work(process)

    def run() -> None:
        try:
            trials.run(SimpleNamespace(number=one.number, work=noting))
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(LONGEST_WAIT_SECONDS)
    return thread


def test_a_process_carries_out_one_trial_after_the_other(processes: list[StandIn], tmp_path: Path) -> None:
    pruned, failed = failing_with(optuna.TrialPruned()), failing_with(ValueError("too wide"))
    with SideBySide(searched_trainer(tmp_path), 1, survives=(ValueError,)) as trials:
        assert trials.run(trial(0)) == 0.5
        with pytest.raises(optuna.TrialPruned):
            trials.run(trial(1, pruned))
        with pytest.raises(ValueError, match="too wide"):
            trials.run(trial(2, failed))
        assert trials.run(trial(3)) == 0.5
    assert [process.calls for process in processes] == [["trial 0", "trial 1", "trial 2", "trial 3", "closed", "ended"]]


@pytest.mark.parametrize("error", [TrialProcessDied("killed"), MemoryError(), RuntimeError("CUDA error")])
def test_after_what_may_leave_something_behind_another_one_takes_its_place(
    processes: list[StandIn], tmp_path: Path, error: Exception
) -> None:
    with SideBySide(searched_trainer(tmp_path), 1, survives=(RuntimeError, MemoryError)) as trials:
        with pytest.raises(type(error)):
            trials.run(trial(0, failing_with(error)))
        trials.run(trial(1))
    assert [process.calls for process in processes] == [["trial 0", "ended"], ["trial 1", "closed", "ended"]]


@pytest.mark.parametrize("mistake", [SearchMistake("no such argument"), KeyboardInterrupt(), SystemExit(3)])
def test_an_error_that_ends_the_search_ends_the_other_trials_with_it(
    processes: list[StandIn], tmp_path: Path, mistake: BaseException
) -> None:
    raised: list[BaseException] = []
    with (
        pytest.raises(type(mistake)),
        SideBySide(searched_trainer(tmp_path), 2, survives=(ValueError,)) as trials,
    ):
        other = started(trials, trial(0, until_told), raised)
        with pytest.raises(type(mistake)):
            trials.run(trial(1, failing_with(mistake)))
        other.join(LONGEST_WAIT_SECONDS)
        with pytest.raises(type(mistake)):
            trials.run(trial(2))
    # Which of them the study meets first makes no difference.
    assert raised == [mistake]
    assert [process.calls for process in processes] == [
        ["trial 0", "interrupted", "ended"],
        ["trial 1", "interrupted", "ended"],
    ]


def test_an_error_in_the_last_trials_which_optuna_passes_over_is_raised(
    processes: list[StandIn], tmp_path: Path
) -> None:
    study = optuna.create_study()
    with pytest.raises(ZeroDivisionError), SideBySide(searched_trainer(tmp_path), 2) as trials:
        study.optimize(
            lambda one: trials.run(trial(one.number, failing_with(ZeroDivisionError()))), n_trials=1, n_jobs=2
        )


def test_where_no_process_can_be_started_the_search_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(pool, "TrialProcess", fail)
    with pytest.raises(BlockingIOError), SideBySide(searched_trainer(tmp_path), 1, survives=(ValueError,)) as trials:
        for number in range(2):
            with pytest.raises(BlockingIOError):
                trials.run(trial(number))


def test_ctrl_c_ends_the_trials_and_then_the_search(processes: list[StandIn], tmp_path: Path) -> None:
    raised: list[BaseException] = []
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), SideBySide(searched_trainer(tmp_path), 1) as trials:
        thread = started(trials, trial(0, until_told), raised)
        signal.raise_signal(signal.SIGINT)
        thread.join(LONGEST_WAIT_SECONDS)
    assert [type(error) for error in raised] == [KeyboardInterrupt]
    assert processes[0].calls == ["trial 0", "interrupted", "ended"]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_waits_for_no_trial(processes: list[StandIn], tmp_path: Path) -> None:
    raised: list[BaseException] = []
    go_on = threading.Event()

    def stubborn(process: StandIn) -> Any:
        assert go_on.wait(LONGEST_WAIT_SECONDS)
        raise TrialProcessDied("killed")

    with pytest.raises(KeyboardInterrupt), SideBySide(searched_trainer(tmp_path), 1) as trials:
        thread = started(trials, trial(0, stubborn), raised)
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert processes[0].calls == ["trial 0", "interrupted", "killed"]
        go_on.set()
        thread.join(LONGEST_WAIT_SECONDS)


def test_ctrl_c_between_trials_is_as_ever_and_none_begins_after_it(processes: list[StandIn], tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), SideBySide(searched_trainer(tmp_path), 1) as trials:
        trials.run(trial(0))
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            trials.run(trial(1))
    assert [process.calls for process in processes] == [["trial 0", "closed", "ended"]]


def test_ctrl_c_while_a_process_starts_ends_its_trial_too(
    processes: list[StandIn], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*arguments: Any) -> StandIn:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return StandIn(*arguments)

    monkeypatch.setattr(pool, "TrialProcess", start)
    with pytest.raises(KeyboardInterrupt), SideBySide(searched_trainer(tmp_path), 1) as trials:
        for number in range(2):
            with pytest.raises(KeyboardInterrupt):
                trials.run(trial(number, until_told))
    assert [process.calls for process in processes] == [["interrupted", "trial 0", "ended"]]


def test_a_second_ctrl_c_may_come_while_the_first_one_is_seen_to(
    processes: list[StandIn], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[BaseException] = []

    def interrupt(process: StandIn) -> None:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        process.calls.append("interrupted")
        process.told.set()

    monkeypatch.setattr(StandIn, "interrupt", interrupt)
    with pytest.raises(KeyboardInterrupt), SideBySide(searched_trainer(tmp_path), 1) as trials:
        thread = started(trials, trial(0, until_told), raised)
        signal.raise_signal(signal.SIGINT)
        thread.join(LONGEST_WAIT_SECONDS)
    assert [type(error) for error in raised] == [KeyboardInterrupt]
    assert processes[0].calls == ["trial 0", "killed", "interrupted", "ended"]


def test_the_packed_trainer_lies_in_a_file_without_a_name_that_processes_read_each_for_itself(
    processes: list[StandIn], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    with SideBySide(searched_trainer(tmp_path), 1) as trials:
        assert trials._setting is not None
        copies = [os.dup(trials._setting.trainer_file) for _ in range(2)]
        assert list((tmp_path / "temporary").iterdir()) == []
    first, second = (_content_of(copy) for copy in copies)
    assert first == second
    assert type(unpacked(first)) is Trainer
    for copy in copies:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(copy)


def test_what_cannot_travel_is_told_before_any_trial(tmp_path: Path) -> None:
    trainer = searched_trainer(tmp_path)
    trainer.lock = threading.Lock()
    study_keywords = {"storage": f"sqlite:///{tmp_path}/study.db", "study_name": "none"}
    with pytest.raises(TypeError, match=r"trainer\.lock is a lock"):
        trainer.hyperparameter_search(rate_space, n_trials=2, n_jobs=2, **study_keywords)
    assert optuna.load_study(study_name="none", storage=study_keywords["storage"]).trials == []


def test_where_processes_cannot_be_started_so_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = searched_trainer(tmp_path)
    monkeypatch.setattr(pool, "os", SimpleNamespace(name="nt"))
    with pytest.raises(SearchMistake, match=r"n_jobs=2 runs trials side by side, which needs Linux or macOS"):
        SideBySide(trainer, 2)
