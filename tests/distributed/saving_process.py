"""One of two processes that save and resume together: `python -m tests.distributed.saving_process FOLDER`.

Rank and world size come from the environment, as a launcher sets them. Where a process dies, it is in forks, before
anything here has threads; what these find is in `FOLDER/killedVICTIM/RANK.json`.
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
from littrainer.checkpoint.verification import damage_in
from littrainer.distributed.collectives import barrier
from littrainer.lightning_adapter.run_lightning import import_lightning
from tests.distributed.checks import carry_out
from tests.faults.signals import SignalIn
from tests.scenarios.models import NoisyClassifier
from tests.scenarios.other_processes import LONGEST_WAIT_SECONDS, end_process, process_group
from tests.scenarios.trainers import quiet_trainer, warnings_logged

RANK, PROCESSES = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
LONGEST_WAIT = timedelta(seconds=LONGEST_WAIT_SECONDS)
# Three optimizer steps to an epoch.
SETTINGS: dict[str, Any] = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "logging_strategy": "steps"}
WHOLE = ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
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


def error_of(work: Callable[[], Any]) -> str:
    """The kind and the text of the error that something ends with."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def check_errors(error: str, fails: int, *words: str) -> None:
    """See that the process which fails says so in these words, and that the other one names it and its error."""
    assert ("FailedElsewhere" in error) is (fails != RANK)
    for word in (*words, *([] if fails == RANK else [f"failed in process {fails}"])):
        assert word in error


def names_in(folder: Path) -> list[str]:
    """The files of checkpoints below a folder."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "littrainer_run.json"]
    return sorted(path.relative_to(folder).as_posix() for path in files)


def state_of(folder: Path) -> list[Any]:
    """The checkpoints in the folder of a run when all processes are done with it, and whatever should not be there."""
    barrier()
    checkpoints = sorted(folder.glob("checkpoint-*"))
    damage = [found for path in checkpoints for found in damage_in(path)]
    hidden = sorted(path.name for path in folder.glob(".*"))
    barrier()
    return [*(path.name for path in checkpoints), *damage, *hidden]


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


def weights_of(trainer: Trainer) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in trainer.model.state_dict().items()}


# A model in parts, of which each process writes its own.
SHARDS: dict[str, Any] = {
    "fsdp": True,
    "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT", "min_num_params": 30},
}


class HoldingBack(TrainerCallback):
    """Lets the second process hold its part of the first checkpoint back until soon after the end of a step.

    Attributes:
        seen: the checkpoints that there are at the end of that step.
        threads: the threads that write parts.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.seen = ["none was looked for"]
        self.threads: list[threading.Thread] = []
        self._released = threading.Event()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.seen = [path.name for path in Path(args.output_dir).glob("checkpoint-*")]
            threading.Timer(0.3, self._released.set).start()

    @contextmanager
    def around(self) -> Iterator[None]:
        original = sharded_files.write_shards

        def write(*arguments: Any) -> None:
            self.threads.append(threading.current_thread())
            assert RANK == 0 or self._released.wait(LONGEST_WAIT_SECONDS / 4)
            original(*arguments)

        with mock.patch.object(sharded_files, "write_shards", write):
            yield


def whole_parameters(trainer: Trainer) -> dict[str, Any]:
    model: Any = trainer.model
    return {name: parameter.full_tensor().tolist() for name, parameter in model.named_parameters()}


def shards_in(checkpoint: Path) -> dict[str, Any]:
    """All that is in the parts of a checkpoint, by name."""
    both = [sharded_files.load_full_state(checkpoint / folder) for folder in (WEIGHTS_FOLDER, OPTIMIZER_FOLDER)]
    return {name: value.tolist() if torch.is_tensor(value) else value for one in both for name, value in one.items()}


# The weights after a training that is never stopped.
WEIGHTS_OF_A_WHOLE_RUN: dict[str, Any] = {}


# ---- Checks ----------------------------------------------------------------------------------------------------------


def a_checkpoint_holds_a_part_of_each_process_and_is_resumed_exactly(folder: Path) -> None:
    saves = Saves()
    first = make(folder / "run", saves)
    first.train()
    checkpoint = folder / "run" / "checkpoint-4"
    WEIGHTS_OF_A_WHOLE_RUN.update(weights_of(first))
    state, files, manifest = state_of(folder / "run"), names_in(checkpoint), read_manifest(checkpoint)
    second = make(folder / "run")
    second.train(resume_from_checkpoint=str(checkpoint))
    assert weights_of(second) == WEIGHTS_OF_A_WHOLE_RUN
    assert state == WHOLE and saves.steps == [2, 4, 6] and files == FILES
    assert manifest is not None and sorted(manifest.files) == FILES[1:]


def a_checkpoint_that_one_process_cannot_write_ends_both_and_the_earlier_ones_are_gone_on_from(folder: Path) -> None:

    class FailingOnSave(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if RANK == 1 and state.global_step == 4:
                raise LookupError("the upload failed")

    # Weights of the first process, random states of the second.
    with failing_at(weights, "_write_plain", 4, 0, errno.ENOSPC):
        found = [(error_of(make(folder / "0").train), state_of(folder / "0"))]
    with failing_at(torch, "save", 4, 1, errno.EACCES):
        found.append((error_of(make(folder / "1").train), state_of(folder / "1")))
    error = error_of(make(folder / "on-save", FailingOnSave()).train)
    left = state_of(folder / "on-save")
    resumed = make(folder / "0")
    resumed.train(resume_from_checkpoint=True)
    assert weights_of(resumed) == WEIGHTS_OF_A_WHOLE_RUN
    for fails, words in enumerate(("checkpoint-4 could not be written beyond", "Permission denied")):
        check_errors(found[fails][0], fails, words, "" if fails == RANK else "checkpoint-4")
        assert found[fails][1] == ["checkpoint-2"]
    check_errors(error, 1, "LookupError: the upload failed", "" if RANK else "on_save of callbacks")
    assert left == ["checkpoint-2", "checkpoint-4"]


def checkpoints_written_in_the_background_are_the_same_and_a_failure_ends_both(folder: Path) -> None:
    saves = Saves()
    trainer = make(folder / "run", saves, async_save=True, save_total_limit=2)
    trainer.train()
    state = state_of(folder / "run")
    with failing_at(weights, "_write_plain", 4, 0, errno.ENOSPC):
        error = error_of(make(folder / "full", async_save=True).train)
    left = state_of(folder / "full")
    assert saves.steps == [2, 4, 6] and state == WHOLE[1:] and weights_of(trainer) == WEIGHTS_OF_A_WHOLE_RUN
    assert names_in(folder / "run" / "checkpoint-4") == FILES
    check_errors(error, 0, "BackgroundSaveError", "" if RANK else "No space left")
    assert left == ["checkpoint-2"]


def shards_are_written_while_training_goes_on_and_are_those_of_their_step(folder: Path) -> None:
    waiting, saves, held = make(folder / "waiting", **SHARDS), Saves(), HoldingBack(3)
    waiting.train()
    trainer = make(folder / "run", saves, held, async_save=True, **SHARDS)
    with held.around():
        trainer.train()
    state, names = state_of(folder / "run"), [names_in(folder / run) for run in ("run", "waiting")]
    resumed = make(folder / "resumed", async_save=True, **SHARDS)
    resumed.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-2"))
    expected, *found = [whole_parameters(one) for one in (waiting, trainer, resumed)]
    assert held.threads and threading.main_thread() not in held.threads
    # Steps after that of the save have changed the weights while the second process held its part back.
    assert RANK == 0 or held.seen == []
    assert saves.steps == [2, 4, 6] and state == WHOLE and names[0] == names[1]
    for step in (2, 4, 6):
        ours, wanted = (shards_in(folder / run / f"checkpoint-{step}") for run in ("run", "waiting"))
        assert ours == wanted and len(ours) > 20
    assert found == [expected] * 2


def shards_on_their_way_are_finished_whatever_ends_the_training(folder: Path) -> None:
    class Failing(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                raise OverflowError("of the callback")

    signal.signal(signal.SIGTERM, lambda *_: None)
    endings, states = [], []
    for name, callback in (("error", Failing()), ("signal", SignalIn("on_step_end", 3))):
        held = HoldingBack(3)
        callbacks = [held, callback] if name == "error" or RANK == 1 else [held]
        with held.around():
            endings.append(
                error_of(make(folder / name, *callbacks, async_save=True, enable_jit_checkpoint=True, **SHARDS).train)
            )
        states.append(state_of(folder / name))
    resumed = make(folder / "error", **SHARDS)
    resumed.train(resume_from_checkpoint=True)
    assert endings == ["OverflowError: of the callback", "no error"] and resumed.state.global_step == 6
    assert states == [["checkpoint-2"], ["checkpoint-2", "checkpoint-3"]]


def shards_that_one_process_cannot_write_end_both_and_the_earlier_ones_are_gone_on_from(folder: Path) -> None:
    with failing_at(FileSystem, "create_stream", 4, 1, errno.ENOSPC):
        error = error_of(make(folder, async_save=True, **SHARDS).train)
    left = state_of(folder)
    resumed = make(folder, async_save=True, **SHARDS)
    resumed.train(resume_from_checkpoint=True)
    state = state_of(folder)
    for words in ("BackgroundSaveError", "checkpoint-4 could not be written in the background", "No space left"):
        assert words in error
    assert left == ["checkpoint-2"] and state == WHOLE


def shards_written_in_the_background_are_rotated_thinned_and_the_best_loaded_as_others_are(folder: Path) -> None:
    settings = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "learning_rate": 0.3,
        "save_total_limit": 2,
        "keep_optimizer_states": 1,
    }
    found = []
    for in_background in (False, True):
        run = folder / str(in_background)
        trainer = make(run, async_save=in_background, **settings, **SHARDS)
        trainer.train()
        best = Path(trainer.state.best_model_checkpoint).name
        found.append((state_of(run), names_in(run), best, whole_parameters(trainer)))
    assert found[0] == found[1]
    assert any("optimizer_0" in name for name in found[1][1]) and len(found[1][0]) == 2


def older_checkpoints_are_thinned_and_the_last_healthy_one_stays(folder: Path) -> None:
    class Harm(TrainerCallback):
        """Makes a weight infinite after the second of three saves."""

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if state.global_step == 5:
                next(model.parameters()).data.view(-1)[0] = float("inf")

    run = folder / "run"
    make(run, Harm(), keep_optimizer_states=1, save_total_limit=1).train()
    state = state_of(run)
    make(folder / "thin", keep_optimizer_states=1).train()
    thin = state_of(folder / "thin")
    left = names_in(folder / "thin" / "checkpoint-2")
    resumed = make(run)
    resumed.train(resume_from_checkpoint=True)
    refused = error_of(lambda: make(run).train(resume_from_checkpoint=str(folder / "thin" / "checkpoint-2")))
    assert state == WHOLE[1:] and weights_of(resumed) == WEIGHTS_OF_A_WHOLE_RUN
    assert thin == WHOLE and left == [FILES[0], FILES[3], *FILES[-2:]]
    check_errors(refused, 0, f"Resume from {folder / 'thin' / 'checkpoint-6'}")


def a_damaged_newest_checkpoint_is_passed_over_by_both_and_refused_by_name(folder: Path) -> None:
    run = folder / "run"
    make(run, StopAfter(4)).train()
    if RANK == 0:
        (run / "checkpoint-4" / "rng_state_1.pth").write_bytes(b"no archive")
    barrier()
    damaged = error_of(lambda: make(run).train(resume_from_checkpoint=str(run / "checkpoint-4")))
    resumed = make(run)
    started: list[int] = []

    class Starts(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            started.append(state.global_step)

    resumed.add_callback(Starts())
    resumed.train(resume_from_checkpoint=True)
    one_sided = error_of(lambda: make(run).train(resume_from_checkpoint=RANK == 0))
    nothing = error_of(lambda: make(folder / "nothing").train(resume_from_checkpoint=True))
    assert started == [2] and weights_of(resumed) == WEIGHTS_OF_A_WHOLE_RUN
    check_errors(damaged, 0, "rng_state_1.pth has 10 bytes")
    assert "no intact checkpoint" in nothing
    assert "process 1 is not: give all of them the same resume_from_checkpoint" in one_sided


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


def parts_written_on_another_disk_are_brought_to_the_checkpoint_which_is_refused_there(folder: Path) -> None:
    with own_disk(folder / "one-writes", first_of_its_node=True) as node:
        make("out", StopAfter(4)).train()
        written = names_in(node)
        not_seen = error_of(lambda: make("out").train(resume_from_checkpoint=True))
    make(folder / f"started-at-{RANK}", StopAfter(4)).train()
    barrier()
    names = [f"checkpoint-{step}/{name}" for step in (2, 4) for name in FILES]
    assert written == ([] if RANK else [f"out/{name}" for name in names])
    assert [names_in(folder / f"started-at-{rank}") for rank in range(PROCESSES)] == [names, []]
    for words in ("Process 1 on", "finds no such folder", "save_on_each_node=True"):
        assert words in not_seen


def shards_written_on_another_disk_are_brought_to_the_checkpoint_before_training_goes_on(folder: Path) -> None:
    with own_disk(folder, first_of_its_node=True) as node:
        make("out", StopAfter(4), async_save=True, **SHARDS).train()
        state, names = state_of(node / "out"), names_in(node)
    assert state == ([] if RANK else ["checkpoint-2", "checkpoint-4"])
    parts = [f"out/checkpoint-4/{OPTIMIZER_FOLDER}/__{rank}_0.distcp" for rank in range(PROCESSES)]
    assert RANK or set(parts) <= set(names)


def each_node_writes_a_whole_checkpoint_to_its_disk_and_resumes_from_it(folder: Path) -> None:
    with own_disk(folder / "each-writes", first_of_its_node=True) as node:
        make("out", StopAfter(4), save_on_each_node=True).train()
        written = {name.rpartition("/")[2] for name in names_in(node)}
        if RANK == 1:
            (node / "out" / "checkpoint-4" / "optimizer.pt").write_bytes(b"no archive")
        resumed = make("out", save_on_each_node=True)
        with warnings_logged("") as texts:
            resumed.train(resume_from_checkpoint=True)
    assert written == set(FILES) - ({"rng_state_0.pth"} if RANK else {"rng_state_1.pth", "littrainer_resume_1.pt"})
    assert weights_of(resumed) == WEIGHTS_OF_A_WHOLE_RUN
    if RANK == 0:
        (told,) = [text for text in texts if "Passing over" in text]
        assert "checkpoint-4" in told and "Process 1 on" in told and "optimizer.pt has 10 bytes" in told


def a_run_at_an_address_is_uploaded_by_the_first_process_and_resumed_by_nodes_with_empty_disks(folder: Path) -> None:
    address = f"file://{folder}/there/run"
    with own_disk(folder / "at-an-address", first_of_its_node=True) as node, mock.patch.dict(os.environ):
        os.environ["XDG_CACHE_HOME"] = "first"
        make(address, StopAfter(4)).train()
        written = names_in(node)
        os.environ["XDG_CACHE_HOME"] = "second"
        resumed = make(address)
        resumed.train(resume_from_checkpoint=True)
    assert weights_of(resumed) == WEIGHTS_OF_A_WHOLE_RUN
    assert any(name.endswith(FILES[-1]) for name in written) is (RANK == 0)
    assert names_in(folder / "there" / "run" / "checkpoint-6") == FILES


def nodes_that_share_a_disk_write_one_checkpoint_though_each_is_to_save(folder: Path) -> None:
    local_rank = os.environ["LOCAL_RANK"]
    os.environ["LOCAL_RANK"] = "0"
    try:
        with warnings_logged("") as texts:
            make(folder / "shared", StopAfter(4), save_on_each_node=True).train()
    finally:
        os.environ["LOCAL_RANK"] = local_rank
    assert state_of(folder / "shared") == ["checkpoint-2", "checkpoint-4"]
    assert names_in(folder / "shared" / "checkpoint-4") == FILES
    told = [text for text in texts if "save_on_each_node" in text]
    assert len(told) == RANK and all("same disk as process 0" in text for text in told)


def a_signal_to_one_process_saves_once_stops_both_and_training_goes_on_exactly(folder: Path) -> None:
    signal.signal(signal.SIGTERM, lambda *_: None)
    found: list[Any] = []
    resumed_weights = []
    settings = {"save_strategy": "no", "enable_jit_checkpoint": True, "eval_strategy": "steps", "eval_steps": 2}
    whole_run = make(folder / "whole", **settings)
    whole_run.train()
    for event, step, stopped_at in (("on_step_begin", 2, 3), ("on_step_end", 3, 3), ("on_prediction_step", 4, 4)):
        saves, run = Saves(), folder / event
        callbacks = [SignalIn(event, step, times=2)] if RANK == 1 else []
        stopped = make(run, saves, *callbacks, **settings)
        stopped.train()
        found.append((saves.steps, stopped.state.global_step, state_of(run), stopped_at))
        resumed = make(run, **settings)
        resumed.train(resume_from_checkpoint=True)
        resumed_weights.append(weights_of(resumed))
    assert resumed_weights == [weights_of(whole_run)] * 3
    for steps, reached, state, expected in found:
        assert steps == [reached] == [expected] and state == [f"checkpoint-{expected}"]


def the_folder_of_another_run_or_below_a_file_is_refused_in_both(folder: Path) -> None:
    claim = folder / "taken" / LOCK_NAME
    with ExitStack() as other_run:
        if RANK == 0:
            claim.parent.mkdir(parents=True)
            # As another process has it.
            fcntl.flock(other_run.enter_context(claim.open("w")), fcntl.LOCK_EX)
        barrier()
        taken = error_of(make(folder / "taken").train)
    barrier()
    make(folder / "taken", StopAfter(2)).train()
    if RANK == 0:
        (folder / "file").touch()
    barrier()
    after, below = state_of(folder / "taken"), error_of(lambda: make(folder / "file" / "out"))
    check_errors(taken, 0, "Another run, a process")
    assert after == ["checkpoint-2"]
    check_errors(below, 0, "NotADirectory", "creating output_dir=" if RANK else "")


def what_a_lightning_callback_saves_holds_a_part_of_each_process(folder: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    callback = ModelCheckpoint(dirpath=folder / "best", every_n_train_steps=4, save_top_k=-1, filename="{step}")
    make(folder / "run", callback, save_strategy="no").train()
    barrier()
    (saved,) = (folder / "best").iterdir()
    resumed = make(folder / "run", save_strategy="no")
    resumed.train(resume_from_checkpoint=str(saved))
    assert names_in(saved) == sorted(["lightning_state.pt", *FILES]) and damage_in(saved) == []
    assert weights_of(resumed) == WEIGHTS_OF_A_WHOLE_RUN


def a_checkpoint_of_another_number_of_processes_is_resumed_with_one_warning_that_names_both(folder: Path) -> None:
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
    (told,) = [text for text in texts if "processes" in text]
    assert "There are now 2 processes (1)." in told and "Random numbers go on from the seed" in told
    assert resumed.state.global_step == 6 and world_size == 2


# The first one leaves what the others compare with.
CHECKS = (
    a_checkpoint_holds_a_part_of_each_process_and_is_resumed_exactly,
    a_checkpoint_that_one_process_cannot_write_ends_both_and_the_earlier_ones_are_gone_on_from,
    checkpoints_written_in_the_background_are_the_same_and_a_failure_ends_both,
    shards_are_written_while_training_goes_on_and_are_those_of_their_step,
    shards_on_their_way_are_finished_whatever_ends_the_training,
    shards_that_one_process_cannot_write_end_both_and_the_earlier_ones_are_gone_on_from,
    shards_written_in_the_background_are_rotated_thinned_and_the_best_loaded_as_others_are,
    older_checkpoints_are_thinned_and_the_last_healthy_one_stays,
    a_damaged_newest_checkpoint_is_passed_over_by_both_and_refused_by_name,
    parts_written_on_another_disk_are_brought_to_the_checkpoint_which_is_refused_there,
    shards_written_on_another_disk_are_brought_to_the_checkpoint_before_training_goes_on,
    each_node_writes_a_whole_checkpoint_to_its_disk_and_resumes_from_it,
    nodes_that_share_a_disk_write_one_checkpoint_though_each_is_to_save,
    a_run_at_an_address_is_uploaded_by_the_first_process_and_resumed_by_nodes_with_empty_disks,
    a_signal_to_one_process_saves_once_stops_both_and_training_goes_on_exactly,
    the_folder_of_another_run_or_below_a_file_is_refused_in_both,
    what_a_lightning_callback_saves_holds_a_part_of_each_process,
    a_checkpoint_of_another_number_of_processes_is_resumed_with_one_warning_that_names_both,
)


# ---- Processes that die ----------------------------------------------------------------------------------------------


def killed_while_saving(folder: Path, victim: int) -> Any:
    """One process is killed while it writes its part of the checkpoint of step 4."""

    class Dying(Trainer):
        def _save_rng_state(self, output_dir: str) -> None:
            if victim == RANK and self.state.global_step == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            super()._save_rng_state(output_dir)

    return ended_by(make(folder / "run", kind=Dying).train)


def killed_while_writing_shards(folder: Path, victim: int) -> Any:
    """One process is killed when its thread is to write its part of the checkpoint of step 4."""
    original = sharded_files.write_shards

    def write(target: Path, *arguments: Any) -> None:
        if victim == RANK and target.parent.name == "checkpoint-4":
            os.kill(os.getpid(), signal.SIGKILL)
        original(target, *arguments)

    with mock.patch.object(sharded_files, "write_shards", write):
        return ended_by(make(folder / "run", async_save=True, **SHARDS).train)


def ended_by(work: Callable[[], Any]) -> Any:
    before = time.monotonic()
    return {"error": error_of(work), "seconds": time.monotonic() - before}


def in_fork(folder: Path, victim: int, work: Callable[[Path, int], Any]) -> None:
    """Do something in a process forked from this one, which leaves no file if it is killed."""
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
            # Not through what this process has registered to do at its end.
            os._exit(status)
    deadline = time.monotonic() + LONGEST_WAIT.total_seconds()
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            deadline += 10
        time.sleep(0.05)


def group(meeting_place: Path) -> AbstractContextManager[None]:
    return process_group(meeting_place, RANK, PROCESSES, LONGEST_WAIT)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    # Half of the time that a test may take, once for the forks too.
    import_lightning()
    for victim in range(PROCESSES):
        in_fork(folder / f"killed{victim}", victim, killed_while_saving)
    in_fork(folder / "killed-with-shards", 1, killed_while_writing_shards)
    with group(folder / "meeting"):
        carry_out(CHECKS, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    end_process()
