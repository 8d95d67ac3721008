from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from littrainer.optim.stepping import ClosureFirstOptimizer, clip_gradient_norm, is_on_several_meshes

PARAMETERS = [torch.nn.Parameter(torch.zeros(1))]


class Ordered(torch.optim.SGD):
    """Notes when it steps, and takes no closure."""

    def __init__(self) -> None:
        super().__init__(PARAMETERS)
        self.order: list[str] = []

    def step(self) -> None:  # type: ignore[override]
        self.order.append("step")


def test_an_optimizer_of_another_library_steps_after_the_closure_and_without_it() -> None:
    optimizer = Ordered()

    def closure() -> float:
        optimizer.order.append("closure")
        return 3.0

    first: Any = ClosureFirstOptimizer(optimizer, lambda inner, *_: inner.step())
    assert first.step(closure=closure) == 3.0
    assert first.step() is None
    assert optimizer.order == ["closure", "step", "step"]


def test_an_attribute_that_a_scaler_sets_is_the_optimizers() -> None:
    optimizer: Any = Ordered()
    first: Any = ClosureFirstOptimizer(optimizer, lambda inner, *_: inner.step())
    first.found_inf = 1.0
    assert optimizer.found_inf == 1.0
    del first.found_inf
    assert not hasattr(optimizer, "found_inf")


GRADIENTS = [torch.tensor([3.0, -4.0]), torch.tensor([[1.0, 2.0], [2.0, 4.0]]), torch.tensor([12.0])]


@pytest.fixture
def meshes(tmp_path: Path) -> Iterator[list[DeviceMesh]]:
    """Two meshes of the one process that there is."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield [init_device_mesh("cpu", (1,), mesh_dim_names=(name,)) for name in ("dp_shard", "tp")]
    dist.destroy_process_group()


def with_gradients(*places: DeviceMesh | None) -> list[nn.Parameter]:
    """A parameter for each gradient, on a mesh where there is one, and one without a gradient."""
    parameters = []
    for place, gradient in zip(places, GRADIENTS, strict=True):
        spread: Any = gradient.clone() if place is None else distribute_tensor(gradient.clone(), place, [Shard(0)])
        parameters.append(nn.Parameter(torch.zeros_like(spread)))
        parameters[-1].grad = spread
    return [*parameters, nn.Parameter(torch.zeros(1))]


def whole(parameters: list[nn.Parameter]) -> list[list[Any]]:
    gradients: list[Any] = [one.grad for one in parameters if one.grad is not None]
    return [(one.full_tensor() if hasattr(one, "full_tensor") else one).tolist() for one in gradients]


@pytest.mark.parametrize("places", [(0, None, 1), (0, 0, None), (0, 0, 0), (None, None, None)], ids=str)
@pytest.mark.parametrize(("norm_type", "max_norm"), [(2.0, 0.5), (1.0, 100.0), (float("inf"), 0.5)])
def test_gradients_on_several_meshes_are_clipped_as_whole_ones(
    meshes: list[DeviceMesh], places: tuple[int | None, ...], norm_type: float, max_norm: float
) -> None:
    plain = with_gradients(None, None, None)
    expected = nn.utils.clip_grad_norm_(plain, max_norm, norm_type)
    spread = with_gradients(*(None if place is None else meshes[place] for place in places))
    norm = clip_gradient_norm(iter(spread), max_norm, norm_type)
    assert not hasattr(norm, "device_mesh") and norm.item() == pytest.approx(expected.item())
    for found, wanted in zip(whole(spread), whole(plain), strict=True):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted))
    assert is_on_several_meshes(spread) is (len(set(places)) > 1) and not is_on_several_meshes(plain)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_norms_of_offloaded_gradients_are_put_together_where_the_processes_are_connected(norm_type: float) -> None:
    exchanged: list[str] = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if DTensor in types:
                return NotImplemented
            if function is torch.ops._c10d_functional.all_reduce.default:
                exchanged.append(args[0].device.type)
            return function(*args, **(kwargs or {}))

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        # The other way round, without values: processes on CPUs, and gradients on a GPU that need not be there.
        spec = DTensorSpec(init_device_mesh("cpu", (2,)), (Shard(0),), TensorMeta(torch.Size([4]), (1,), torch.float32))
        with FakeTensorMode() as mode, Noting():
            shards = [FakeTensor(mode, torch.empty(2, device="meta"), torch.device("cuda")) for _ in range(4)]
            parts: list[Any] = [DTensor(local, spec, requires_grad=False) for local in shards]
            parts[0].grad, parts[1].grad = parts[2:]
            assert clip_gradient_norm(parts[:2], float("inf"), norm_type).device.type == "cpu"
    finally:
        dist.destroy_process_group()
    assert exchanged == ["cpu"]
