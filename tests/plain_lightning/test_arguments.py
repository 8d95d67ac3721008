from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from littrainer.distributed.layout import data_parallel_rank, data_parallel_size
from littrainer.plain_lightning.arguments import ArgumentsUnderLightning
from littrainer.plain_lightning.module_arguments import arguments_from


def under_lightning(shared: Any, world_size: int = 4, rank: int = 3) -> Any:
    strategy = SimpleNamespace(root_device=torch.device("cpu"), distributed_sampler_kwargs=shared)
    trainer: Any = SimpleNamespace(
        world_size=world_size, global_rank=rank, strategy=strategy, accumulate_grad_batches=5
    )
    return ArgumentsUnderLightning(arguments_from({"per_device_train_batch_size": 3, "use_cpu": True}), trainer)


def test_what_lightning_decides_is_asked_from_it_and_the_rest_from_the_arguments() -> None:
    args = under_lightning(None)
    assert (args.world_size, args.process_index, args.gradient_accumulation_steps) == (4, 3, 5)
    assert args.device == torch.device("cpu")
    assert args.train_batch_size == 3
    assert copy.copy(args).train_batch_size == 3
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        _ = args.nothing_of_that_name


@pytest.mark.parametrize(
    ("shared", "parts", "part"), [(None, 4, 3), ({"num_replicas": 4, "rank": 3}, 4, 3), ({"num_replicas": 2}, 2, 1)]
)
def test_processes_that_compute_a_layer_together_get_the_same_part_of_the_data(
    shared: Any, parts: int, part: int
) -> None:
    args = under_lightning(shared)
    assert (data_parallel_size(args), data_parallel_rank(args)) == (parts, part)
