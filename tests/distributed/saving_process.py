"""One of two processes that save and resume together: `python -m tests.distributed.saving_process FOLDER`.

Rank and world size come from the environment, as a launcher sets them. Each process writes what its checks found to
`FOLDER/RANK.pickle`. In some checks a process dies; these run in forks, before anything here has threads.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from littrainer import Trainer, TrainerCallback
from littrainer.checkpoint import weights
from littrainer.checkpoint.checksums import read_manifest
from littrainer.checkpoint.run_lock import CLAIM_NAME
from littrainer.checkpoint.verification import damage_in
from littrainer.distributed.agreement import from_each, wait_for_each_other
from littrainer.engine.run_lightning import import_lightning
from tests.faults.signals import SignalIn
from tests.scenarios.models import NoisyClassifier
from tests.scenarios.other_processes import LONGEST_WAIT_SECONDS, end_process
from tests.scenarios.trainers import quiet_trainer

RANK, PROCESSES = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
LONGEST_WAIT = timedelta(seconds=LONGEST_WAIT_SECONDS)
# Three optimizer steps to an epoch.
SETTINGS: dict[str, Any] = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "logging_strategy": "steps"}


class Saves(TrainerCallback):
    """Notes the steps at which `on_save` comes."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps.append(state.global_step)


class StopAfter(TrainerCallback):
    """Stops the training after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = control.should_training_stop or state.global_step == self.step


def make(folder: Path | str, *callbacks: Any, kind: type[Trainer] = Trainer, **changes: Any) -> Trainer:
    torch.manual_seed(0)
    return quiet_trainer(
        folder,
        NoisyClassifier(),
        rows=24,
        kind=kind,
        given={"callbacks": list(callbacks)},
        **{**SETTINGS, **changes},
    )


def error_of(work: Callable[[], Any]) -> str | None:
    """The kind and the text of the error that something ends with."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def names_in(folder: Path) -> list[str]:
    """The files of checkpoints below a folder."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "littrainer_run.json"]
    return sorted(path.relative_to(folder).as_posix() for path in files)


def state_of(folder: Path) -> dict[str, Any]:
    """What lies in the folder of a run when all processes are done with it."""
    wait_for_each_other()
    checkpoints = sorted(folder.glob("checkpoint-*"))
    found = {
        "checkpoints": [path.name for path in checkpoints],
        "damage": [damage_in(path) for path in checkpoints],
        "hidden": sorted(path.name for path in folder.glob(".*")),
    }
    wait_for_each_other()
    return found


@contextmanager
def failing_at(owner: Any, name: str, step: int, rank: int, number: int) -> Iterator[None]:
    """Let a function fail in one process when it writes into one checkpoint.

    Parameters:
        number: of the system's error.
    """
    original = getattr(owner, name)

    def write(*arguments: Any, **keywords: Any) -> Any:
        texts = [str(one) for one in (*arguments, *keywords.values())]
        if rank == RANK and any(f"checkpoint-{step}" in text for text in texts):
            raise OSError(number, os.strerror(number))
        return original(*arguments, **keywords)

    with mock.patch.object(owner, name, write):
        yield


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def warnings_noted() -> Iterator[list[str]]:
    handler = Records()
    logging.getLogger("littrainer").addHandler(handler)
    try:
        yield handler.texts
    finally:
        logging.getLogger("littrainer").removeHandler(handler)


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


# ---- Checks ----------------------------------------------------------------------------------------------------------


def whole(folder: Path) -> Any:
    """A training that is never stopped, and what one that is resumed at step 4 ends with."""
    saves = Saves()
    first = make(folder / "run", saves)
    first.train()
    checkpoint = folder / "run" / "checkpoint-4"
    manifest = read_manifest(checkpoint)
    assert manifest is not None
    found = {
        "saves": saves.steps,
        "state": state_of(folder / "run"),
        "files": names_in(checkpoint),
        "sealed": sorted(manifest.files),
        "weights": weights_of(first),
    }
    second = make(folder / "run")
    second.train(resume_from_checkpoint=str(checkpoint))
    return {**found, "resumed": weights_of(second)}


def failures(folder: Path) -> Any:
    """Writing fails in one process, in different places; then training is resumed."""

    class FailingOnSave(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if RANK == 1 and state.global_step == 4:
                raise LookupError("the upload failed")

    found: dict[str, Any] = {}
    places: dict[str, tuple[Any, str, int, int]] = {
        "weights of the first": (weights, "_write_plain", 0, errno.ENOSPC),
        "random states of the second": (torch, "save", 1, errno.EACCES),
    }
    for name, (owner, function, rank, number) in places.items():
        run = folder / name.replace(" ", "-")
        with failing_at(owner, function, 4, rank, number):
            text = error_of(make(run).train)
        found[name] = text, state_of(run)
    found["on_save"] = error_of(make(folder / "on-save", FailingOnSave()).train), state_of(folder / "on-save")
    resumed = make(folder / "weights-of-the-first")
    resumed.train(resume_from_checkpoint=True)
    return {**found, "resumed": weights_of(resumed)}


def background(folder: Path) -> Any:
    saves = Saves()
    trainer = make(folder / "run", saves, async_save=True, save_total_limit=2)
    trainer.train()
    found = {"saves": saves.steps, "state": state_of(folder / "run"), "weights": weights_of(trainer)}
    found["files"] = names_in(folder / "run" / "checkpoint-4")
    with failing_at(weights, "_write_plain", 4, 0, errno.ENOSPC):
        found["error"] = error_of(make(folder / "full", async_save=True).train)
    return {**found, "full": state_of(folder / "full")}


def choosing(folder: Path) -> Any:
    """Which checkpoint is resumed from."""
    run = folder / "run"
    make(run, StopAfter(4)).train()
    if RANK == 0:
        (run / "checkpoint-4" / "rng_state_1.pth").write_bytes(b"no archive")
    wait_for_each_other()
    damaged = error_of(lambda: make(run).train(resume_from_checkpoint=str(run / "checkpoint-4")))
    resumed = make(run)
    started: list[int] = []

    class Starts(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            started.append(state.global_step)

    resumed.add_callback(Starts())
    resumed.train(resume_from_checkpoint=True)
    return {
        "started": started,
        "weights": weights_of(resumed),
        "damaged": damaged,
        "one sided": error_of(lambda: make(run).train(resume_from_checkpoint=RANK == 0)),
        "nothing": error_of(lambda: make(folder / "nothing").train(resume_from_checkpoint=True)),
    }


@contextmanager
def own_disk(folder: Path, first_of_its_node: bool) -> Iterator[Path]:
    """A working directory that no other process has or sees, so that a relative folder is another one in each."""
    before, local_rank = Path.cwd(), os.environ["LOCAL_RANK"]
    node = folder / f"node{RANK}"
    node.mkdir(parents=True)
    os.chdir(node)
    if first_of_its_node:
        os.environ["LOCAL_RANK"] = "0"
    try:
        yield node
    finally:
        os.environ["LOCAL_RANK"] = local_rank
        os.chdir(before)


def disks(folder: Path) -> Any:
    """Nodes with disks of their own, and nodes that share one."""
    found: dict[str, Any] = {}
    with own_disk(folder / "one-writes", first_of_its_node=True) as node:
        make("out", StopAfter(4)).train()
        found["one writes"] = names_in(node)
        found["not seen"] = error_of(lambda: make("out").train(resume_from_checkpoint=True))
    with own_disk(folder / "each-writes", first_of_its_node=True) as node:
        make("out", StopAfter(4), save_on_each_node=True).train()
        found["each writes"] = names_in(node)
        if RANK == 1:
            (node / "out" / "checkpoint-4" / "optimizer.pt").write_bytes(b"no archive")
        resumed = make("out", save_on_each_node=True)
        with warnings_noted() as texts:
            resumed.train(resume_from_checkpoint=True)
        found["each resumes"] = weights_of(resumed)
        found["passed over"] = [text for text in texts if "Passing over" in text]
    local_rank = os.environ["LOCAL_RANK"]
    os.environ["LOCAL_RANK"] = "0"
    try:
        with warnings_noted() as texts:
            make(folder / "shared", StopAfter(4), save_on_each_node=True).train()
    finally:
        os.environ["LOCAL_RANK"] = local_rank
    found["shared"] = state_of(folder / "shared")
    found["files of the shared"] = names_in(folder / "shared" / "checkpoint-4")
    found["told of sharing"] = [text for text in texts if "save_on_each_node" in text]
    make(folder / f"started-at-{RANK}", StopAfter(4)).train()
    wait_for_each_other()
    found["another folder in each"] = [names_in(folder / f"started-at-{rank}") for rank in range(PROCESSES)]
    return found


def signals(folder: Path) -> Any:
    """One process is told to stop, twice; training goes on in both later."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    found: dict[str, Any] = {}
    settings = {"save_strategy": "no", "enable_jit_checkpoint": True, "eval_strategy": "steps", "eval_steps": 2}
    whole_run = make(folder / "whole", **settings)
    whole_run.train()
    found["whole"] = weights_of(whole_run)
    for event, step in (("on_step_begin", 2), ("on_step_end", 3), ("on_prediction_step", 4)):
        saves, run = Saves(), folder / event
        callbacks = [SignalIn(event, step, times=2)] if RANK == 1 else []
        stopped = make(run, saves, *callbacks, **settings)
        stopped.train()
        entry = {"saves": saves.steps, "step": stopped.state.global_step, "state": state_of(run)}
        resumed = make(run, **settings)
        resumed.train(resume_from_checkpoint=True)
        found[event] = {**entry, "resumed": weights_of(resumed)}
    return found


def claims(folder: Path) -> Any:
    """The folder belongs to another run."""
    claim = folder / "taken" / CLAIM_NAME
    with ExitStack() as other_run:
        if RANK == 0:
            claim.parent.mkdir(parents=True)
            # As another process has it.
            fcntl.flock(other_run.enter_context(claim.open("w")), fcntl.LOCK_EX)
        wait_for_each_other()
        found = error_of(make(folder / "taken").train)
    wait_for_each_other()
    make(folder / "taken", StopAfter(2)).train()
    if RANK == 0:
        (folder / "file").touch()
    wait_for_each_other()
    return {
        "error": found,
        "after": state_of(folder / "taken"),
        "below a file": error_of(lambda: make(folder / "file" / "out")),
    }


def lightning_checkpoints(folder: Path) -> Any:
    """Checkpoints that a Lightning callback saves."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    callback = ModelCheckpoint(dirpath=folder / "best", every_n_train_steps=4, save_top_k=-1, filename="{step}")
    make(folder / "run", callback, save_strategy="no").train()
    wait_for_each_other()
    (saved,) = (folder / "best").iterdir()
    resumed = make(folder / "run", save_strategy="no")
    resumed.train(resume_from_checkpoint=str(saved))
    return {"files": names_in(saved), "damage": damage_in(saved), "resumed": weights_of(resumed)}


def other_numbers(folder: Path) -> Any:
    """A checkpoint of another number of processes."""
    run = folder / "run"
    make(run, StopAfter(4)).train()
    wait_for_each_other()
    found = {}
    if RANK == 0:
        record = torch.load(run / "checkpoint-4" / "littrainer_resume.pt", weights_only=False)
        found["world size"] = record["sizes"]["world_size"]
        for file in (run / "checkpoint-4").glob("littrainer_*"):
            file.unlink()
        (run / "checkpoint-4" / "rng_state_0.pth").rename(run / "checkpoint-4" / "rng_state.pth")
        (run / "checkpoint-4" / "rng_state_1.pth").unlink()
    wait_for_each_other()
    resumed = make(run)
    with warnings_noted() as texts:
        resumed.train(resume_from_checkpoint=True)
    return {**found, "told": [text for text in texts if "processes" in text], "step": resumed.state.global_step}


CHECKS: tuple[Callable[[Path], Any], ...] = (
    whole,
    failures,
    background,
    choosing,
    disks,
    signals,
    claims,
    lightning_checkpoints,
    other_numbers,
)


# ---- Processes that die ----------------------------------------------------------------------------------------------


def killed_while_saving(folder: Path, victim: int) -> Any:
    """One process is killed while it writes its part of the checkpoint of step 4."""

    class Dying(Trainer):
        def _save_rng_state(self, output_dir: str) -> None:
            if victim == RANK and self.state.global_step == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            super()._save_rng_state(output_dir)

    before = time.monotonic()
    text = error_of(make(folder / "run", kind=Dying).train)
    return {"error": text, "seconds": time.monotonic() - before}


def in_fork(folder: Path, victim: int) -> Any:
    """What `killed_while_saving` finds in a process forked from this one; None where it was killed."""
    result = folder / f"{RANK}.json"
    folder.mkdir(parents=True, exist_ok=True)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with group(folder / "meeting"):
                result.write_text(json.dumps(killed_while_saving(folder, victim)))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            # Not through what this process has registered to do at its end.
            os._exit(status)
    deadline = time.monotonic() + LONGEST_WAIT.total_seconds()
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            deadline += 10
        time.sleep(0.05)
    return json.loads(result.read_text()) if result.exists() else None


@contextmanager
def group(meeting_place: Path) -> Iterator[None]:
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting_place}", rank=RANK, world_size=PROCESSES, timeout=LONGEST_WAIT
    )
    yield
    dist.destroy_process_group()


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    # Half of the time that a test may take, once for the forks too.
    import_lightning()
    found: dict[str, Any] = {}
    for victim in range(PROCESSES):
        found[f"{victim} killed"] = in_fork(folder / f"killed{victim}", victim)
    with group(folder / "meeting"):
        for check in CHECKS:
            found[check.__name__] = check(folder / check.__name__)
        found["all came to the end"] = from_each(RANK)
    (folder / f"{RANK}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    end_process()
