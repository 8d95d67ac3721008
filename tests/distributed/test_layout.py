from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from littrainer import Trainer, TrainingArguments
from littrainer.distributed.layout import (
    data_parallel_rank,
    data_parallel_size,
    get_process_layout,
    get_sharding_sizes,
    set_layout_from_model,
    tensor_parallel_rank,
    tensor_parallel_size,
)
from tests.scenarios.models import VectorClassifier


def facts(world_size: int, config: Any = None, rank: int = 0, **further: Any) -> Any:
    settings = {"fsdp": None, "deepspeed": None, **further}
    return SimpleNamespace(world_size=world_size, process_index=rank, parallelism_config=config, **settings)


def test_without_a_layout_each_process_has_data_of_its_own() -> None:
    args = facts(4, rank=3)
    assert (data_parallel_size(args), data_parallel_rank(args)) == (4, 3)
    assert (tensor_parallel_size(args), tensor_parallel_rank(args)) == (1, 0)
    assert get_sharding_sizes(args) == (1, 4)


def test_processes_of_one_tensor_parallel_group_have_the_same_data_and_are_neighbours() -> None:
    config = {"tp_size": 2, "dp_shard_size": 3}
    found = [(data_parallel_rank(args), tensor_parallel_rank(args)) for args in (facts(6, config, r) for r in range(6))]
    assert found == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert data_parallel_size(facts(6, config)) == 3


def test_ranks_are_those_of_accelerates_mesh() -> None:
    from accelerate import ParallelismConfig

    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, tp_size=2)
    names, shape = config._get_mesh()
    assert (shape, names) == ((2, 2, 2), ("dp_replicate", "dp_shard", "tp"))
    layout = get_process_layout(facts(8, config))
    assert (layout.replicas, layout.shards, layout.tensor_parallel) == shape
    assert get_sharding_sizes(facts(8, config)) == (2, 2)


def test_the_environment_of_accelerate_launch_lays_the_processes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "2")
    assert tensor_parallel_size(facts(4)) == 1
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    assert (tensor_parallel_size(facts(4)), data_parallel_size(facts(4))) == (2, 2)
    # What a script says goes first.
    assert tensor_parallel_size(facts(4, {"dp_replicate_size": 4})) == 1
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "two")
    with pytest.raises(ValueError, match=r"environment of accelerate launch has tp_size='two'.*whole number"):
        get_process_layout(facts(4))


def test_sizes_that_do_not_make_the_world_size_are_refused_with_both_numbers() -> None:
    told = r"parallelism_config lays out dp_replicate_size=2 x .*tp_size=4 = 8 processes, and there are 4\..*be 4"
    with pytest.raises(ValueError, match=told):
        get_process_layout(facts(4, {"dp_replicate_size": 2, "tp_size": 4}))


def test_what_is_no_config_or_no_size_is_refused() -> None:
    for size in (0, 1.5, "two", True):
        with pytest.raises(ValueError, match=r"tp_size=.*whole number from 1 up"):
            get_process_layout(facts(2, {"tp_size": size}))
    with pytest.raises(ValueError, match=r"unknown keys: 'tensor_size'. Known are dp_replicate_size"):
        get_process_layout(facts(2, {"tensor_size": 2}))
    with pytest.raises(TypeError, match=r"parallelism_config=.*give a dict with some of dp_replicate_size"):
        get_process_layout(facts(2, "tp.json"))


def test_sharding_needs_a_dimension_to_shard_over() -> None:
    with pytest.raises(ValueError, match=r"leaves it at 1 with dp_replicate_size=2\. Set dp_shard_size=2"):
        get_sharding_sizes(facts(2, {"dp_replicate_size": 2}))


A_SPLIT_PARAMETER = torch.Tensor._make_wrapper_subclass(DTensor, (2,))


@dataclass
class Sharded:
    """A model as transformers leaves one that it has sharded."""

    _tp_size: int | None = 2
    shards: int = 1
    parameter: torch.Tensor = A_SPLIT_PARAMETER

    def parameters(self) -> Iterator[torch.Tensor]:
        yield self.parameter

    @property
    def config(self) -> Any:
        return SimpleNamespace(distributed_config=SimpleNamespace(fsdp_size=self.shards, dp_replicate_size=1))


def test_a_model_that_is_sharded_already_decides_over_the_config() -> None:
    args = facts(4, {"dp_shard_size": 4}, fsdp=True)
    set_layout_from_model(args, Sharded(shards=2))
    assert (tensor_parallel_size(args), data_parallel_size(args)) == (2, 2)
    set_layout_from_model(args, VectorClassifier())
    assert (tensor_parallel_size(args), data_parallel_size(args)) == (1, 4)
    with pytest.raises(ValueError, match=r"the sharded model lays out .*tp_size=2 = 2 processes, and there are 4"):
        set_layout_from_model(args, Sharded())


def test_a_model_that_was_split_into_plain_tensors_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Sharded was split over 2 processes.*parallelism_config=\{'tp_size': 2\}"):
        set_layout_from_model(facts(2), Sharded(parameter=torch.ones(2)))


def test_shards_are_refused_where_nothing_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"dp_shard_size": 2, "tp_size": 2}
    with pytest.raises(ValueError, match=r"dp_shard_size=2, and fsdp.*Set fsdp=True, or dp_replicate_size=2"):
        set_layout_from_model(facts(4, config), VectorClassifier())
    set_layout_from_model(facts(4, config, fsdp=True), VectorClassifier())
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    set_layout_from_model(facts(4, config), VectorClassifier())


@pytest.mark.parametrize("config", [{"tp_size": 2}, {"dp_shard_size": 2}])
def test_a_layout_beside_deepspeeds_own_is_refused(config: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"deepspeed lays its processes out by itself.*Set only one"):
        set_layout_from_model(facts(2, config, deepspeed="zero.json"), VectorClassifier())
    set_layout_from_model(facts(2, {"dp_replicate_size": 2}, deepspeed="zero.json"), VectorClassifier())


def test_a_trainer_checks_the_layout_when_it_is_made(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), parallelism_config={"tp_size": 2}, report_to="none")
    with pytest.raises(ValueError, match="there are 1"):
        Trainer(VectorClassifier(), args)
    for name, reason in (("cp_size", "keys and values"), ("sp_size", "Ulysses")):
        args.parallelism_config = {name: 2}
        told = rf"parallelism_config with {name}=2: .*{reason}.*Leave it at 1"
        with pytest.raises(NotImplementedError, match=told):
            Trainer(VectorClassifier(), args)


def test_what_a_sharded_model_says_is_not_saved_with_the_arguments(tmp_path: Path, monkeypatch: Any) -> None:
    args = TrainingArguments(str(tmp_path), report_to="none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    set_layout_from_model(args, Sharded())
    assert tensor_parallel_size(args) == 2
    assert tensor_parallel_size(pickle.loads(pickle.dumps(args))) == 1
