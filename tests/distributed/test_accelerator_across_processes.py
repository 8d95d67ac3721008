"""Two processes find in our accelerator what they find in accelerate's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import accelerator_process
from tests.distributed.together import found_together
from tests.fidelity.compare import first_difference


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes finds; they are started once for all tests."""
    return found_together(tmp_path_factory, "accelerators", accelerator_process.__name__)[1]


PARTS = ["exchanged", "shares", "turns", "facts", "data parallel", "loaders", "accumulating"]


@pytest.mark.parametrize("part", PARTS)
def test_both_processes_find_what_accelerates_own_accelerator_gives(found: list[dict[str, Any]], part: str) -> None:
    for one in found:
        assert first_difference(one["accelerate"][part], one["ours"][part], 0.0) is None


def test_the_parts_that_are_compared_depend_on_the_process(found: list[dict[str, Any]]) -> None:
    first, second = (one["ours"] for one in found)
    assert first["facts"][:2] == [2, 0] and second["facts"][:2] == [2, 1] and first["facts"][-1].endswith("MULTI_CPU")
    assert first["shares"][:2] == [["a", "b"], ["a", "b"]] and second["shares"][:2] == [["c"], ["c", "c"]]
    assert first["exchanged"]["mean"][0].tolist() == [0.5, 0.5]
    assert first["data parallel"][:2] == ["DistributedDataParallel", "Linear"]
    # What one process held back differs from the other's; what both exchanged is the mean.
    assert not torch.equal(first["data parallel"][2], second["data parallel"][2])
    assert torch.equal(first["data parallel"][3], second["data parallel"][3])


def test_collectives_of_accelerate_itself_find_the_process_group(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["state"] == 2
        gathered, objects, broadcast = one["calls"]
        assert gathered.tolist() == [0, 1] and objects == [0, 1] and broadcast == ["from 0"]
