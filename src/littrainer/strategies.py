"""Lightning strategies as a Trainer needs them."""

from __future__ import annotations

from lightning.pytorch.strategies import SingleDeviceStrategy


class ResidentSingleDeviceStrategy(SingleDeviceStrategy):
    """One device, on which the model stays when training or evaluation has ended.

    Lightning moves model and optimizer state to the host at teardown; a Trainer's user finds the model where it was.
    """

    def teardown(self) -> None:
        """Release what the plugins hold, and leave the model where it is."""
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()
