"""`n_jobs`: trials in several processes that share the storage of the study."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
import torch

from littrainer.distributed.failures import is_running
from littrainer.search.parameters import SearchMistake
from littrainer.search.record import COMPLETE, FAILED, load_search_record
from littrainer.search.trial_processes import PROGRAM, TrialProcesses, count_jobs, make_environment, seed_by_trial
from tests.compat.processes import environment
from tests.scenarios.once_per_session import run_once
from tests.scenarios.other_processes import MAX_WAIT_SECONDS, wait_until
from tests.search.trainers import rate_space, searched_trainer

SCRIPT = Path(__file__).with_name("trial_processes_script.py")


# ---- A script in real processes --------------------------------------------------------------------------------------


def count_ended_trials(folder: Path) -> int:
    record = folder / "out" / "hyperparameter_search.json"
    trials = json.loads(record.read_text())["trials"] if record.exists() else []
    return sum(trial["state"] in (COMPLETE, FAILED) for trial in trials)


def run_script(folder: Path) -> None:
    """Run the script, and interrupt it during its last trial."""
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

        def is_last_trial_running() -> bool:
            assert process.poll() is None, (folder / "err.txt").read_text()
            return (folder / "waiting").exists() and count_ended_trials(folder) == 3

        try:
            wait_until(is_last_trial_running, "the last trial runs")
            process.send_signal(signal.SIGINT)
            process.wait(MAX_WAIT_SECONDS)
        finally:
            process.kill()
    (folder / "status").write_text(json.dumps([process.returncode, process.pid]))


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Return the files and the output of the script."""
    folder = run_once(tmp_path_factory, "trial_processes", run_script)
    out, err = ((folder / name).read_text() for name in ("out.txt", "err.txt"))
    status, searcher = json.loads((folder / "status").read_text())
    assert status == 0, err
    study = optuna.load_study(storage=f"sqlite:///{folder}/study.db", study_name="several")
    return SimpleNamespace(
        folder=folder,
        printed=json.loads(out.splitlines()[-1]),
        out=out,
        err=err,
        trials=load_search_record(folder / "out").trials,
        attributes=[trial.user_attrs for trial in study.trials],
        searcher=searcher,
    )


def test_a_trial_in_another_process_uses_the_classes_of_the_script(searched: Any) -> None:
    first, attributes = searched.trials[0], searched.attributes[0]
    assert (first.state, first.objective) == (COMPLETE, searched.printed["alone"])
    assert attributes["process"] != searched.searcher and attributes["trainer"].startswith("littrainer.")
    assert attributes["seen"] == [searched.printed["folder"], 1]
    assert (searched.folder / "out" / "run-0" / "checkpoint-3" / "training_args.bin").exists()


def test_failures_and_dead_processes_are_recorded_and_the_search_continues(searched: Any) -> None:
    assert searched.trials[1].error == "ValueError: DoesNotFit: width of 7 does not fit"
    message = "RuntimeError: the process of the trial ended with SIGKILL; if memory ran out, let fewer trials"
    assert searched.trials[2].error.startswith(message)
    assert [trial.state for trial in searched.trials] == [COMPLETE, FAILED, FAILED, FAILED]


def test_ctrl_c_ends_the_search_and_all_its_processes(searched: Any) -> None:
    assert searched.printed["interrupted"]
    processes = {attributes["process"] for attributes in searched.attributes if attributes}
    assert not [number for number in processes if is_running(number)]
    # Trials print no bars.
    assert "[trial 0] {'eval_loss':" in searched.out and "it/s" not in searched.err
    assert "[trial 0] Trial 0: learning_rate=0.0" in searched.out
    # Optuna's line has parameters that another process has drawn.
    assert "and parameters: {'learning_rate': " in searched.err


# ---- Searches of this process ----------------------------------------------------------------------------------------


class Mistaken(optuna.samplers.RandomSampler):
    def sample_independent(self, *args: Any) -> Any:
        raise KeyError("no such thing")


def test_a_search_in_memory_runs_n_trials_and_an_error_ends_it(tmp_path: Path) -> None:
    trainer = searched_trainer(tmp_path)
    numbers: list[int] = []
    best = trainer.hyperparameter_search(
        rate_space,
        n_trials=3,
        n_jobs=2,
        sampler=optuna.samplers.RandomSampler(seed=1),
        callbacks=[lambda study, trial: numbers.append(trial.number)],
    )
    assert sorted(numbers) == [0, 1, 2]
    trials = load_search_record(tmp_path).trials
    assert [trial.state for trial in trials] == [COMPLETE] * 3
    assert best.objective == min(trial.objective for trial in trials)
    assert len({trial.parameters["learning_rate"] for trial in trials}) == 3
    with pytest.raises(SearchMistake, match="hp_space failed: KeyError: 'no such thing'") as raised:
        trainer.hyperparameter_search(rate_space, n_trials=3, n_jobs=2, sampler=Mistaken())
    assert "sample_independent" in str(raised.value.__notes__)
    assert len(load_search_record(tmp_path).trials) < 3


def test_an_unpicklable_object_is_reported_before_any_trial(tmp_path: Path) -> None:
    trainer = searched_trainer(tmp_path)
    sampler = Mistaken()
    sampler.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"sampler, the pruner or the storage .* cannot be sent"):
        trainer.hyperparameter_search(rate_space, n_trials=2, n_jobs=2, sampler=sampler)
    trainer.lock = threading.Lock()
    with pytest.raises(TypeError, match=r"because of trainer\.lock"):
        trainer.hyperparameter_search(rate_space, n_trials=2, n_jobs=2)
    with pytest.raises(SearchMistake, match="cannot share an InMemoryStorage"):
        trainer.hyperparameter_search(rate_space, n_jobs=2, storage=optuna.storages.InMemoryStorage(), study_name="s")


def test_the_process_of_a_trial_ends_with_the_process_that_searches(tmp_path: Path) -> None:
    # The process waits for a Trainer that is never sent.
    starter = (
        "import os, subprocess, sys; reader, _ = os.pipe(); "
        f"process = subprocess.Popen([sys.executable, '-c', {PROGRAM!r}, str(reader), ''], pass_fds=[reader]); "
        "print(process.pid, flush=True); process.wait()"
    )
    command = [sys.executable, "-c", starter]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment(), text=True, cwd=tmp_path, **pipes) as process:
        assert process.stdout is not None
        number = int(process.stdout.readline())
        process.kill()
        wait_until(lambda: not is_running(number), "the process has ended")


def test_no_file_of_a_search_has_the_access_token(tmp_path: Path) -> None:
    trainer = searched_trainer(tmp_path, hub_token="hf_a_secret")
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(tmp_path / "journal")))
    with TrialProcesses(trainer, optuna.create_study(storage=storage), 1, str(tmp_path)):
        assert not [file for file in tmp_path.rglob("*") if file.is_file() and b"hf_a_secret" in file.read_bytes()]


def test_processes_that_do_not_end_after_an_interruption_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("littrainer.search.trial_processes.PROGRAM", "import time; time.sleep(600)")
    monkeypatch.setattr("littrainer.search.trial_processes.MAX_SHUTDOWN_S", 0.0)
    monkeypatch.setattr("littrainer.search.trial_processes.KILL_MARGIN_S", 0.1)
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(tmp_path / "journal")))
    study = optuna.create_study(storage=storage)
    with TrialProcesses(searched_trainer(tmp_path), study, 1, str(tmp_path)) as processes:
        threading.Timer(0.5, processes.interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            processes.run(study.ask())


# ---- Parts -----------------------------------------------------------------------------------------------------------


def arguments(device: str = "cpu") -> Any:
    return SimpleNamespace(device=torch.device(device))


def test_jobs_have_to_be_a_number() -> None:
    for n_jobs in (0, -2, 1.5, True, "2", None):
        with pytest.raises(SearchMistake, match=r"n_jobs=.* has to be the number"):
            count_jobs(arguments(), n_jobs)


def test_jobs_share_gpus_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setenv("RANK", "0")
    assert count_jobs(arguments(), -1) == os.cpu_count()
    alone = make_environment(arguments(), 0, 8)
    assert alone["OMP_NUM_THREADS"] == "1" and "RANK" not in alone
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for named, expected in ((None, ["0", "1", "0"]), ("4,7", ["4", "7", "4"])):
        if named is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        shares = [make_environment(arguments("cuda"), share, 3) for share in range(3)]
        assert [share["CUDA_VISIBLE_DEVICES"] for share in shares] == expected
        assert count_jobs(arguments("cuda"), -1) == 2


def test_samplers_of_trials_draw_different_values_from_the_users_seed() -> None:
    def draw(number: int, **keywords: Any) -> list[float]:
        sampler = optuna.samplers.TPESampler(**keywords)
        seed_by_trial(sampler, number)
        study = optuna.create_study(sampler=sampler)
        return [study.ask().suggest_float("rate", 0.0, 1.0) for _ in range(2)]

    assert draw(0, seed=3) == draw(0, seed=3) != draw(1, seed=3)
    assert draw(0, seed=4) != draw(0, seed=3)
