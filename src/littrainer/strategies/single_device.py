"""The single-device strategy, and the base class and cluster environment of all strategies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn

from littrainer.distributed.environment import DEFAULT_PORT, LOCAL_ADDRESS, get_rendezvous_point
from littrainer.model.traversal import is_immovable, is_on_device
from littrainer.runtime.lazy_isinstance import is_a

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from littrainer.strategies.choice import TrainedModel


class LaunchedProcesses(ClusterEnvironment):
    """Lightning's cluster environment, with the ranks of the training arguments."""

    def __init__(self, args: Any):
        super().__init__()
        self._args = args

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        point = get_rendezvous_point()
        return LOCAL_ADDRESS if point is None else point.address

    @property
    def main_port(self) -> int:
        point = get_rendezvous_point()
        return DEFAULT_PORT if point is None else point.port

    @staticmethod
    def detect() -> bool:
        """Return False: the Trainer passes it to its strategies."""
        return False

    def world_size(self) -> int:
        return self._args.world_size

    def set_world_size(self, size: int) -> None:
        """Do nothing: the launcher sets it."""

    def global_rank(self) -> int:
        return self._args.process_index

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the launcher sets it."""

    def local_rank(self) -> int:
        return self._args.local_process_index

    def node_rank(self) -> int:
        return self._args.process_index // self._args.local_world_size


class InPlaceStrategy(Strategy):
    """Base class of strategies that leave model and optimizer on their device."""

    def set_up_in_place(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def teardown(self) -> None:
        """Tear down the plugins only: Lightning would move model and optimizer state to the host."""
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()


def block_backward_sync(strategy: Any) -> Any:
    """Return a context without gradient sync, unless the micro-batch needs it; a method of strategies."""
    module = strategy.lightning_module
    if module is None or module.should_sync_gradients:
        return nullcontext()
    model = module.owner.model
    return disable_gradient_sync(model if is_a(model, "resharding module") else module.owner.model_wrapped)


def disable_gradient_sync(model: Any) -> AbstractContextManager[Any]:
    """Return a context that stops the gradient sync of FSDP2 modules and of wrappers with `no_sync`."""
    if is_a(model, "resharding module"):
        return _disable_fsdp2_sync(model)
    no_sync = getattr(model, "no_sync", None)
    return no_sync() if callable(no_sync) else nullcontext()


@contextmanager
def _disable_fsdp2_sync(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


class ResidentSingleDeviceStrategy(InPlaceStrategy, SingleDeviceStrategy):
    """SingleDeviceStrategy that never moves a model with a device map."""

    def setup(self, trainer: pl.Trainer) -> None:
        assert self.model is not None
        if is_immovable(self.model):
            self.set_up_in_place(trainer)
        else:
            super().setup(trainer)

    def model_to_device(self) -> None:
        model: Any = self.model
        if model.device != self.root_device or not is_on_device(model, self.root_device):
            super().model_to_device()


def create_single_device_strategy(trained: TrainedModel) -> ResidentSingleDeviceStrategy:
    return ResidentSingleDeviceStrategy(device=trained.args.device)
