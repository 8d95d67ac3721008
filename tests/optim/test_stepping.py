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
    """Optimizer without a closure that records its steps."""

    def __init__(self) -> None:
        super().__init__(PARAMETERS)
        self.order: list[str] = []

    def step(self) -> None:  # type: ignore[override]
        self.order.append("step")


def test_a_third_party_optimizer_steps_after_the_closure_and_without_it() -> None:
    optimizer = Ordered()

    def closure() -> float:
        optimizer.order.append("closure")
        return 3.0

    first: Any = ClosureFirstOptimizer(optimizer, lambda inner, *_: inner.step())
    assert first.step(closure=closure) == 3.0
    assert first.step() is None
    assert optimizer.order == ["closure", "step", "step"]


def test_an_attribute_set_by_a_scaler_is_set_on_the_optimizer() -> None:
    optimizer: Any = Ordered()
    first: Any = ClosureFirstOptimizer(optimizer, lambda inner, *_: inner.step())
    first.found_inf = 1.0
    assert optimizer.found_inf == 1.0
    del first.found_inf
    assert not hasattr(optimizer, "found_inf")


GRADIENTS = [torch.tensor([3.0, -4.0]), torch.tensor([[1.0, 2.0], [2.0, 4.0]]), torch.tensor([12.0])]


@pytest.fixture
def meshes(tmp_path: Path) -> Iterator[list[DeviceMesh]]:
    """Create two meshes of a single process."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield [init_device_mesh("cpu", (1,), mesh_dim_names=(name,)) for name in ("dp_shard", "tp")]
    dist.destroy_process_group()


def create_parameters(*meshes: DeviceMesh | None) -> list[nn.Parameter]:
    """Create a parameter for each gradient, sharded if it has a mesh, and a parameter without a gradient."""
    parameters = []
    for mesh, values in zip(meshes, GRADIENTS, strict=True):
        gradient: Any = values.clone() if mesh is None else distribute_tensor(values.clone(), mesh, [Shard(0)])
        parameters.append(nn.Parameter(torch.zeros_like(gradient)))
        parameters[-1].grad = gradient
    return [*parameters, nn.Parameter(torch.zeros(1))]


def get_full_gradients(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    gradients: list[Any] = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient for gradient in gradients]


@pytest.mark.parametrize("layout", [(0, None, 1), (0, 0, None), (0, 0, 0), (None, None, None)], ids=str)
@pytest.mark.parametrize(("norm_type", "max_norm"), [(2.0, 0.5), (1.0, 100.0), (float("inf"), 0.5)])
def test_sharded_gradients_on_several_meshes_are_clipped_like_replicated_gradients(
    meshes: list[DeviceMesh], layout: tuple[int | None, ...], norm_type: float, max_norm: float
) -> None:
    plain = create_parameters(None, None, None)
    expected = nn.utils.clip_grad_norm_(plain, max_norm, norm_type)
    sharded = create_parameters(*(None if index is None else meshes[index] for index in layout))
    norm = clip_gradient_norm(iter(sharded), max_norm, norm_type)
    assert not hasattr(norm, "device_mesh") and norm.item() == pytest.approx(expected.item())
    torch.testing.assert_close(get_full_gradients(sharded), get_full_gradients(plain))
    assert is_on_several_meshes(sharded) is (len(set(layout)) > 1) and not is_on_several_meshes(plain)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_norms_of_offloaded_gradients_are_reduced_on_the_device_of_the_process_group(norm_type: float) -> None:
    devices: list[str] = []

    class RecordingMode(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if DTensor in types:
                return NotImplemented
            if function is torch.ops._c10d_functional.all_reduce.default:
                devices.append(args[0].device.type)
            return function(*args, **(kwargs or {}))

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        # Reversed, and without values: the process group is on CPUs, and the gradients on a fake GPU.
        spec = DTensorSpec(init_device_mesh("cpu", (2,)), (Shard(0),), TensorMeta(torch.Size([4]), (1,), torch.float32))
        with FakeTensorMode() as mode, RecordingMode():
            shards = [FakeTensor(mode, torch.empty(2, device="meta"), torch.device("cuda")) for _ in range(4)]
            parts: list[Any] = [DTensor(local, spec, requires_grad=False) for local in shards]
            parts[0].grad, parts[1].grad = parts[2:]
            assert clip_gradient_norm(parts[:2], float("inf"), norm_type).device.type == "cpu"
    finally:
        dist.destroy_process_group()
    assert devices == ["cpu"]
