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

from littrainer.distributed.failure_report import is_running
from littrainer.search.optuna_workers import number_of_jobs, seed_apart, variables_of_worker
from littrainer.search.parameters import SearchMistake
from littrainer.search.record import COMPLETE, FAILED, read_record
from tests.compat.processes import environment
from tests.scenarios.once_per_session import carried_out_once
from tests.scenarios.other_processes import LONGEST_WAIT_SECONDS, wait_until
from tests.search.trainers import rate_space, searched_trainer

SCRIPT = Path(__file__).with_name("optuna_workers_script.py")


# ---- A script in real processes --------------------------------------------------------------------------------------


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
    folder = carried_out_once(tmp_path_factory, "optuna_workers", run_script)
    out, err = ((folder / name).read_text() for name in ("out.txt", "err.txt"))
    status, searcher = json.loads((folder / "status").read_text())
    assert status == 0, err
    study = optuna.load_study(storage=f"sqlite:///{folder}/study.db", study_name="several")
    return SimpleNamespace(
        folder=folder,
        printed=json.loads(out.splitlines()[-1]),
        out=out,
        err=err,
        trials=read_record(folder / "out").trials,
        attributes=[trial.user_attrs for trial in study.trials],
        searcher=searcher,
    )


def test_a_trial_in_a_worker_is_the_scripts_own(searched: Any) -> None:
    first, attributes = searched.trials[0], searched.attributes[0]
    assert (first.state, first.objective) == (COMPLETE, searched.printed["alone"])
    assert attributes["process"] != searched.searcher and attributes["trainer"].startswith("littrainer.")
    assert attributes["seen"] == [searched.printed["folder"], 1]
    assert (searched.folder / "out" / "run-0" / "checkpoint-3" / "training_args.bin").exists()


def test_failures_and_dead_processes_are_recorded_and_the_search_goes_on(searched: Any) -> None:
    assert searched.trials[1].error == "ValueError: DoesNotFit: width of 7 does not fit"
    said = "RuntimeError: the process of the trial ended with SIGKILL; if memory ran out, let fewer trials"
    assert searched.trials[2].error.startswith(said)
    assert [trial.state for trial in searched.trials] == [COMPLETE, FAILED, FAILED, FAILED]


def test_ctrl_c_ends_the_search_and_all_its_processes(searched: Any) -> None:
    assert searched.printed["interrupted"]
    assert not [number for number in {one["process"] for one in searched.attributes if one} if is_running(number)]
    # They have printed without bars.
    assert "{'eval_loss':" in searched.out and "it/s" not in searched.err


# ---- Searches of this process ----------------------------------------------------------------------------------------


class Mistaken(optuna.samplers.RandomSampler):
    def sample_independent(self, *given: Any) -> Any:
        raise KeyError("no such thing")


def test_a_search_in_memory_runs_as_many_trials_as_asked_for_and_an_error_ends_it(tmp_path: Path) -> None:
    trainer = searched_trainer(tmp_path)
    heard: list[int] = []
    best = trainer.hyperparameter_search(
        rate_space,
        n_trials=3,
        n_jobs=2,
        sampler=optuna.samplers.RandomSampler(seed=1),
        callbacks=[lambda study, trial: heard.append(trial.number)],
    )
    assert sorted(heard) == [0, 1, 2]
    trials = read_record(tmp_path).trials
    assert [trial.state for trial in trials] == [COMPLETE] * 3
    assert best.objective == min(trial.objective for trial in trials)
    assert len({trial.parameters["learning_rate"] for trial in trials}) == 3
    with pytest.raises(SearchMistake, match="hp_space failed: KeyError: 'no such thing'") as raised:
        trainer.hyperparameter_search(rate_space, n_trials=3, n_jobs=2, sampler=Mistaken())
    assert "sample_independent" in str(raised.value.__cause__)
    assert len(read_record(tmp_path).trials) < 3


def test_what_cannot_be_sent_is_told_before_any_trial(tmp_path: Path) -> None:
    trainer = searched_trainer(tmp_path)
    held = Mistaken()
    held.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"sampler, the pruner or the storage .* cannot be sent"):
        trainer.hyperparameter_search(rate_space, n_trials=2, n_jobs=2, sampler=held)
    trainer.lock = threading.Lock()
    with pytest.raises(TypeError, match=r"because of trainer\.lock"):
        trainer.hyperparameter_search(rate_space, n_trials=2, n_jobs=2)
    with pytest.raises(SearchMistake, match="cannot share an InMemoryStorage"):
        trainer.hyperparameter_search(rate_space, n_jobs=2, storage=optuna.storages.InMemoryStorage(), study_name="s")


def test_a_worker_ends_with_the_process_that_searches() -> None:
    starter = (
        "import os, littrainer.search.optuna_workers as w; "
        "process, channel = w._started(dict(os.environ)); print(process.pid, flush=True); process.wait()"
    )
    command = [sys.executable, "-c", starter]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        number = int(process.stdout.readline())
        process.kill()
    wait_until(lambda: not is_running(number), "the worker has ended")


# ---- Parts -----------------------------------------------------------------------------------------------------------


def arguments(device: str = "cpu") -> Any:
    return SimpleNamespace(device=torch.device(device))


def test_jobs_have_to_be_a_number() -> None:
    for n_jobs in (0, -2, 1.5, True, "2", None):
        with pytest.raises(SearchMistake, match=r"n_jobs=.* has to be the number"):
            number_of_jobs(arguments(), n_jobs)


def test_jobs_share_gpus_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setenv("RANK", "0")
    assert number_of_jobs(arguments(), -1) == os.cpu_count()
    alone = variables_of_worker(arguments(), 0, 8)
    assert alone["OMP_NUM_THREADS"] == "1" and "RANK" not in alone
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for named, expected in ((None, ["0", "1", "0"]), ("4,7", ["4", "7", "4"])):
        if named is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        shares = [variables_of_worker(arguments("cuda"), share, 3) for share in range(3)]
        assert [share["CUDA_VISIBLE_DEVICES"] for share in shares] == expected
        assert number_of_jobs(arguments("cuda"), -1) == 2


def test_samplers_of_workers_draw_apart_by_the_users_seed() -> None:
    def drawn(number: int, **keywords: Any) -> list[float]:
        sampler = optuna.samplers.TPESampler(**keywords)
        seed_apart(sampler, number)
        study = optuna.create_study(sampler=sampler)
        return [study.ask().suggest_float("rate", 0.0, 1.0) for _ in range(2)]

    assert drawn(0, seed=3) == drawn(0, seed=3) != drawn(1, seed=3)
    assert drawn(0, seed=4) != drawn(0, seed=3)
