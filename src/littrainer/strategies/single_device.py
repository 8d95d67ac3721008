"""One process on one device, and what all strategies of a Trainer have in common.

The model stays on its device at the end, and the launcher's ranks count.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn

from littrainer.distributed.environment import LOCAL_ADDRESS, USUAL_PORT, meeting_point
from littrainer.model.traversal import is_on, stays_in_place

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from littrainer.strategies.choice import TrainedModel


class LaunchedProcesses(ClusterEnvironment):
    """The processes as the arguments know them, so that Lightning and the Trainer never disagree about ranks.

    Parameters:
        args: training arguments.
    """

    def __init__(self, args: Any):
        super().__init__()
        self._args = args

    @property
    def creates_processes_externally(self) -> bool:
        """Yes: a launcher has started them."""
        return True

    @property
    def main_address(self) -> str:
        """Host of the first process."""
        point = meeting_point()
        return LOCAL_ADDRESS if point is None else point.address

    @property
    def main_port(self) -> int:
        """Port on which the first process is found."""
        point = meeting_point()
        return USUAL_PORT if point is None else point.port

    @staticmethod
    def detect() -> bool:
        """Never by itself: the Trainer hands it to its strategies."""
        return False

    def world_size(self) -> int:
        """Number of all processes."""
        return self._args.world_size

    def set_world_size(self, size: int) -> None:
        """Do nothing: the launcher has decided."""

    def global_rank(self) -> int:
        """Rank among all processes."""
        return self._args.process_index

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the launcher has decided."""

    def local_rank(self) -> int:
        """Rank among the processes of this node."""
        return self._args.local_process_index

    def node_rank(self) -> int:
        """Number of this node."""
        return self._args.process_index // self._args.local_world_size


def release_plugins(strategy: Any) -> None:
    """Let a strategy's plugins go, and leave model and optimizer where they are."""
    strategy.precision_plugin.teardown()
    if strategy.accelerator is not None:
        strategy.accelerator.teardown()
    strategy.checkpoint_io.teardown()


def without_exchange(module: Any) -> AbstractContextManager[Any]:
    """A context in which the wrapped model adds gradients up in each process, unless each of them is to be exchanged.

    Parameters:
        module: the module that trains; None if none does.
    """
    model = None if module is None or module.exchanges_gradients else module.owner.model_wrapped
    no_sync = getattr(model, "no_sync", None)
    return nullcontext() if no_sync is None else no_sync()


class ModelStaysOnDevice:
    """What a strategy of one device does differently for a Trainer; a class that derives from it and from one has it.

    The model stays on the device when training or evaluation has ended: Lightning moves model and optimizer state to
    the host at teardown. A model that a device map has spread over several devices is never moved.
    """

    def setup(self: Any, trainer: pl.Trainer) -> None:
        """Prepare a run as Lightning does, but leave a model that stays in place where it is, and its optimizer too."""
        if not stays_in_place(self.model):
            super().setup(trainer)  # type: ignore[misc]
            return
        self.accelerator.setup(trainer)
        self.model = self._setup_model(self.precision_plugin.convert_module(self.model))
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def model_to_device(self: Any) -> None:
        """Move the model; on the host the Trainer has, and going through it once more would find nothing to move."""
        if self.model.device != self.root_device or not is_on(self.model, self.root_device):
            super().model_to_device()  # type: ignore[misc]

    def teardown(self) -> None:
        """Release what the plugins hold, and leave the model where it is."""
        release_plugins(self)


class ResidentSingleDeviceStrategy(ModelStaysOnDevice, SingleDeviceStrategy):
    """Lightning's SingleDeviceStrategy for a Trainer's model."""


def single_device_strategy(trained: TrainedModel) -> ResidentSingleDeviceStrategy:
    """The strategy of one process with one device."""
    return ResidentSingleDeviceStrategy(device=trained.args.device)
