"""Workers of a DataLoader: ignored signals, and notes on errors."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, get_worker_info

from littrainer import Trainer
from littrainer.checkpoint.verification import find_damage
from littrainer.data import workers
from littrainer.data.workers import iterate_batches, list_loader_workers
from littrainer.distributed.failures import is_running
from tests.scenarios.data import Rows, vector_rows
from tests.scenarios.other_processes import MAX_WAIT_SECONDS, wait_until
from tests.scenarios.trainers import quiet_trainer


@pytest.fixture(autouse=True)
def ignore_sigterm() -> Iterator[None]:
    """Ignore SIGTERM outside of a training."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    yield
    signal.signal(signal.SIGTERM, before)


def signal_all(number: int) -> None:
    """Signal a worker and its parent, as a scheduler or Ctrl-C signals the process group."""
    for process in (os.getpid(), os.getppid()):
        os.kill(process, number)


class Signalled(Rows):
    """Rows of which a row signals all processes when it is read in a worker."""

    def __init__(self, number: int, at: int) -> None:
        super().__init__(vector_rows(10))
        self.number, self.at = number, at

    def __getitem__(self, index: int) -> Any:
        if index == self.at and get_worker_info() is not None:
            signal_all(self.number)
        return super().__getitem__(index)


class CustomLoader(DataLoader):
    """Loader of a custom class."""


class CustomLoaderTrainer(Trainer):
    def get_train_dataloader(self) -> Any:
        workers = self.args.dataloader_num_workers
        return self.accelerator.prepare(
            CustomLoader(self.train_dataset, 2, num_workers=workers, collate_fn=self.data_collator)
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        workers = self.args.dataloader_num_workers
        return DataLoader(self.eval_dataset, 2, num_workers=workers, collate_fn=self.data_collator)


EVALUATING = {"eval_strategy": "steps", "eval_steps": 1}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dataloader_persistent_workers": True},
        EVALUATING,
        {"kind": CustomLoaderTrainer},
        {"kind": CustomLoaderTrainer, **EVALUATING},
    ],
)
def test_workers_ignore_a_signal_on_which_the_training_saves(tmp_path: Path, changes: dict[str, Any]) -> None:
    side = "eval_dataset" if "eval_strategy" in changes else "train_dataset"
    data = {side: Signalled(signal.SIGTERM, at=4)}
    settings = {"max_steps": 9, "dataloader_num_workers": 2, "enable_jit_checkpoint": True, **changes}
    step = quiet_trainer(tmp_path, trainer_kwargs=data, **settings).train().global_step
    assert step < 9 and find_damage(tmp_path / f"checkpoint-{step}") == []


STUCK = """
import os, pathlib, signal, sys
from torch.utils.data import DataLoader
from littrainer.data.workers import iterate_batches, set_handled_signals

class Hangs:
    def __len__(self):
        return 2

    def __getitem__(self, index):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
        signal.pause()

set_handled_signals([signal.SIGTERM])
batches = iterate_batches(DataLoader(Hangs(), num_workers=1))
while not pathlib.Path(sys.argv[1]).exists() or not pathlib.Path(sys.argv[1]).read_text():
    pass
"""


def test_a_hung_worker_does_not_block_the_exit(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STUCK, str(tmp_path / "worker")]
    assert subprocess.run(command, check=False, timeout=MAX_WAIT_SECONDS).returncode == 0
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "worker").read_text()), 0)


def test_an_orphaned_worker_handles_signals(tmp_path: Path) -> None:
    script = STUCK.replace("signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})", "pass")
    script += "os.kill(os.getpid(), signal.SIGKILL)"
    command = [sys.executable, "-c", script, str(tmp_path / "worker")]
    assert subprocess.run(command, check=False, timeout=MAX_WAIT_SECONDS).returncode == -signal.SIGKILL
    worker = int((tmp_path / "worker").read_text())
    os.kill(worker, signal.SIGTERM)
    wait_until(lambda: not is_running(worker), "the worker ends")


armed: list[int] = []


@functools.cache
def signal_when_forked() -> None:
    """Send the signals in `armed` during each fork, when Python drops exceptions."""
    os.register_at_fork(after_in_parent=lambda: [os.kill(os.getpid(), armed.pop()) for _ in armed[:1]] and None)


@pytest.mark.parametrize("method", ["train", "evaluate"])
def test_ctrl_c_during_a_fork_is_raised_in_the_script(tmp_path: Path, method: str) -> None:
    signal_when_forked()
    trainer = quiet_trainer(tmp_path, max_steps=9, dataloader_num_workers=2)
    before = signal.getsignal(signal.SIGINT)
    armed.append(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        getattr(trainer, method)()
    assert trainer.state.global_step == 0 and not armed
    assert signal.getsignal(signal.SIGINT) is before and signal.SIGINT not in signal.pthread_sigmask(
        signal.SIG_BLOCK, ()
    )
    assert trainer.train().global_step == 9


def test_workers_ignore_ctrl_c(tmp_path: Path) -> None:
    trainer = quiet_trainer(
        tmp_path,
        max_steps=9,
        dataloader_num_workers=2,
        trainer_kwargs={"train_dataset": Signalled(signal.SIGINT, at=4)},
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.train()


def test_the_worker_init_fn_of_a_loader_is_called_and_restored(tmp_path: Path) -> None:
    started = multiprocessing.get_context("fork").Queue()

    class Loading(Trainer):
        def get_train_dataloader(self) -> Any:
            loader = DataLoader(self.train_dataset, 2, num_workers=2, collate_fn=self.data_collator)
            loader.worker_init_fn = started.put
            return self.accelerator.prepare(loader)

    trainer = quiet_trainer(tmp_path, kind=Loading, max_steps=1, enable_jit_checkpoint=True)
    trainer.train()
    assert sorted(started.get(timeout=60) for _ in range(2)) == [0, 1]
    assert trainer.callback_handler.train_dataloader.worker_init_fn == started.put


class Raising(Rows):
    def __init__(self, error: Exception) -> None:
        super().__init__(vector_rows(7))
        self.error = error

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise self.error
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_dataset_names_the_samples(tmp_path: Path, workers: int) -> None:
    data = {"eval_dataset": Raising(OSError("unreadable"))}
    trainer = quiet_trainer(tmp_path, trainer_kwargs=data, dataloader_num_workers=workers)
    with pytest.raises(OSError, match="unreadable") as caught:
        trainer.evaluate()
    assert getattr(caught.value, "__notes__", []) == [
        "It came up while the samples 3, 4, 5 were read for a batch of an evaluation."
    ]


class WrappingLoader(DataLoader):
    """Loader with a custom iterator."""

    def __iter__(self) -> Any:
        yield from super().__iter__()


class WrappingTrainer(Trainer):
    def get_train_dataloader(self) -> Any:
        return WrappingLoader(self.train_dataset, batch_size=2)


@pytest.mark.parametrize(
    ("kind", "workers"), [(Trainer, 0), (Trainer, 1), (CustomLoaderTrainer, 1), (WrappingTrainer, 0)]
)
def test_stop_iteration_of_a_map_style_dataset_is_an_error(tmp_path: Path, kind: type[Trainer], workers: int) -> None:
    data = {"train_dataset": Raising(StopIteration())}
    trainer = quiet_trainer(tmp_path, kind=kind, trainer_kwargs=data, max_steps=3, dataloader_num_workers=workers)
    with pytest.raises(RuntimeError, match=r"raised StopIteration while the samples .*5.* were read"):
        trainer.train()


def test_persistent_workers_end_with_the_training(tmp_path: Path) -> None:
    before = set(multiprocessing.active_children())
    settings = {"dataloader_num_workers": 2, "dataloader_persistent_workers": True, "max_steps": 4}
    quiet_trainer(tmp_path, save_strategy="steps", save_steps=2, **settings).train()
    assert set(multiprocessing.active_children()) <= before
    trainer = quiet_trainer(tmp_path, **settings)
    assert trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2")).global_step == 4
    assert set(multiprocessing.active_children()) <= before


def test_other_child_processes_are_no_workers() -> None:
    # Started while the workers start, as another thread might do.
    processes: list[Any] = []

    def iterate() -> Any:
        processes.append(multiprocessing.Process(target=signal.pause, daemon=True))
        processes[0].start()
        return DataLoader.__iter__(loader)

    loader = DataLoader(vector_rows(4), num_workers=1)
    batches = iterate_batches(loader, iterate)
    try:
        assert len(list_loader_workers()) == 1 and processes[0] not in list_loader_workers()
        assert processes[0] not in workers._workers
    finally:
        del batches
        processes[0].kill()
