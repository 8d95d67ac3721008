"""One process on one device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch.strategies import SingleDeviceStrategy

from littrainer.strategies.resident import release_plugins

if TYPE_CHECKING:
    from littrainer.trainer import Trainer


class ResidentSingleDeviceStrategy(SingleDeviceStrategy):
    """One device, on which the model stays when training or evaluation has ended.

    Lightning moves model and optimizer state to the host at teardown; a Trainer's user finds the model where it was.
    """

    def teardown(self) -> None:
        """Release what the plugins hold, and leave the model where it is."""
        release_plugins(self)


def single_device_strategy(trainer: Trainer) -> ResidentSingleDeviceStrategy:
    """The strategy of a Trainer that is one process with one device."""
    return ResidentSingleDeviceStrategy(device=trainer.args.device)
