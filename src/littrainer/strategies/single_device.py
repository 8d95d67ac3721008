"""One process on one device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import SingleDeviceStrategy

from littrainer.model_walk import is_on
from littrainer.strategies.resident import release_plugins

if TYPE_CHECKING:
    from littrainer.trainer import Trainer


class ResidentSingleDeviceStrategy(SingleDeviceStrategy):
    """One device, on which the model stays when training or evaluation has ended.

    Lightning moves model and optimizer state to the host at teardown; a Trainer's user finds the model where it was.
    """

    def model_to_device(self) -> None:
        """Move the model; on the host the Trainer has, and going through it once more would find nothing to move."""
        model: Any = self.model
        if model.device != self.root_device or not is_on(model, self.root_device):
            super().model_to_device()

    def teardown(self) -> None:
        """Release what the plugins hold, and leave the model where it is."""
        release_plugins(self)


def single_device_strategy(trainer: Trainer) -> ResidentSingleDeviceStrategy:
    """The strategy of a Trainer that is one process with one device."""
    return ResidentSingleDeviceStrategy(device=trainer.args.device)
