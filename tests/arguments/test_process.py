from __future__ import annotations

import copy
import logging
import pickle
import subprocess
import sys
import textwrap
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import transformers

from littrainer.arguments import TrainingArguments
from littrainer.arguments.choices import ParallelMode
from tests.fidelity.conftest import environment_of_runs
from tests.scenarios.other_processes import LONGEST_WAIT_SECONDS


def test_a_single_process_is_rank_zero_of_one() -> None:
    args = TrainingArguments()
    assert (args.world_size, args.process_index, args.local_process_index) == (1, 0, 0)
    assert args.parallel_mode is ParallelMode.NOT_PARALLEL
    assert args.should_log and args.should_save


def test_ranks_come_from_the_launchers_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    args = TrainingArguments()
    assert (args.world_size, args.process_index, args.local_process_index) == (8, 5, 1)
    assert args.parallel_mode is ParallelMode.DISTRIBUTED
    assert not args.should_log and not args.should_save


def test_the_first_process_of_a_later_node_logs_and_saves_only_where_each_node_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("RANK", "4"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    assert TrainingArguments().should_log and not TrainingArguments().should_save
    turned_round = TrainingArguments(log_on_each_node=False, save_on_each_node=True)
    assert not turned_round.should_log and turned_round.should_save


def test_a_rank_that_is_no_number_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ValueError, match="RANK='first' must be a whole number"):
        _ = TrainingArguments().process_index


def test_the_cpu_is_used_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    args = TrainingArguments(use_cpu=True)
    assert (args.device, args.n_gpu) == (torch.device("cpu"), 0)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert TrainingArguments().device == torch.device("cpu")


def test_a_gpu_is_used_when_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    args = TrainingArguments()
    assert (args.device, args.n_gpu) == (torch.device("cuda:0"), 1)


def test_a_later_process_of_a_node_makes_its_own_gpu_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert TrainingArguments().device == torch.device("cuda:3")
    assert chosen == [torch.device("cuda:3")]


@pytest.mark.parametrize(("local_rank", "visible", "index"), [("1", 2, 1), ("3", 4, 3), ("1", 1, 0)])
def test_each_process_of_a_node_has_the_gpu_of_its_number_or_the_only_one_that_it_is_shown(
    monkeypatch: pytest.MonkeyPatch, local_rank: str, visible: int, index: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for name, value in (("RANK", local_rank), ("WORLD_SIZE", "4"), ("LOCAL_RANK", local_rank)):
        monkeypatch.setenv(name, value)
    assert TrainingArguments().device == torch.device("cuda", index)


def test_more_processes_than_gpus_on_a_node_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in (("RANK", "2"), ("WORLD_SIZE", "3"), ("LOCAL_RANK", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="3 processes on this node share 2 GPUs, and process 2 has none of its own"):
        _ = TrainingArguments().device


def test_an_apple_gpu_is_for_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    assert TrainingArguments().device == torch.device("cpu")


def test_scripts_of_transformers_4_find_their_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TrainingArguments().local_rank == -1
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert TrainingArguments().local_rank == 1


def test_an_apple_gpu_comes_after_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    args = TrainingArguments()
    assert (args.device, args.n_gpu) == (torch.device("mps"), 1)


def test_the_device_is_found_once_and_stays_behind_when_arguments_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    args = TrainingArguments()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert args.device == torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert args.device == torch.device("cuda:0")
    for travelled in (pickle.loads(pickle.dumps(args)), copy.copy(args), copy.deepcopy(args)):
        assert travelled.device == torch.device("cpu")
        assert travelled == args


def test_batch_sizes_and_timeout_are_those_of_transformers() -> None:
    given = {"per_device_train_batch_size": 3, "per_device_eval_batch_size": 5, "ddp_timeout": 60, "use_cpu": True}
    ours, theirs = TrainingArguments(**given), transformers.TrainingArguments(**given)
    assert ours.train_batch_size == theirs.train_batch_size == 3
    assert ours.eval_batch_size == theirs.eval_batch_size == 5
    assert ours.ddp_timeout_delta == theirs.ddp_timeout_delta == timedelta(minutes=1)
    assert ours.place_model_on_device is theirs.place_model_on_device is None


@pytest.mark.parametrize("level", ["passive", "detail", "debug", "info", "warning", "error", "critical"])
def test_the_log_level_is_the_number_that_transformers_gives(level: str) -> None:
    ours, theirs = TrainingArguments(log_level=level), transformers.TrainingArguments(log_level=level)
    assert ours.get_process_log_level() == theirs.get_process_log_level()


def test_a_process_that_does_not_log_has_a_level_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    args = TrainingArguments(log_level="debug", log_level_replica="error")
    assert args.get_process_log_level() == logging.ERROR


def test_a_single_process_goes_first_without_waiting() -> None:
    done = []
    with TrainingArguments().main_process_first(desc="tokenizing"):
        done.append(True)
    assert done == [True]


def test_several_processes_without_a_process_group_are_told_to_make_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(RuntimeError, match=r"main_process_first: 2 processes have no process group .* RANK is not set"),
        TrainingArguments().main_process_first(),
    ):
        raise AssertionError("the block must not run")


def test_the_main_process_is_through_before_the_others_start(tmp_path: Path) -> None:
    script = tmp_path / "both.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, pathlib, sys, time
            import torch.distributed as dist
            from littrainer.arguments import TrainingArguments
            from tests.scenarios.other_processes import end_process

            folder = pathlib.Path(sys.argv[1])
            rank = int(os.environ["RANK"])
            dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
            with TrainingArguments().main_process_first(local=False):
                if rank == 0:
                    time.sleep(0.5)
                    (folder / "cache").write_text("ready")
                else:
                    assert (folder / "cache").exists(), "ran before the main process"
            end_process()
            """
        )
    )
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path)],
            env={**environment_of_runs(), "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=LONGEST_WAIT_SECONDS)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
