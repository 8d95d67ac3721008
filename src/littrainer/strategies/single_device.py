"""One process on one device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn

from littrainer.model_walk import is_on, stays_in_place
from littrainer.strategies.resident import release_plugins

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from littrainer.trainer import Trainer


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


def single_device_strategy(trainer: Trainer) -> ResidentSingleDeviceStrategy:
    """The strategy of a Trainer that is one process with one device."""
    return ResidentSingleDeviceStrategy(device=trainer.args.device)
