"""`n_jobs`: each trial of a study in a separate process on this machine.

Optuna's threads start the trials. A trial's process receives the Trainer and the trial by its standard input; it
draws, reports and prunes through the storage of the study.
"""

from __future__ import annotations

import contextlib
import io
import operator
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from littrainer.callbacks.trainer_context import TrainerContext
from littrainer.distributed import environment
from littrainer.runtime.atomic_files import write_atomically
from littrainer.runtime.lazy_isinstance import is_a
from littrainer.runtime.notes import add_note
from littrainer.search.parameters import SearchMistake
from littrainer.search.trainer_pickle import pack, unpack
from littrainer.search.trial import run_trial

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments

VISIBLE_GPUS, THREADS = "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"
# Set by a launcher; each trial trains in a single process.
LAUNCHER_VARIABLES = (
    environment.RANK,
    environment.WORLD_SIZE,
    environment.LOCAL_RANK,
    environment.LOCAL_WORLD_SIZE,
    environment.MAIN_ADDRESS,
    environment.MAIN_PORT,
)
# An interrupted process closes the runs of trackers first.
MAX_SHUTDOWN_S = 10.0
KILL_MARGIN_S = 5.0
PROGRAM = "import sys, littrainer.search.trial_processes as processes; processes.main(*sys.argv[1:])"


def count_jobs(args: TrainingArguments, n_jobs: Any) -> int:
    """Return the number of parallel trials; for -1 the number of GPUs, or else of cores."""
    is_number = hasattr(n_jobs, "__index__") and not isinstance(n_jobs, bool)
    if not is_number or (n_jobs < 1 and n_jobs != -1):
        raise SearchMistake(f"n_jobs={n_jobs!r} has to be the number of trials at once, or -1 for one on each GPU.")
    return operator.index(n_jobs) if n_jobs != -1 else len(_list_gpus(args)) or os.cpu_count() or 1


def _list_gpus(args: TrainingArguments) -> list[str]:
    """Return the GPUs as in CUDA_VISIBLE_DEVICES; an empty list on the CPU."""
    if args.device.type != "cuda":
        return []
    import torch

    count = torch.cuda.device_count()
    names = os.environ.get(VISIBLE_GPUS) or ",".join(map(str, range(count)))
    return [name.strip() for name in names.split(",")][:count]


def make_environment(args: TrainingArguments, job: int, jobs: int) -> dict[str, str]:
    import torch

    gpus = _list_gpus(args)
    variables = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    # A redirection of transformers must remain the first entry.
    folders = [*variables.get("PYTHONPATH", "").split(os.pathsep), *sys.path]
    variables["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, folders)))
    variables[THREADS] = str(max(1, torch.get_num_threads() // jobs))
    if gpus:
        variables[VISIBLE_GPUS] = gpus[job % len(gpus)]
    return variables


class TrialProcesses(contextlib.AbstractContextManager["TrialProcesses"]):
    """Processes of trials; running processes are interrupted at the end of the block.

    Parameters:
        study: its storage must support several processes.
        folder: for files with the outcomes of trials.
    """

    def __init__(self, trainer: TrainerContext, study: Any, jobs: int, folder: str):
        import optuna

        _pickle(study)
        self._folder = folder
        # Not in a file, which a killed search would leave, since the Trainer contains access tokens.
        self._sent = pickle.dumps((pack(trainer), _pickle(study.sampler), optuna.logging.get_verbosity()))
        # A trial reuses the environment, and so the GPU, of an ended trial.
        self._environments: SimpleQueue[dict[str, str]] = SimpleQueue()
        for job in range(jobs):
            self._environments.put(make_environment(trainer.args, job, jobs))
        # All processes end when this pipe is closed.
        self._pipe, writer = os.pipe()
        self._open_during_search = os.fdopen(writer, "wb")
        self._running: set[subprocess.Popen[bytes]] = set()
        weakref.finalize(self, os.close, self._pipe)

    def run(self, trial: Any) -> Any:
        """Run a trial in a process, and return its objective.

        Raises:
            KeyboardInterrupt: the processes have been interrupted.
            Exception: the error that ended the trial, or a RuntimeError if the process ended without an outcome.
        """
        outcome_file, pickled_trial = Path(self._folder, f"{trial.number}.outcome"), _pickle(trial)
        command = [sys.executable, "-c", PROGRAM, str(self._pipe), str(outcome_file)]
        variables = self._environments.get()
        try:
            if self._open_during_search.closed:
                raise KeyboardInterrupt
            # In a new session it does not receive Ctrl-C itself.
            with subprocess.Popen(
                command, env=variables, stdin=subprocess.PIPE, pass_fds=[self._pipe], start_new_session=True
            ) as process:
                self._running.add(process)
                assert process.stdin is not None
                # The process may end before it has read all input.
                with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
                    stdin.write(self._sent)
                    stdin.write(pickled_trial)
                process.wait()
            self._running.discard(process)
        finally:
            self._environments.put(variables)
        if not outcome_file.exists():
            is_interrupted = self._open_during_search.closed
            raise KeyboardInterrupt if is_interrupted else RuntimeError(_describe_end(process.returncode))
        objective, error = pickle.loads(outcome_file.read_bytes())
        if error is not None:
            raise error
        return objective

    def interrupt(self) -> None:
        """Interrupt the processes as Ctrl-C does, and kill them after a timeout."""
        self._open_during_search.close()
        # A process does not end if it hangs, or if a forked process keeps the pipe open.
        end = time.monotonic() + MAX_SHUTDOWN_S + KILL_MARGIN_S
        for process in tuple(self._running):
            while process.poll() is None and time.monotonic() < end:
                time.sleep(0.05)
            process.kill()

    def __exit__(self, *_: Any) -> None:
        self.interrupt()


def _pickle(value: Any) -> bytes:
    import cloudpickle

    try:
        return cloudpickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"The sampler, the pruner or the storage of the search cannot be sent to the processes of its trials "
            f"({error}). Search with n_jobs=1, or use those of Optuna."
        ) from error


def _describe_end(status: int) -> str:
    end = signal.Signals(-status).name if status < 0 else f"status {status}, as its output says"
    hint = "; if memory ran out, let fewer trials run at once (n_jobs)" if status == -signal.SIGKILL else ""
    return f"the process of the trial ended with {end}{hint}"


# ---- In the process of a trial ---------------------------------------------------------------------------------------


def main(pipe: str, outcome_file: str) -> None:
    """Run a trial and write its outcome, in the trial's process."""
    # A background process ignores Ctrl-C, and its child processes inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Parallel trials print to the same console.
    label = f"[trial {Path(outcome_file).stem}] "
    sys.stdout, sys.stderr = LabelledLines(sys.stdout, label), LabelledLines(sys.stderr, label)
    threading.Thread(target=_end_with_search, args=(int(pipe),), name="littrainer-search", daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        write_atomically(outcome_file, _pickle_outcome())


class LabelledLines(io.TextIOBase):
    """A text stream that begins each line with a label, and writes complete lines only.

    Parameters:
        stream: the stream to write to.
        label: such as `[trial 3] `.
    """

    def __init__(self, stream: Any, label: str):
        self._stream, self._label, self._line = stream, label, ""

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        self._stream.write("".join(f"{self._label}{line}\n" for line in lines))
        self._stream.flush()
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return str(self._stream.encoding)

    def fileno(self) -> int:
        return int(self._stream.fileno())

    def close(self) -> None:
        """Write an unfinished last line; the stream itself stays open."""
        if self._line:
            self.write("\n")


def _end_with_search(pipe: int) -> None:
    """Interrupt this process when the end of the search closes the pipe."""
    os.read(pipe, 1)
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    time.sleep(MAX_SHUTDOWN_S)
    os._exit(1)


def _pickle_outcome() -> bytes:
    """Run the trial from standard input, and return its pickled objective and error."""
    import cloudpickle
    import optuna

    try:
        packed_trainer, sampler, verbosity = pickle.load(sys.stdin.buffer)
        optuna.logging.set_verbosity(verbosity)
        trainer, trial = unpack(packed_trainer), pickle.load(sys.stdin.buffer)
        trial.study.sampler = pickle.loads(sampler)
        seed_by_trial(trial.study.sampler, trial.number)
        return pickle.dumps((run_trial(trainer, trial), None))
    except Exception as error:
        if not is_a(error, "pruned trial"):
            add_note(error, f"In the process of the trial:\n{''.join(traceback.format_exception(error))}")
        try:
            outcome = cloudpickle.dumps((None, error))
            pickle.loads(outcome)
        except Exception:
            # The error's class cannot be unpickled.
            kind: Any = next(base for base in type(error).__mro__ if base.__module__ == "builtins")
            substitute = kind(f"{type(error).__name__}: {error}")
            substitute.__notes__ = getattr(error, "__notes__", [])
            return pickle.dumps((None, substitute))
        return outcome


def seed_by_trial(sampler: Any, number: int) -> None:
    """Seed a sampler by the trial's number and the user's seed, so that each trial draws other values."""
    for part in vars(sampler).values():
        if callable(getattr(getattr(part, "rng", None), "seed", None)):
            part.rng.seed((int(part.rng.randint(2**31)) + number) % 2**32)
        elif hasattr(part, "sample_independent"):
            seed_by_trial(part, number)
