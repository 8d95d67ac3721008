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
    SequenceSettings,
    data_parallel_rank,
    data_parallel_size,
    get_process_layout,
    get_sequence_settings,
    get_sharding_sizes,
    model_parallel_rank,
    model_parallel_size,
    set_layout_from_model,
    tensor_parallel_size,
)
from tests.scenarios.models import VectorClassifier


def make_arguments(world_size: int, config: Any = None, rank: int = 0, **further: Any) -> Any:
    settings = {"fsdp": None, "deepspeed": None, **further}
    return SimpleNamespace(world_size=world_size, process_index=rank, parallelism_config=config, **settings)


def test_without_a_layout_each_process_has_different_data() -> None:
    args = make_arguments(4, rank=3)
    assert (data_parallel_size(args), data_parallel_rank(args)) == (4, 3)
    assert (model_parallel_size(args), model_parallel_rank(args)) == (1, 0)
    assert get_sharding_sizes(args) == (1, 4)


@pytest.mark.parametrize("name", ["tp_size", "cp_size", "sp_size"])
def test_neighbouring_processes_of_a_model_parallel_group_have_the_same_data(name: str) -> None:
    config = {name: 2, "dp_shard_size": 3}
    ranks = [
        (data_parallel_rank(args), model_parallel_rank(args))
        for args in (make_arguments(6, config, r) for r in range(6))
    ]
    assert ranks == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert data_parallel_size(make_arguments(6, config)) == 3


def test_ranks_are_those_of_accelerates_mesh() -> None:
    from accelerate import ParallelismConfig

    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, tp_size=2)
    names, shape = config._get_mesh()
    assert (shape, names) == ((2, 2, 2), ("dp_replicate", "dp_shard", "tp"))
    layout = get_process_layout(make_arguments(8, config))
    assert (layout.replicas, layout.shards, layout.tensor_parallel) == shape
    assert get_sharding_sizes(make_arguments(8, config)) == (2, 2)


def test_the_environment_of_accelerate_launch_sets_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "2")
    assert tensor_parallel_size(make_arguments(4)) == 1
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    assert (tensor_parallel_size(make_arguments(4)), data_parallel_size(make_arguments(4))) == (2, 2)
    # The script overrides the environment.
    assert tensor_parallel_size(make_arguments(4, {"dp_replicate_size": 4})) == 1
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "two")
    with pytest.raises(ValueError, match=r"environment of accelerate launch has tp_size='two'.*whole number"):
        get_process_layout(make_arguments(4))


def test_sizes_that_contradict_the_world_size_are_refused_with_both_numbers() -> None:
    message = r"parallelism_config lays out dp_replicate_size=2 x .*tp_size=4 = 8 processes, and there are 4\..*be 4"
    with pytest.raises(ValueError, match=message):
        get_process_layout(make_arguments(4, {"dp_replicate_size": 2, "tp_size": 4}))


def test_invalid_configs_and_sizes_are_refused() -> None:
    for size in (0, 1.5, "two", True):
        with pytest.raises(ValueError, match=r"tp_size=.*whole number from 1 up"):
            get_process_layout(make_arguments(2, {"tp_size": size}))
    with pytest.raises(ValueError, match=r"unknown keys: 'tensor_size'. Known are dp_replicate_size"):
        get_process_layout(make_arguments(2, {"tensor_size": 2}))
    with pytest.raises(TypeError, match=r"parallelism_config=.*give a dict with some of dp_replicate_size"):
        get_process_layout(make_arguments(2, "tp.json"))


def test_processes_that_share_sequences_hold_different_shards() -> None:
    assert get_sharding_sizes(make_arguments(4, {"sp_size": 2, "dp_shard_size": 2})) == (1, 4)
    assert get_sharding_sizes(make_arguments(4, {"cp_size": 2, "dp_replicate_size": 2})) == (2, 2)


def test_settings_of_accelerates_handlers_are_read_from_dicts_objects_and_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    handler = {"sp_seq_length": 64, "sp_seq_length_is_variable": False, "sp_attn_implementation": "sdpa"}
    for config in (
        {"sp_size": 2, "sp_handler": handler},
        ParallelismConfig(sp_size=2, sp_handler=DeepSpeedSequenceParallelConfig(**handler)),
    ):
        assert get_sequence_settings(make_arguments(2, config)) == SequenceSettings(False, 64, "sdpa")
    # The length of the handler is used if rows have a single length.
    config = {"sp_size": 2, "sp_handler": {"sp_seq_length": 64}}
    assert get_sequence_settings(make_arguments(2, config)) == SequenceSettings(False, None, None)
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    assert get_sequence_settings(make_arguments(2)) == SequenceSettings(True, None, None)
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "alltoall")
    assert not get_sequence_settings(make_arguments(2)).gathers_keys


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"cp_handler": {"rotate": "ring"}}, r"cp_handler with 'rotate'\. Known are cp_comm_strategy"),
        ({"cp_handler": {"cp_comm_strategy": "ring"}}, r"cp_comm_strategy='ring'; choose allgather or alltoall"),
        ({"cp_backend": "deepspeed"}, r"cp_backend='deepspeed'; choose torch"),
        ({"sp_handler": {"sp_seq_length_is_variable": "no"}}, r"sp_seq_length=None; .*whole number"),
        ({"sp_size": 2}, r"cp_size=2 and sp_size=2 at once"),
        ({"tp_size": 2}, r"cp_size=2 and tp_size=2 at once"),
    ],
)
def test_settings_that_cannot_be_carried_out_are_refused_by_name(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=message):
        TrainingArguments(str(tmp_path), parallelism_config={"cp_size": 2, **config}, report_to="none")


def test_sharding_needs_a_dimension_to_shard_over() -> None:
    with pytest.raises(ValueError, match=r"leaves it at 1 with dp_replicate_size=2\. Set dp_shard_size=2"):
        get_sharding_sizes(make_arguments(2, {"dp_replicate_size": 2}))


SHARDED_PARAMETER = torch.Tensor._make_wrapper_subclass(DTensor, (2,))


@dataclass
class Sharded:
    """A model with the attributes of transformers' sharded models."""

    _tp_size: int | None = 2
    shards: int = 1
    parameter: torch.Tensor = SHARDED_PARAMETER

    def parameters(self) -> Iterator[torch.Tensor]:
        yield self.parameter

    @property
    def config(self) -> Any:
        return SimpleNamespace(distributed_config=SimpleNamespace(fsdp_size=self.shards, dp_replicate_size=1))


def test_a_sharded_model_overrides_the_config() -> None:
    args = make_arguments(4, {"dp_shard_size": 4}, fsdp=True)
    set_layout_from_model(args, Sharded(shards=2))
    assert (tensor_parallel_size(args), data_parallel_size(args)) == (2, 2)
    args.parallelism_config = {"sp_size": 2}
    with pytest.raises(NotImplementedError, match="sp_size=2 and tp_size=2 at once"):
        get_process_layout(args)
    args.parallelism_config = {"dp_shard_size": 4}
    set_layout_from_model(args, VectorClassifier())
    assert (tensor_parallel_size(args), data_parallel_size(args)) == (1, 4)
    with pytest.raises(ValueError, match=r"the sharded model lays out .*tp_size=2 = 2 processes, and there are 4"):
        set_layout_from_model(args, Sharded())


def test_a_model_that_was_split_into_plain_tensors_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Sharded was split over 2 processes.*parallelism_config=\{'tp_size': 2\}"):
        set_layout_from_model(make_arguments(2), Sharded(parameter=torch.ones(2)))


def test_shards_without_fsdp_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"dp_shard_size": 2, "tp_size": 2}
    with pytest.raises(ValueError, match=r"dp_shard_size=2, and fsdp.*Set fsdp=True, or dp_replicate_size=2"):
        set_layout_from_model(make_arguments(4, config), VectorClassifier())
    set_layout_from_model(make_arguments(4, config, fsdp=True), VectorClassifier())
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    set_layout_from_model(make_arguments(4, config), VectorClassifier())


@pytest.mark.parametrize("config", [{"tp_size": 2}, {"dp_shard_size": 2}, {"sp_size": 2}])
def test_a_layout_with_deepspeed_is_refused(config: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"deepspeed lays its processes out by itself.*Set only one"):
        set_layout_from_model(make_arguments(2, config, deepspeed="zero.json"), VectorClassifier())
    set_layout_from_model(make_arguments(2, {"dp_replicate_size": 2}, deepspeed="zero.json"), VectorClassifier())


def test_the_constructor_checks_the_layout(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), parallelism_config={"tp_size": 2}, report_to="none")
    with pytest.raises(ValueError, match="there are 1"):
        Trainer(VectorClassifier(), args)


def test_the_layout_of_a_sharded_model_is_not_saved_with_the_arguments(tmp_path: Path, monkeypatch: Any) -> None:
    args = TrainingArguments(str(tmp_path), report_to="none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    set_layout_from_model(args, Sharded())
    assert tensor_parallel_size(args) == 2
    assert tensor_parallel_size(pickle.loads(pickle.dumps(args))) == 1
