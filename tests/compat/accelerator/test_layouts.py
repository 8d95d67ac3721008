from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState

from littrainer.compat.accelerator import AcceleratorFacade
from littrainer.compat.accelerator.layouts import LayoutView, SplitModels
from littrainer.compat.accelerator.states import AcceleratorStateView
from tests.scenarios.other_processes import LONGEST_WAIT_SECONDS
from tests.scenarios.trainers import quiet_arguments

SHARDED: dict[str, Any] = {"fsdp": True, "fsdp_config": {"version": 2, "activation_checkpointing": True}}


@pytest.fixture(autouse=True)
def state_of_its_own() -> Any:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def in_two(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)


def test_one_process_splits_nothing(tmp_path: Path) -> None:
    facade = AcceleratorFacade(quiet_arguments(tmp_path))
    ranks = facade.data_parallel_rank, facade.data_parallel_shard_rank, facade.tensor_parallel_rank
    assert ranks == (0, 0, 0)
    assert facade.parallelism_config is None and facade.torch_device_mesh is None and not facade.is_fsdp2
    assert facade.deepspeed_plugin is None and str(facade.distributed_type) == "DistributedType.NO"


@pytest.mark.usefixtures("in_two")
def test_a_sharded_model_is_told_by_type_and_plugin(tmp_path: Path) -> None:
    args = quiet_arguments(tmp_path, **SHARDED)
    facade = AcceleratorFacade(args)
    assert str(facade.distributed_type) == "DistributedType.FSDP"
    assert facade.is_fsdp2 and facade.is_composable_parallelism_enabled
    plugin = AcceleratorStateView(args).fsdp_plugin
    assert plugin.fsdp_version == 2 and plugin.activation_checkpointing and plugin.reshard_after_forward is True
    assert "FULL_STATE_DICT" in str(plugin.state_dict_type)


WITHOUT_ACCELERATE = """
import json, os, sys

sys.modules["accelerate"] = None
os.environ.update(WORLD_SIZE="2", RANK="0", LOCAL_RANK="0")
from littrainer import TrainingArguments
from littrainer.compat.accelerator.states import AcceleratorStateView

args = TrainingArguments("out", use_cpu=True, report_to="none", fsdp=True, fsdp_config={"version": 2})
state = AcceleratorStateView(args)
plugin = state.fsdp_plugin
plugin.set_auto_wrap_policy(None)
try:
    plugin.frobnicate
except AttributeError as error:
    message = str(error)
print(json.dumps([str(state.distributed_type), plugin.fsdp_version, plugin.cpu_offload, state.is_fsdp2, message]))
"""


def test_the_plugin_is_there_without_accelerate_too(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_ACCELERATE],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LONGEST_WAIT_SECONDS,
    )
    assert run.returncode == 0, run.stderr
    kind, *facts, message = json.loads(run.stdout)
    assert kind == "DistributedType.FSDP" and facts == [2, False, True]
    assert "no 'frobnicate'; args.fsdp_config" in message


@pytest.mark.usefixtures("in_two")
def test_a_layout_given_as_a_dict_answers_as_accelerates_config_does(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"dp_replicate_size": 1, "tp_size": 2}
    args = quiet_arguments(tmp_path, parallelism_config=sizes)
    view, real = LayoutView(args), ParallelismConfig(**sizes)
    names = [
        f"{dimension}_{kind}" for dimension in ("dp_replicate", "dp_shard", "cp", "tp") for kind in ("size", "enabled")
    ]
    for name in [*names, "total_size", "data_parallel_size", "non_data_parallel_size"]:
        assert getattr(view, name) == getattr(real, name), name
    with pytest.raises(AttributeError, match="no 'frobnicated'"):
        view.frobnicated  # noqa: B018
    facade = AcceleratorFacade(args)
    assert facade.parallelism_config.tp_enabled and facade.tensor_parallel_rank == 1 and facade.data_parallel_rank == 0
    args.parallelism_config = real
    assert SplitModels(args).parallelism_config is real


@pytest.mark.usefixtures("in_two")
def test_the_rank_of_a_replica_is_that_of_the_process_where_each_has_one(tmp_path: Path) -> None:
    facade = AcceleratorFacade(quiet_arguments(tmp_path))
    assert (facade.data_parallel_rank, facade.data_parallel_shard_rank, facade.tensor_parallel_rank) == (1, 0, 0)
    assert facade.parallelism_config is None
