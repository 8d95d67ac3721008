"""`n_jobs`: trials of one study in several processes of this machine, which share the study's storage.

Each worker gets the Trainer, the sampler and the pruner by cloudpickle, and runs `Study.optimize` by itself: what it
draws, reports and prunes goes through the storage. A trial begins with the Trainer as it was sent.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from littrainer.distributed import environment
from littrainer.search.parameters import SearchMistake
from littrainer.search.trainer_pickle import packed, unpacked

if TYPE_CHECKING:
    from littrainer.search.optuna_backend import OptunaTrials

logger = logging.getLogger(__name__)

VISIBLE_GPUS, THREADS = "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"
# What a launcher says of the process that searches; each worker trains alone.
OF_LAUNCHERS = (
    environment.RANK,
    environment.WORLD_SIZE,
    environment.LOCAL_RANK,
    environment.LOCAL_WORLD_SIZE,
    environment.MAIN_ADDRESS,
    environment.MAIN_PORT,
)
WORKER = "littrainer:worker"
"""An attribute of this name in a study's trial holds the folder and the number of the worker that runs it."""
SECONDS_BETWEEN_LOOKS = 0.2
# How long a worker that is interrupted may take to close the runs of trackers.
SECONDS_TO_END = 10.0
PROGRAM = "import sys, littrainer.search.optuna_workers as workers; workers.main(*sys.argv[1:])"


def number_of_jobs(args: Any, n_jobs: Any) -> int:
    """Return how many trials run at once.

    Parameters:
        args: training arguments, whose device counts.
        n_jobs: the number, or -1: one for each GPU, and without GPUs one for each core.

    Raises:
        SearchMistake: it is no such number.
    """
    is_number = hasattr(n_jobs, "__index__") and not isinstance(n_jobs, bool)
    if not is_number or (n_jobs < 1 and n_jobs != -1):
        raise SearchMistake(f"n_jobs={n_jobs!r} has to be the number of trials at once, or -1 for one on each GPU.")
    return operator.index(n_jobs) if n_jobs != -1 else len(visible_gpus(args)) or os.cpu_count() or 1


def visible_gpus(args: Any) -> list[str]:
    """Return the GPUs for trials, as CUDA_VISIBLE_DEVICES names them; none if the arguments ask for the CPU."""
    if args.device.type != "cuda":
        return []
    import torch

    named = [name.strip() for name in os.environ.get(VISIBLE_GPUS, "").split(",") if name.strip()]
    indices = [str(index) for index in range(torch.cuda.device_count())]
    return named[: len(indices)] if len(named) >= len(indices) else indices


def variables_of_worker(args: Any, share: int, jobs: int) -> dict[str, str]:
    """Return the environment of a worker, which has its own GPU and its share of the CPU threads.

    Parameters:
        share: which share of the GPUs, from 0 up.
        jobs: how many run at once.
    """
    import torch

    gpus = visible_gpus(args)
    kept = {name: value for name, value in os.environ.items() if name not in OF_LAUNCHERS}
    # In front stays what a redirection of transformers has put there.
    folders = [*kept.get("PYTHONPATH", "").split(os.pathsep), *sys.path]
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, folders))),
        THREADS: str(max(1, torch.get_num_threads() // jobs)),
        **({VISIBLE_GPUS: gpus[share % len(gpus)]} if gpus else {}),
    }


@dataclass
class Task:
    """What all workers are sent.

    Parameters:
        trainer: the Trainer, as `trainer_pickle.packed` gives it.
        study: keywords of `optuna.load_study`.
        trials: keywords of `OptunaTrials`, but for the Trainer and the study.
        n_trials: trials of all workers; None if something else ends the search.
        keywords: of `Study.optimize`.
        verbosity: of Optuna's log.
    """

    trainer: bytes
    study: dict[str, Any]
    trials: dict[str, Any]
    n_trials: int | None
    keywords: dict[str, Any]
    verbosity: int


def search_in_workers(
    trainer: Any, trials: OptunaTrials, jobs: int, n_trials: int | None, folder: Path, **keywords: Any
) -> None:
    """Run the trials of a study in `jobs` processes, and record what becomes of them.

    Parameters:
        trials: the trials of this search, with the study, whose storage the processes can share.
        n_trials: trials to run; None if `keywords` end the search.
        folder: an empty folder for the workers' files.
        keywords: of `Study.optimize`.

    Raises:
        TypeError: something that the workers need cannot be pickled.
        BaseException: what ended the search in a worker; the other workers are ended with it.
    """
    import optuna

    if keywords.pop("show_progress_bar", False):
        logger.warning("show_progress_bar has no effect with n_jobs above 1.")
    study = trials.study
    parts = {"storage": study._storage, "sampler": study.sampler, "pruner": study.pruner}
    given = {"study_name": study.study_name, **parts}
    kept = {"search_id": trials.search_id, "catch": trials.catch}
    task = Task(packed(trainer), given, kept, n_trials, keywords, optuna.logging.get_verbosity())
    (folder / "task").write_bytes(_pickled(task))
    workers: dict[int, subprocess.Popen[bytes]] = {}
    # Worker -> its share of the devices, which the one that takes its place gets.
    shares: dict[int, int] = {}
    numbers = count()

    def start(share: int) -> None:
        number = next(numbers)
        command = [sys.executable, "-c", PROGRAM, str(folder), str(number)]
        variables = variables_of_worker(trainer.args, share, jobs)
        # Ctrl-C reaches this process alone, which ends the workers.
        workers[number] = subprocess.Popen(command, stdin=subprocess.PIPE, env=variables, start_new_session=True)
        shares[number] = share

    ended = 0
    try:
        for share in range(jobs):
            start(share)
        while workers:
            time.sleep(SECONDS_BETWEEN_LOOKS)
            for number, process in list(workers.items()):
                if process.poll() is not None:
                    del workers[number]
                    if process.returncode:
                        _raise_error_of(folder, number)
                        _fail_trial_of(trials, f"{folder}:{number}", process.returncode)
                        start(shares[number])
            ended_now = sum(trial.state.is_finished() for trial in study.get_trials(deepcopy=False))
            if ended_now != ended:
                ended = ended_now
                trials.keep_record()
    finally:
        _end(workers.values())


def _pickled(task: Task) -> bytes:
    import cloudpickle

    try:
        return cloudpickle.dumps(task)
    except Exception as error:
        raise TypeError(
            f"The sampler, the pruner, the storage or the callbacks of the search cannot be sent to the processes of "
            f"its trials ({error}). Search with n_jobs=1, or use those of Optuna."
        ) from error


def _raise_error_of(folder: Path, number: int) -> None:
    file = folder / f"error-{number}"
    if file.exists():
        error, where = pickle.loads(file.read_bytes())
        raise error from TraceInWorker(where)


class TraceInWorker(Exception):
    """The cause of an error from a worker: its traceback there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _fail_trial_of(trials: OptunaTrials, worker: str, status: int) -> None:
    """Record that a worker has ended without an error of Python: the trial that it ran has failed."""
    how = signal.Signals(-status).name if status < 0 else f"status {status}"
    hint = "; if memory ran out, let fewer trials run at once (n_jobs)" if status == -signal.SIGKILL else ""
    study = trials.study
    running = [one for one in study.get_trials(deepcopy=False) if not one.state.is_finished()]
    own = [one for one in running if one.user_attrs.get(WORKER) == worker]
    if not own:
        raise RuntimeError(f"A process of the search ended with {how} before its first trial; its output says why.")
    for trial in own:
        logger.warning("The process of trial %d ended with %s%s.", trial.number, how, hint)
        trials.fail(trial, f"its process ended with {how}{hint}")


def _end(workers: Iterable[subprocess.Popen[bytes]]) -> None:
    """Interrupt workers, as Ctrl-C does, and kill those that take too long."""
    for process in workers:
        process.send_signal(signal.SIGINT if os.name == "posix" else signal.SIGTERM)
    deadline = time.monotonic() + SECONDS_TO_END
    for process in workers:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# ---- In a worker -----------------------------------------------------------------------------------------------------


def main(folder: str, number: str) -> None:
    """Run trials of a study until the search ends; `python -c` calls this in each worker."""
    # A process that was started in the background ignores it, and hands that on.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_end_with_search, name="littrainer-search", daemon=True).start()
    try:
        _search(Path(folder), int(number))
    except BaseException as error:
        (Path(folder) / f"error-{number}").write_bytes(_error_with_trace(error))
        raise


def _end_with_search() -> None:
    # The other end of the pipe closes when the process that searches has ended, however it has.
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def _search(folder: Path, number: int) -> None:
    import optuna

    from littrainer.search.optuna_backend import OptunaTrials, naming_storage
    from littrainer.search.trial import run_trial

    task: Task = pickle.loads((folder / "task").read_bytes())
    optuna.logging.set_verbosity(task.verbosity)
    tickets, stopped = folder / "tickets", folder / "stopped"
    tickets.mkdir(exist_ok=True)

    def run(trial: Any) -> Any:
        trial.set_user_attr(WORKER, f"{folder}:{number}")
        trials.trainer = unpacked(task.trainer)
        return run_trial(trials.trainer, trial)

    def stop_if_over(study: Any, trial: Any) -> None:
        if stopped.exists() or not take_ticket(tickets, task.n_trials):
            study.stop()

    with naming_storage(task.study["storage"]):
        study = optuna.load_study(**task.study)
        seed_apart(study.sampler, number)
        trials = OptunaTrials(unpacked(task.trainer), study, run, **task.trials)
        if not stopped.exists() and take_ticket(tickets, task.n_trials):
            callbacks = [*task.keywords.get("callbacks", ()), stop_if_over]
            trials.optimize(**{**task.keywords, "callbacks": callbacks})
    # Trials or time are over, or the study was stopped: the other workers begin no further trial either.
    stopped.touch()


def take_ticket(folder: Path, n_trials: int | None) -> bool:
    """Return whether there is a trial left to run, and take it; each is a file that one process alone can make."""
    if n_trials is None:
        return True
    for number in range(n_trials):
        with contextlib.suppress(FileExistsError):
            (folder / str(number)).touch(exist_ok=False)
            return True
    return False


def seed_apart(sampler: Any, number: int) -> None:
    """Let the sampler of a worker draw other numbers than those of the others, which the user's seed decides too."""
    for held in vars(sampler).values():
        if callable(getattr(getattr(held, "rng", None), "seed", None)):
            held.rng.seed((int(held.rng.randint(2**31)) + number) % 2**32)
        elif hasattr(held, "sample_independent"):
            seed_apart(held, number)


def _error_with_trace(error: BaseException) -> bytes:
    import cloudpickle

    where = "".join(traceback.format_exception(error))
    try:
        content = cloudpickle.dumps((error, where))
        pickle.loads(content)
    except Exception:
        # A class whose constructor pickle cannot call.
        return pickle.dumps((RuntimeError(f"{type(error).__name__}: {error}"), where))
    return content
