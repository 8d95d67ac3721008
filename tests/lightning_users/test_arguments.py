from __future__ import annotations

import copy
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from littrainer import TrainingArguments
from littrainer.distributed.layout import data_parallel_rank, data_parallel_size
from littrainer.lightning.arguments import (
    ArgumentsUnderLightning,
    ModuleArguments,
    get_changed_arguments,
    resolve_arguments,
)
from tests.scenarios.other_processes import MAX_WAIT_SECONDS


@pytest.mark.parametrize(
    ("shared", "size", "rank"), [(None, 4, 3), ({"num_replicas": 4, "rank": 3}, 4, 3), ({"num_replicas": 2}, 2, 1)]
)
def test_lightning_overrides_arguments_about_processes_and_accumulation(shared: Any, size: int, rank: int) -> None:
    strategy = SimpleNamespace(root_device=torch.device("cpu"), distributed_sampler_kwargs=shared)
    trainer: Any = SimpleNamespace(world_size=4, global_rank=3, strategy=strategy, accumulate_grad_batches=5)
    args: Any = ArgumentsUnderLightning(resolve_arguments({"per_device_train_batch_size": 3, "use_cpu": True}), trainer)
    assert (args.world_size, args.process_index, args.gradient_accumulation_steps) == (4, 3, 5)
    assert args.device == torch.device("cpu")
    assert args.train_batch_size == copy.copy(args).train_batch_size == 3
    # Processes of a tensor parallel group get the same data.
    assert (data_parallel_size(args), data_parallel_rank(args)) == (size, rank)
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        _ = args.nothing_of_that_name


def test_a_dict_and_none_become_arguments_and_arguments_are_unchanged() -> None:
    args = TrainingArguments(use_cpu=True)
    assert resolve_arguments(args) is args
    assert resolve_arguments({"learning_rate": 0.25}).learning_rate == 0.25
    assert resolve_arguments(None) == ModuleArguments()


def test_unknown_names_and_other_objects_are_refused() -> None:
    with pytest.raises(TypeError, match=r"^args: 'learing_rate' is unknown, did you mean 'learning_rate'"):
        resolve_arguments({"learing_rate": 1})
    with pytest.raises(TypeError, match="args is a list; give TrainingArguments, a dict"):
        resolve_arguments([1])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [{"lr_scheduler_type": "reduce_lr_on_plateau"}, {"load_best_model_at_end": True}, {"bf16": True}, {"tf32": True}],
)
def test_arguments_that_lightning_decides_are_not_validated(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        TrainingArguments(**options)
    assert get_changed_arguments(resolve_arguments(options)).items() >= options.items()


def test_changed_arguments_are_plain_and_restore_the_arguments() -> None:
    options = {"learning_rate": 0.25, "optim": "sgd", "lr_scheduler_kwargs": {"num_cycles": 2}, "warmup_steps": 0.5}
    args = resolve_arguments({**options, "hub_token": "hf_secret", "push_to_hub": False})
    assert get_changed_arguments(args) == options
    assert resolve_arguments(get_changed_arguments(args)).to_dict() == resolve_arguments(options).to_dict()


def test_arguments_of_a_module_do_not_start_a_process_group() -> None:
    # As Lightning's launcher starts the second of two processes.
    script = (
        "import torch.distributed as dist\n"
        "from littrainer.lightning.arguments import resolve_arguments\n"
        "resolve_arguments({'learning_rate': 0.1})\n"
        "assert not dist.is_initialized()\n"
    )
    launched = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "NODE_RANK": "0"}
    command, environment = [sys.executable, "-c", script], {**os.environ, **launched}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=MAX_WAIT_SECONDS)
    assert done.returncode == 0, done.stderr
