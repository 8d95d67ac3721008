"""One process on one device."""

from __future__ import annotations

from lightning.pytorch.strategies import SingleDeviceStrategy

from littrainer.strategies.resident import release_plugins


class ResidentSingleDeviceStrategy(SingleDeviceStrategy):
    """One device, on which the model stays when training or evaluation has ended.

    Lightning moves model and optimizer state to the host at teardown; a Trainer's user finds the model where it was.
    """

    def teardown(self) -> None:
        """Release what the plugins hold, and leave the model where it is."""
        release_plugins(self)
