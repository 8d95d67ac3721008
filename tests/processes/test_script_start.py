from __future__ import annotations

import logging
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch

from littrainer import TrainingArguments
from littrainer.processes import script_start
from littrainer.processes.script_start import command_line, start_other_processes, wanted_processes, why_not_again
from tests.processes.launchers import set_only


class Started:
    """Stands for a process that has been started, and has ended well."""

    all: ClassVar[list[Started]] = []

    def __init__(self, command: list[str], **settings: Any):
        self.command, self.settings = command, settings
        self.returncode = 0
        Started.all.append(self)

    def poll(self) -> int:
        return self.returncode


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainingArguments]:
    """Arguments on a machine with four GPUs, in a script that can be run again; nothing is really started."""
    set_only(monkeypatch)
    args = TrainingArguments("out", use_cpu=True)
    args.use_cpu = False
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(script_start, "why_not_again", lambda main: None)
    monkeypatch.setattr(script_start.subprocess, "Popen", Started)
    monkeypatch.setattr(script_start._Others, "watch", lambda others: None)
    monkeypatch.setattr(script_start, "_told", set())
    Started.all = []
    yield args


def test_the_script_is_run_again_for_each_further_gpu(
    four_gpus: TrainingArguments, caplog: pytest.LogCaptureFixture
) -> None:
    start_other_processes(four_gpus)
    assert (four_gpus.world_size, four_gpus.process_index, four_gpus.local_world_size) == (4, 0, 4)
    assert "Training on 4 devices in 4 processes, where transformers would use DataParallel" in caplog.text
    environments = [started.settings["env"] for started in Started.all]
    assert [one["RANK"] for one in environments] == [one["LOCAL_RANK"] for one in environments] == ["1", "2", "3"]
    for one in environments:
        assert one["WORLD_SIZE"] == "4" and one["MASTER_PORT"] == os.environ["MASTER_PORT"]
    assert all(started.command == [sys.executable, *sys.orig_argv[1:]] for started in Started.all)
    start_other_processes(four_gpus)
    assert len(Started.all) == 3


@pytest.mark.parametrize(
    "variables",
    [{"LITTRAINER_PROCESSES": "1"}, {"RANK": "0", "WORLD_SIZE": "1"}, {"ACCELERATE_USE_CPU": "true"}],
    ids=["one is wanted", "a launcher has started it", "the launcher wants the CPU"],
)
def test_one_process_stays_one_where_that_is_wanted(
    four_gpus: TrainingArguments, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    set_only(monkeypatch, **variables)
    start_other_processes(four_gpus)
    assert not Started.all


def test_one_process_stays_one_on_the_cpu_and_where_one_gpu_is_visible(
    four_gpus: TrainingArguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    four_gpus.use_cpu = True
    start_other_processes(four_gpus)
    four_gpus.use_cpu = False
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    start_other_processes(four_gpus)
    assert not Started.all


def test_a_program_that_cannot_be_run_again_trains_on_one_gpu_and_is_told_once(
    four_gpus: TrainingArguments, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(script_start, "why_not_again", lambda main: "a notebook cannot be run again")
    with caplog.at_level(logging.WARNING):
        start_other_processes(four_gpus)
        start_other_processes(four_gpus)
    assert not Started.all and four_gpus.world_size == 1
    assert caplog.text.count("this process trains on one of them: a notebook") == 1
    assert "littrainer run --devices 4" in caplog.text


def test_a_script_that_spreads_its_model_over_the_gpus_itself_stays_one_process(
    four_gpus: TrainingArguments, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: 1024 if index == 2 else 0)
    start_other_processes(four_gpus)
    assert not Started.all and "already put something on another GPU" in caplog.text


@pytest.mark.parametrize("text", ["0", "-1", "two"])
def test_a_number_of_processes_that_cannot_be_is_refused(
    four_gpus: TrainingArguments, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("LITTRAINER_PROCESSES", text)
    with pytest.raises(ValueError, match=f"LITTRAINER_PROCESSES='?{text}'? must be"):
        wanted_processes(four_gpus)


def program(file: Path | None, module: str | None = None) -> ModuleType:
    """A module `__main__` of this file, started as a module where that is named."""
    main = ModuleType("__main__")
    if file is not None:
        main.__file__ = str(file)
    main.__spec__ = None if module is None else ModuleSpec(module, None)
    return main


def test_scripts_and_modules_can_be_run_again_and_what_runs_others_code_cannot(tmp_path: Path) -> None:
    for name in ("train.py", "pytest", "ipykernel_launcher.py"):
        (tmp_path / name).touch()
    assert why_not_again(program(tmp_path / "train.py")) is None
    assert why_not_again(program(tmp_path / "train.py", "package.train")) is None
    assert "pytest cannot be run again" in str(why_not_again(program(tmp_path / "pytest")))
    assert "pytest cannot be run again" in str(why_not_again(program(tmp_path / "train.py", "pytest.__main__")))
    assert "ipykernel_launcher cannot" in str(why_not_again(program(tmp_path / "ipykernel_launcher.py")))
    assert "no script file" in str(why_not_again(program(None)))
    assert "no script file" in str(why_not_again(program(tmp_path / "<stdin>")))


def test_interactive_sessions_threads_and_children_of_multiprocessing_cannot_be_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    main = program(tmp_path / "train.py")
    found: list[str | None] = []
    thread = threading.Thread(target=lambda: found.append(why_not_again(main)))
    thread.start()
    thread.join()
    assert "in a thread" in str(found[0])
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    assert "started by multiprocessing" in str(why_not_again(main))
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert "interactive session" in str(why_not_again(main))


def test_a_script_is_run_again_in_the_folder_that_it_was_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = program(tmp_path / "scripts" / "train.py")
    monkeypatch.setattr(sys, "orig_argv", ["python", "-O", "scripts/train.py", "--lr", "1"])
    assert command_line(main) == ([sys.executable, "-O", "scripts/train.py", "--lr", "1"], f"{tmp_path}{os.sep}")
    monkeypatch.setattr(sys, "orig_argv", ["python", str(tmp_path / "scripts" / "train.py")])
    assert command_line(main)[1] == os.getcwd()


def others(*programs: str) -> script_start._Others:
    command = [sys.executable, "-S", "-c"]
    return script_start._Others(
        {rank: subprocess.Popen([*command, code]) for rank, code in enumerate(programs, start=1)}
    )


def test_the_first_process_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    started = others("import time; time.sleep(0.3)", "")
    started._end()
    assert [process.returncode for process in started._processes.values()] == [0, 0]


def test_when_one_of_them_fails_all_end_with_its_status_and_it_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    started = others("import time; time.sleep(60)", "raise SystemExit(3)")
    started._end()
    assert (
        left == [3]
        and capsys.readouterr().err == "littrainer: process 2 of 3 ended with status 3; the others were ended too\n"
    )
    assert started._processes[1].returncode == -15


def test_an_error_of_the_first_process_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_start, "SECONDS_TO_END", 0.2)
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    started = others("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)")
    started._end()
    assert started._processes[1].wait(timeout=10) in (-9, -15)
