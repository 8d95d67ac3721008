"""Saving and resuming in two processes: `python -m tests.distributed.saving_process FOLDER`.

A launcher's variables set rank and world size. Processes are killed in forks, before this process has threads; the
results are in `FOLDER/killedVICTIM/RANK.json`.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.checkpoint.filesystem import FileSystem

from littrainer import Trainer, TrainerCallback
from littrainer.checkpoint import sharded_files, weights
from littrainer.checkpoint.checksums import read_manifest
from littrainer.checkpoint.layout import OPTIMIZER_FOLDER, WEIGHTS_FOLDER
from littrainer.checkpoint.store import LOCK_NAME
from littrainer.checkpoint.verification import find_damage
from littrainer.distributed.collectives import barrier
from littrainer.lightning_adapter.run_lightning import import_lightning
from tests.distributed.checks import run_checks
from tests.faults.signals import SignalIn
from tests.scenarios.models import NoisyClassifier
from tests.scenarios.other_processes import MAX_WAIT_SECONDS, end_process, process_group
from tests.scenarios.trainers import quiet_trainer, warnings_logged

RANK, PROCESSES = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
MAX_WAIT = timedelta(seconds=MAX_WAIT_SECONDS)
# An epoch has three optimizer steps.
SETTINGS: dict[str, Any] = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "logging_strategy": "steps"}
CHECKPOINTS = ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
FILES = [
    "littrainer_manifest.json",
    "littrainer_resume.pt",
    "littrainer_resume_1.pt",
    "model.safetensors",
    "optimizer.pt",
    "rng_state_0.pth",
    "rng_state_1.pth",
    "scheduler.pt",
    "trainer_state.json",
    "training_args.bin",
]


class SaveRecorder(TrainerCallback):
    """Recorder of the steps of `on_save`."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps.append(state.global_step)


class StopAfter(TrainerCallback):
    """Callback that stops the training after a step."""

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
        trainer_kwargs={"callbacks": list(callbacks)},
        **{**SETTINGS, **changes},
    )


def get_error(work: Callable[[], Any]) -> str:
    """Return type and message of a function's error."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def check_errors(error: str, failed_rank: int, *texts: str) -> None:
    """Assert that the error of each process contains the texts, and names the process that failed."""
    assert ("PeerFailedError" in error) is (failed_rank != RANK)
    for text in (*texts, *([] if failed_rank == RANK else [f"failed in process {failed_rank}"])):
        assert text in error


def list_files(folder: Path) -> list[str]:
    """Return the files of checkpoints below a folder."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "littrainer_run.json"]
    return sorted(path.relative_to(folder).as_posix() for path in files)


def inspect_run(folder: Path) -> list[Any]:
    """Return names of a run's checkpoints, damage and hidden files, after all processes have finished it."""
    barrier()
    checkpoints = sorted(folder.glob("checkpoint-*"))
    damage = [problem for path in checkpoints for problem in find_damage(path)]
    hidden = sorted(path.name for path in folder.glob(".*"))
    barrier()
    return [*(path.name for path in checkpoints), *damage, *hidden]


@contextmanager
def failing_at(owner: Any, name: str, step: int, rank: int, number: int) -> Iterator[None]:
    """Let a function fail in a process when it writes to a checkpoint.

    Parameters:
        number: errno of the error.
    """
    original = getattr(owner, name)

    def write(*arguments: Any, **keywords: Any) -> Any:
        texts = [str(argument) for argument in (*arguments, *keywords.values())]
        if rank == RANK and any(f"checkpoint-{step}" in text for text in texts):
            raise OSError(number, os.strerror(number))
        return original(*arguments, **keywords)

    with mock.patch.object(owner, name, write):
        yield


def get_weights(trainer: Trainer) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in trainer.model.state_dict().items()}


# A sharded model with sharded checkpoints.
SHARDS: dict[str, Any] = {
    "fsdp": True,
    "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT", "min_num_params": 30},
}


class DelayingShard(TrainerCallback):
    """Callback that delays the second process's shard of the first checkpoint until soon after a step.

    Attributes:
        checkpoints: names of the checkpoints at the end of that step.
        threads: threads that write shards.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.checkpoints = ["not listed"]
        self.threads: list[threading.Thread] = []
        self._released = threading.Event()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.checkpoints = [path.name for path in Path(args.output_dir).glob("checkpoint-*")]
            threading.Timer(0.3, self._released.set).start()

    @contextmanager
    def around(self) -> Iterator[None]:
        original = sharded_files.write_shards

        def write(*arguments: Any) -> None:
            self.threads.append(threading.current_thread())
            assert RANK == 0 or self._released.wait(MAX_WAIT_SECONDS / 4)
            original(*arguments)

        with mock.patch.object(sharded_files, "write_shards", write):
            yield


def get_full_parameters(trainer: Trainer) -> dict[str, Any]:
    model: Any = trainer.model
    return {name: parameter.full_tensor().tolist() for name, parameter in model.named_parameters()}


def read_shards(checkpoint: Path) -> dict[str, Any]:
    """Return the values in a checkpoint's shards, by name."""
    states = [sharded_files.load_full_state(checkpoint / folder) for folder in (WEIGHTS_FOLDER, OPTIMIZER_FOLDER)]
    return {
        name: value.tolist() if torch.is_tensor(value) else value for state in states for name, value in state.items()
    }


# The weights after an uninterrupted training.
REFERENCE_WEIGHTS: dict[str, Any] = {}


# ---- Checks ----------------------------------------------------------------------------------------------------------


def a_checkpoint_has_files_of_each_process_and_is_resumed_exactly(folder: Path) -> None:
    saves = SaveRecorder()
    first = make(folder / "run", saves)
    first.train()
    checkpoint = folder / "run" / "checkpoint-4"
    REFERENCE_WEIGHTS.update(get_weights(first))
    state, files, manifest = inspect_run(folder / "run"), list_files(checkpoint), read_manifest(checkpoint)
    second = make(folder / "run")
    second.train(resume_from_checkpoint=str(checkpoint))
    assert get_weights(second) == REFERENCE_WEIGHTS
    assert state == CHECKPOINTS and saves.steps == [2, 4, 6] and files == FILES
    assert manifest is not None and sorted(manifest.files) == FILES[1:]


def a_failure_to_write_a_checkpoint_ends_both_and_an_earlier_checkpoint_is_resumed(folder: Path) -> None:

    class FailingOnSave(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if RANK == 1 and state.global_step == 4:
                raise LookupError("the upload failed")

    # The first process writes weights, the second random states.
    with failing_at(weights, "_write_plain", 4, 0, errno.ENOSPC):
        outcomes = [(get_error(make(folder / "0").train), inspect_run(folder / "0"))]
    with failing_at(torch, "save", 4, 1, errno.EACCES):
        outcomes.append((get_error(make(folder / "1").train), inspect_run(folder / "1")))
    error = get_error(make(folder / "on-save", FailingOnSave()).train)
    state = inspect_run(folder / "on-save")
    resumed = make(folder / "0")
    resumed.train(resume_from_checkpoint=True)
    assert get_weights(resumed) == REFERENCE_WEIGHTS
    for rank, text in enumerate(("checkpoint-4 could not be written beyond", "Permission denied")):
        check_errors(outcomes[rank][0], rank, text, "" if rank == RANK else "checkpoint-4")
        assert outcomes[rank][1] == ["checkpoint-2"]
    check_errors(error, 1, "LookupError: the upload failed", "" if RANK else "on_save of callbacks")
    assert state == ["checkpoint-2", "checkpoint-4"]


def checkpoints_written_in_the_background_are_the_same_and_a_failure_ends_both(folder: Path) -> None:
    saves = SaveRecorder()
    trainer = make(folder / "run", saves, async_save=True, save_total_limit=2)
    trainer.train()
    state = inspect_run(folder / "run")
    with failing_at(weights, "_write_plain", 4, 0, errno.ENOSPC):
        error = get_error(make(folder / "full", async_save=True).train)
    failed_state = inspect_run(folder / "full")
    assert saves.steps == [2, 4, 6] and state == CHECKPOINTS[1:] and get_weights(trainer) == REFERENCE_WEIGHTS
    assert list_files(folder / "run" / "checkpoint-4") == FILES
    check_errors(error, 0, "BackgroundSaveError", "" if RANK else "No space left")
    assert failed_state == ["checkpoint-2"]


def shards_written_during_training_have_the_values_of_their_step(folder: Path) -> None:
    waiting, saves, held = make(folder / "waiting", **SHARDS), SaveRecorder(), DelayingShard(3)
    waiting.train()
    trainer = make(folder / "run", saves, held, async_save=True, **SHARDS)
    with held.around():
        trainer.train()
    state, names = inspect_run(folder / "run"), [list_files(folder / run) for run in ("run", "waiting")]
    resumed = make(folder / "resumed", async_save=True, **SHARDS)
    resumed.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-2"))
    expected, *others = [get_full_parameters(run) for run in (waiting, trainer, resumed)]
    assert held.threads and threading.main_thread() not in held.threads
    # Later steps have changed the weights before the second process wrote its shard.
    assert RANK == 0 or held.checkpoints == []
    assert saves.steps == [2, 4, 6] and state == CHECKPOINTS and names[0] == names[1]
    for step in (2, 4, 6):
        ours, reference = (read_shards(folder / run / f"checkpoint-{step}") for run in ("run", "waiting"))
        assert ours == reference and len(ours) > 20
    assert others == [expected] * 2


def pending_shards_are_written_when_the_training_ends(folder: Path) -> None:
    class Failing(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                raise OverflowError("of the callback")

    signal.signal(signal.SIGTERM, lambda *_: None)
    endings, states = [], []
    for name, callback in (("error", Failing()), ("signal", SignalIn("on_step_end", 3))):
        held = DelayingShard(3)
        callbacks = [held, callback] if name == "error" or RANK == 1 else [held]
        with held.around():
            endings.append(
                get_error(make(folder / name, *callbacks, async_save=True, enable_jit_checkpoint=True, **SHARDS).train)
            )
        states.append(inspect_run(folder / name))
    resumed = make(folder / "error", **SHARDS)
    resumed.train(resume_from_checkpoint=True)
    assert endings == ["OverflowError: of the callback", "no error"] and resumed.state.global_step == 6
    assert states == [["checkpoint-2"], ["checkpoint-2", "checkpoint-3"]]


def a_failure_to_write_shards_ends_both_and_an_earlier_checkpoint_is_resumed(folder: Path) -> None:
    with failing_at(FileSystem, "create_stream", 4, 1, errno.ENOSPC):
        error = get_error(make(folder, async_save=True, **SHARDS).train)
    failed_state = inspect_run(folder)
    resumed = make(folder, async_save=True, **SHARDS)
    resumed.train(resume_from_checkpoint=True)
    state = inspect_run(folder)
    for text in ("BackgroundSaveError", "checkpoint-4 could not be written in the background", "No space left"):
        assert text in error
    assert failed_state == ["checkpoint-2"] and state == CHECKPOINTS


def shards_written_in_the_background_are_rotated_thinned_and_loaded(folder: Path) -> None:
    settings = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "learning_rate": 0.3,
        "save_total_limit": 2,
        "keep_optimizer_states": 1,
    }
    outcomes = []
    for in_background in (False, True):
        run = folder / str(in_background)
        trainer = make(run, async_save=in_background, **settings, **SHARDS)
        trainer.train()
        best = Path(trainer.state.best_model_checkpoint).name
        outcomes.append((inspect_run(run), list_files(run), best, get_full_parameters(trainer)))
    assert outcomes[0] == outcomes[1]
    assert any("optimizer_0" in name for name in outcomes[1][1]) and len(outcomes[1][0]) == 2


def older_checkpoints_are_thinned_except_the_last_finite_checkpoint(folder: Path) -> None:
    class Harm(TrainerCallback):
        """Callback that makes a weight infinite after the second of three saves."""

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if state.global_step == 5:
                next(model.parameters()).data.view(-1)[0] = float("inf")

    run = folder / "run"
    make(run, Harm(), keep_optimizer_states=1, save_total_limit=1).train()
    state = inspect_run(run)
    make(folder / "thin", keep_optimizer_states=1).train()
    thin = inspect_run(folder / "thin")
    files = list_files(folder / "thin" / "checkpoint-2")
    resumed = make(run)
    resumed.train(resume_from_checkpoint=True)
    refused = get_error(lambda: make(run).train(resume_from_checkpoint=str(folder / "thin" / "checkpoint-2")))
    assert state == CHECKPOINTS[1:] and get_weights(resumed) == REFERENCE_WEIGHTS
    assert thin == CHECKPOINTS and files == [FILES[0], FILES[3], *FILES[-2:]]
    check_errors(refused, 0, f"Resume from {folder / 'thin' / 'checkpoint-6'}")


def both_skip_a_damaged_checkpoint_and_refuse_it_by_name(folder: Path) -> None:
    run = folder / "run"
    make(run, StopAfter(4)).train()
    if RANK == 0:
        (run / "checkpoint-4" / "rng_state_1.pth").write_bytes(b"no archive")
    barrier()
    damaged = get_error(lambda: make(run).train(resume_from_checkpoint=str(run / "checkpoint-4")))
    resumed = make(run)
    started: list[int] = []

    class Starts(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            started.append(state.global_step)

    resumed.add_callback(Starts())
    resumed.train(resume_from_checkpoint=True)
    unequal = get_error(lambda: make(run).train(resume_from_checkpoint=RANK == 0))
    nothing = get_error(lambda: make(folder / "nothing").train(resume_from_checkpoint=True))
    assert started == [2] and get_weights(resumed) == REFERENCE_WEIGHTS
    check_errors(damaged, 0, "rng_state_1.pth has 10 bytes")
    assert "no intact checkpoint" in nothing
    assert "process 1 does not: give all of them the same resume_from_checkpoint" in unequal


@contextmanager
def separate_disk(folder: Path, first_of_its_node: bool) -> Iterator[Path]:
    """Change to a separate working directory, so that relative folders differ between the processes."""
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


def files_on_another_disk_are_sent_to_the_writer_and_the_other_node_cannot_resume(folder: Path) -> None:
    with separate_disk(folder / "one-writes", first_of_its_node=True) as node:
        make("out", StopAfter(4)).train()
        written = list_files(node)
        missing = get_error(lambda: make("out").train(resume_from_checkpoint=True))
    make(folder / f"started-at-{RANK}", StopAfter(4)).train()
    barrier()
    names = [f"checkpoint-{step}/{name}" for step in (2, 4) for name in FILES]
    assert written == ([] if RANK else [f"out/{name}" for name in names])
    assert [list_files(folder / f"started-at-{rank}") for rank in range(PROCESSES)] == [names, []]
    for text in ("Process 1 on", "finds no such folder", "save_on_each_node=True"):
        assert text in missing


def shards_on_another_disk_are_sent_to_the_writer(folder: Path) -> None:
    with separate_disk(folder, first_of_its_node=True) as node:
        make("out", StopAfter(4), async_save=True, **SHARDS).train()
        state, names = inspect_run(node / "out"), list_files(node)
    assert state == ([] if RANK else ["checkpoint-2", "checkpoint-4"])
    parts = [f"out/checkpoint-4/{OPTIMIZER_FOLDER}/__{rank}_0.distcp" for rank in range(PROCESSES)]
    assert RANK or set(parts) <= set(names)


def each_node_writes_a_complete_checkpoint_to_its_disk_and_resumes_it(folder: Path) -> None:
    with separate_disk(folder / "each-writes", first_of_its_node=True) as node:
        make("out", StopAfter(4), save_on_each_node=True).train()
        written = {name.rpartition("/")[2] for name in list_files(node)}
        if RANK == 1:
            (node / "out" / "checkpoint-4" / "optimizer.pt").write_bytes(b"no archive")
        resumed = make("out", save_on_each_node=True)
        with warnings_logged("") as texts:
            resumed.train(resume_from_checkpoint=True)
    assert written == set(FILES) - ({"rng_state_0.pth"} if RANK else {"rng_state_1.pth", "littrainer_resume_1.pt"})
    assert get_weights(resumed) == REFERENCE_WEIGHTS
    if RANK == 0:
        (warning,) = [text for text in texts if "Skipping" in text]
        assert "checkpoint-4" in warning and "Process 1 on" in warning and "optimizer.pt has 10 bytes" in warning


def the_first_process_uploads_a_remote_run_and_nodes_with_empty_disks_resume_it(folder: Path) -> None:
    address = f"file://{folder}/there/run"
    with separate_disk(folder / "at-an-address", first_of_its_node=True) as node, mock.patch.dict(os.environ):
        os.environ["XDG_CACHE_HOME"] = "first"
        make(address, StopAfter(4)).train()
        written = list_files(node)
        os.environ["XDG_CACHE_HOME"] = "second"
        resumed = make(address)
        resumed.train(resume_from_checkpoint=True)
    assert get_weights(resumed) == REFERENCE_WEIGHTS
    assert any(name.endswith(FILES[-1]) for name in written) is (RANK == 0)
    assert list_files(folder / "there" / "run" / "checkpoint-6") == FILES


def nodes_with_a_shared_disk_write_a_single_checkpoint(folder: Path) -> None:
    local_rank = os.environ["LOCAL_RANK"]
    os.environ["LOCAL_RANK"] = "0"
    try:
        with warnings_logged("") as texts:
            make(folder / "shared", StopAfter(4), save_on_each_node=True).train()
    finally:
        os.environ["LOCAL_RANK"] = local_rank
    assert inspect_run(folder / "shared") == ["checkpoint-2", "checkpoint-4"]
    assert list_files(folder / "shared" / "checkpoint-4") == FILES
    warnings = [text for text in texts if "save_on_each_node" in text]
    assert len(warnings) == RANK and all("same disk as process 0" in text for text in warnings)


def a_signal_to_a_process_saves_once_and_stops_both_and_the_resume_is_exact(folder: Path) -> None:
    signal.signal(signal.SIGTERM, lambda *_: None)
    outcomes: list[Any] = []
    resumed_weights = []
    settings = {"save_strategy": "no", "enable_jit_checkpoint": True, "eval_strategy": "steps", "eval_steps": 2}
    uninterrupted = make(folder / "whole", **settings)
    uninterrupted.train()
    for event, step, stopped_at in (("on_step_begin", 2, 3), ("on_step_end", 3, 3), ("on_prediction_step", 4, 4)):
        saves, run = SaveRecorder(), folder / event
        callbacks = [SignalIn(event, step, times=2)] if RANK == 1 else []
        stopped = make(run, saves, *callbacks, **settings)
        stopped.train()
        outcomes.append((saves.steps, stopped.state.global_step, inspect_run(run), stopped_at))
        resumed = make(run, **settings)
        resumed.train(resume_from_checkpoint=True)
        resumed_weights.append(get_weights(resumed))
    assert resumed_weights == [get_weights(uninterrupted)] * 3
    for steps, reached, state, expected in outcomes:
        assert steps == [reached] == [expected] and state == [f"checkpoint-{expected}"]


def an_unusable_output_folder_is_refused_in_both(folder: Path) -> None:
    claim = folder / "taken" / LOCK_NAME
    with ExitStack() as other_run:
        if RANK == 0:
            claim.parent.mkdir(parents=True)
            # Simulates another process.
            fcntl.flock(other_run.enter_context(claim.open("w")), fcntl.LOCK_EX)
        barrier()
        locked = get_error(make(folder / "taken").train)
    barrier()
    make(folder / "taken", StopAfter(2)).train()
    if RANK == 0:
        (folder / "file").touch()
    barrier()
    after, below = inspect_run(folder / "taken"), get_error(lambda: make(folder / "file" / "out"))
    check_errors(locked, 0, "Another run, a process")
    assert after == ["checkpoint-2"]
    check_errors(below, 0, "NotADirectory", "creating output_dir=" if RANK else "")


def checkpoints_of_lightning_callbacks_have_files_of_each_process(folder: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    callback = ModelCheckpoint(dirpath=folder / "best", every_n_train_steps=4, save_top_k=-1, filename="{step}")
    make(folder / "run", callback, save_strategy="no").train()
    barrier()
    (saved,) = (folder / "best").iterdir()
    resumed = make(folder / "run", save_strategy="no")
    resumed.train(resume_from_checkpoint=str(saved))
    assert list_files(saved) == sorted(["lightning_state.pt", *FILES]) and find_damage(saved) == []
    assert get_weights(resumed) == REFERENCE_WEIGHTS


def a_checkpoint_of_another_number_of_processes_is_resumed_with_a_warning(folder: Path) -> None:
    run = folder / "run"
    make(run, StopAfter(4)).train()
    barrier()
    world_size = 2
    if RANK == 0:
        record = torch.load(run / "checkpoint-4" / "littrainer_resume.pt", weights_only=False)
        world_size = record["sizes"]["world_size"]
        for file in (run / "checkpoint-4").glob("littrainer_*"):
            file.unlink()
        (run / "checkpoint-4" / "rng_state_0.pth").rename(run / "checkpoint-4" / "rng_state.pth")
        (run / "checkpoint-4" / "rng_state_1.pth").unlink()
    barrier()
    resumed = make(run)
    with warnings_logged("") as texts:
        resumed.train(resume_from_checkpoint=True)
    (warning,) = [text for text in texts if "processes" in text]
    assert "There are now 2 processes (before: 1)." in warning and "Random numbers start from the seed" in warning
    assert resumed.state.global_step == 6 and world_size == 2


# The first check sets REFERENCE_WEIGHTS.
CHECKS = (
    a_checkpoint_has_files_of_each_process_and_is_resumed_exactly,
    a_failure_to_write_a_checkpoint_ends_both_and_an_earlier_checkpoint_is_resumed,
    checkpoints_written_in_the_background_are_the_same_and_a_failure_ends_both,
    shards_written_during_training_have_the_values_of_their_step,
    pending_shards_are_written_when_the_training_ends,
    a_failure_to_write_shards_ends_both_and_an_earlier_checkpoint_is_resumed,
    shards_written_in_the_background_are_rotated_thinned_and_loaded,
    older_checkpoints_are_thinned_except_the_last_finite_checkpoint,
    both_skip_a_damaged_checkpoint_and_refuse_it_by_name,
    files_on_another_disk_are_sent_to_the_writer_and_the_other_node_cannot_resume,
    shards_on_another_disk_are_sent_to_the_writer,
    each_node_writes_a_complete_checkpoint_to_its_disk_and_resumes_it,
    nodes_with_a_shared_disk_write_a_single_checkpoint,
    the_first_process_uploads_a_remote_run_and_nodes_with_empty_disks_resume_it,
    a_signal_to_a_process_saves_once_and_stops_both_and_the_resume_is_exact,
    an_unusable_output_folder_is_refused_in_both,
    checkpoints_of_lightning_callbacks_have_files_of_each_process,
    a_checkpoint_of_another_number_of_processes_is_resumed_with_a_warning,
)


# ---- Processes that die ----------------------------------------------------------------------------------------------


def killed_while_saving(folder: Path, victim: int) -> Any:
    """Kill a process while it writes its files of the checkpoint of step 4."""

    class Dying(Trainer):
        def _save_rng_state(self, output_dir: str) -> None:
            if victim == RANK and self.state.global_step == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            super()._save_rng_state(output_dir)

    return time_error(make(folder / "run", kind=Dying).train)


def killed_while_writing_shards(folder: Path, victim: int) -> Any:
    """Kill a process when its thread writes its shard of the checkpoint of step 4."""
    original = sharded_files.write_shards

    def write(target: Path, *arguments: Any) -> None:
        if victim == RANK and target.parent.name == "checkpoint-4":
            os.kill(os.getpid(), signal.SIGKILL)
        original(target, *arguments)

    with mock.patch.object(sharded_files, "write_shards", write):
        return time_error(make(folder / "run", async_save=True, **SHARDS).train)


def time_error(work: Callable[[], Any]) -> Any:
    before = time.monotonic()
    return {"error": get_error(work), "seconds": time.monotonic() - before}


def run_in_fork(folder: Path, victim: int, work: Callable[[Path, int], Any]) -> None:
    """Run a function in a forked process, which writes no file if it is killed."""
    result = folder / f"{RANK}.json"
    folder.mkdir(parents=True, exist_ok=True)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with group(folder / "meeting"):
                result.write_text(json.dumps(work(folder, victim)))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            # Skip the exit handlers of the parent.
            os._exit(status)
    deadline = time.monotonic() + MAX_WAIT.total_seconds()
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            deadline += 10
        time.sleep(0.05)


def group(meeting_place: Path) -> AbstractContextManager[None]:
    return process_group(meeting_place, RANK, PROCESSES, MAX_WAIT)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    # A slow import, which the forks share.
    import_lightning()
    for victim in range(PROCESSES):
        run_in_fork(folder / f"killed{victim}", victim, killed_while_saving)
    run_in_fork(folder / "killed-with-shards", 1, killed_while_writing_shards)
    with group(folder / "meeting"):
        run_checks(CHECKS, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    end_process()
