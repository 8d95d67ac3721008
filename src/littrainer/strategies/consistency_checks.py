"""What has to be the same in all processes before they train together, compared before they wait for each other."""

from __future__ import annotations

import hashlib
from itertools import zip_longest

from torch import nn

from littrainer.distributed.agreement import are_several, from_each
from littrainer.strategies.shards import is_sharded

# Name, shape and number format of a parameter or buffer.
Described = tuple[str, tuple[int, ...], str]


def check_same_strategy(name: str) -> None:
    """Compare the names of the strategies that the processes have been asked for; a collective call.

    Raises:
        ValueError: they differ; raised in all processes.
    """
    names = from_each(name)
    if len(set(names)) > 1:
        found = ", ".join(f"process {rank} by {one}" for rank, one in enumerate(names))
        raise ValueError(
            f"The processes are asked to train in different ways: {found}. Give all of them the same arguments, above "
            "all fsdp, deepspeed, parallelism_config and lightning."
        )


def check_same_model(model: nn.Module) -> None:
    """Compare names, shapes and formats of the processes' parameters and buffers; a collective call.

    Raises:
        ValueError: they differ; raised in all processes, and names the first difference.
    """
    if not are_several():
        return
    described = _described(model)
    digests = from_each(hashlib.sha256(repr(described).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    everywhere = from_each(described)
    rank = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    one, other = next(pair for pair in zip_longest(everywhere[0], everywhere[rank]) if pair[0] != pair[1])
    raise ValueError(
        f"The processes have different models, and are to train one together: process 0 has {_in_words(one)} where "
        f"process {rank} has {_in_words(other)}. Make the model from the same configuration in all processes."
    )


def _described(model: nn.Module) -> list[Described]:
    # Of a model that is split already, each process may have a part of another size.
    has_parts = is_sharded(model)
    return [
        (name, () if has_parts else tuple(tensor.shape), str(tensor.dtype))
        for tensors in (model.named_parameters(), model.named_buffers())
        for name, tensor in tensors
    ]


def _in_words(described: Described | None) -> str:
    if described is None:
        return "nothing more"
    name, shape, dtype = described
    return f"{name} (shape {list(shape)}, {dtype.removeprefix('torch.')})"
