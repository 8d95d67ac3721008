"""`n_jobs`: trials of one study in several processes of this machine, which share the study's storage.

Optuna's own threads begin the trials and note how they end. Each hands its trial to a process that has the Trainer by
cloudpickle, and that draws, reports and prunes through the storage. A trial begins with the Trainer as it was sent.
"""

from __future__ import annotations

import contextlib
import operator
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from littrainer.distributed import environment
from littrainer.search.parameters import SearchMistake
from littrainer.search.trainer_pickle import packed, unpacked
from littrainer.search.trial import run_trial

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
FOLDER = "littrainer:folder"
"""An attribute of this name in a study's trial holds its run folder."""
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
    """Return the environment of a worker, which has its own GPU and its share of the CPU threads."""
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


class Workers(contextlib.AbstractContextManager["Workers"]):
    """The processes in which the trials of a study run; they end with the block, however it does.

    Parameters:
        study: its storage is one that processes can share.
        jobs: how many trials run at once.

    Raises:
        TypeError: something that the workers need cannot be pickled.
    """

    def __init__(self, trainer: Any, study: Any, jobs: int):
        import optuna

        _pickled(study)
        self._sent = pickle.dumps((packed(trainer), _pickled(study.sampler), optuna.logging.get_verbosity()))
        self._args, self._jobs = trainer.args, jobs
        self._workers: dict[int, tuple[subprocess.Popen[bytes], Connection]] = {}
        # Each worker has a share of the devices, which the one that takes its place gets.
        self._free_shares: SimpleQueue[int] = SimpleQueue()
        for share in range(jobs):
            self._free_shares.put(share)
        self._is_over = False
        self._while_one_starts = threading.Lock()

    def run(self, trial: Any) -> Any:
        """Run a trial in one of the processes, and return its objective.

        Raises:
            KeyboardInterrupt: the processes have been ended.
            RuntimeError: the process of the trial has ended.
            BaseException: what ended the trial.
        """
        share = self._free_shares.get()
        try:
            with self._while_one_starts:
                if self._is_over:
                    raise KeyboardInterrupt
                is_new = share not in self._workers
                if is_new:
                    self._workers[share] = _started(variables_of_worker(self._args, share, self._jobs))
            channel = self._workers[share][1]
            if is_new:
                channel.send_bytes(self._sent)
            channel.send_bytes(_pickled(trial))
            objective, error, where = pickle.loads(channel.recv_bytes())
        except (EOFError, OSError):
            if self._is_over:
                raise KeyboardInterrupt from None
            raise RuntimeError(_end_of(self._workers.pop(share)[0])) from None
        finally:
            self._free_shares.put(share)
        if error is not None:
            raise error from TraceInWorker(where)
        return objective

    def end(self) -> None:
        """Interrupt the processes, as Ctrl-C does, and kill those that take too long."""
        with self._while_one_starts:
            self._is_over = True
        processes = [process for process, _ in self._workers.values()]
        for process in processes:
            process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + SECONDS_TO_END
        for process in processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def __exit__(self, *_: Any) -> None:
        self.end()


def _started(variables: dict[str, str]) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a process for trials, and return it with the channel to it."""
    ours, theirs = Pipe()
    command = [sys.executable, "-c", PROGRAM, str(theirs.fileno())]
    # Ctrl-C reaches this process alone, which ends the others.
    process = subprocess.Popen(command, env=variables, pass_fds=[theirs.fileno()], start_new_session=True)
    theirs.close()
    return process, ours


def _pickled(part: Any) -> bytes:
    import cloudpickle

    try:
        return cloudpickle.dumps(part)
    except Exception as error:
        raise TypeError(
            f"The sampler, the pruner or the storage of the search cannot be sent to the processes of its trials "
            f"({error}). Search with n_jobs=1, or use those of Optuna."
        ) from error


class TraceInWorker(Exception):
    """The cause of an error from a worker: its traceback there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _end_of(process: subprocess.Popen[bytes]) -> str:
    """Return how a process has ended, and what to do."""
    status = process.wait()
    how = signal.Signals(-status).name if status < 0 else f"status {status}, as its output says"
    hint = "; if memory ran out, let fewer trials run at once (n_jobs)" if status == -signal.SIGKILL else ""
    return f"the process of the trial ended with {how}{hint}"


# ---- In a worker -----------------------------------------------------------------------------------------------------


def main(descriptor: str) -> None:
    """Run the trials that are received, until Ctrl-C; `python -c` calls this in each worker."""
    # A process that was started in the background ignores it, and hands that on.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    channel, received = Connection(int(descriptor)), SimpleQueue[bytes]()
    threading.Thread(target=_receive, args=(channel, received), name="littrainer-search", daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        import optuna

        trainer, sampler, verbosity = pickle.loads(received.get())
        optuna.logging.set_verbosity(verbosity)
        while True:
            channel.send_bytes(_outcome(trainer, sampler, received.get()))


def _receive(channel: Connection, received: SimpleQueue[bytes]) -> None:
    try:
        while True:
            received.put(channel.recv_bytes())
    except EOFError:
        # The process that searches has ended, however it has.
        os._exit(1)


def _outcome(packed_trainer: bytes, sampler: bytes, packed_trial: bytes) -> bytes:
    """Run a trial, and return its objective, or its error and where that came from."""
    import cloudpickle

    try:
        trainer, trial = unpacked(packed_trainer), pickle.loads(packed_trial)
        trial.study.sampler = pickle.loads(sampler)
        seed_apart(trial.study.sampler, trial.number)
        try:
            return pickle.dumps((run_trial(trainer, trial), None, ""))
        finally:
            note_folder(trainer, trial)
    except Exception as error:
        where = "".join(traceback.format_exception(error))
        try:
            content = cloudpickle.dumps((None, error, where))
            pickle.loads(content)
        except Exception:
            # A class whose constructor pickle cannot call.
            kind: Any = next(base for base in type(error).__mro__ if base.__module__ == "builtins")
            stands_for = kind(f"{type(error).__name__}: {error}")
            stands_for.__notes__ = getattr(error, "__notes__", [])
            return pickle.dumps((None, stands_for, where))
        return content


def note_folder(trainer: Any, trial: Any) -> None:
    """Note the run folder of an Optuna trial, if it has one."""
    # A trial that failed early may lack what `hp_name` looks for.
    with contextlib.suppress(Exception):
        folder = trainer._get_output_dir(trial)
        if os.path.isdir(folder):
            trial.set_user_attr(FOLDER, folder)


def seed_apart(sampler: Any, number: int) -> None:
    """Let the sampler of a trial draw other numbers than those of the others, which the user's seed decides too."""
    for held in vars(sampler).values():
        if callable(getattr(getattr(held, "rng", None), "seed", None)):
            held.rng.seed((int(held.rng.randint(2**31)) + number) % 2**32)
        elif hasattr(held, "sample_independent"):
            seed_apart(held, number)
