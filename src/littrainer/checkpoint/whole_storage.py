"""How a checkpoint holds weights and the optimizer's state where each process has all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from littrainer.checkpoint.layout import OPTIMIZER_NAME
from littrainer.checkpoint.reader import load_optimizer
from littrainer.checkpoint.sealing import Seal
from littrainer.checkpoint.weights import holds_weights, load_weights
from littrainer.checkpoint.writer import write_files

if TYPE_CHECKING:
    from littrainer.trainer import Trainer


class WholeStorage:
    """Each process has the whole model: those whose arguments say `should_save` write it, and all read it.

    All processes call each method at the same place. A method may wait for the others, and writes into a folder that
    may be another one in some process, from which its files are brought to the checkpoint.
    """

    # Whether `weights` and `optimizer_state` give all that is written, so that a thread can write it from copies.
    can_be_copied = True

    def weights(self, trainer: Trainer) -> dict[str, Any] | None:
        """The whole model's weights where this process writes them; None lets the model's own be written."""
        return None

    def optimizer_state(self, trainer: Trainer) -> dict[str, Any] | None:
        """The whole optimizer's state where this process writes it, else None."""
        return trainer.optimizer.state_dict() if trainer.args.should_save else None

    def save_model(self, trainer: Trainer, output_dir: str) -> None:
        """Write the model, as `save_model` does; a subclass may have its own `_save`."""
        weights = self.weights(trainer)
        if trainer.args.should_save:
            if weights is None:
                trainer._save(output_dir)
            else:
                trainer._save(output_dir, state_dict=weights)

    def save_model_of_checkpoint(self, trainer: Trainer, output_dir: str) -> None:
        """Write the model as a part of a checkpoint; by default as `save_model` writes it elsewhere."""
        self.save_model(trainer, output_dir)

    def save_optimizer(self, trainer: Trainer, folder: Path, seal: Seal | None) -> None:
        """Write the optimizer's state."""
        state = self.optimizer_state(trainer)
        if state is not None:
            write_files({OPTIMIZER_NAME: state}, folder, seal)

    def holds_weights(self, folder: Path) -> bool:
        """Whether there are weights in a checkpoint that `load_model` reads."""
        return holds_weights(folder)

    def load_model(
        self, trainer: Trainer, model: nn.Module, folder: Path, to_resume: bool, tell: Callable[[Any], None]
    ) -> None:
        """Load the weights of a checkpoint.

        Where training is resumed this comes before the strategy has wrapped or sharded the model, and `load_optimizer`
        after it, so that a storage which can only load into shards does both there.

        Parameters:
            to_resume, tell: as `load_weights` has them.
        """
        load_weights(model, folder, to_resume=to_resume, tell=tell)

    def load_optimizer(self, trainer: Trainer, folder: Path) -> None:
        """Load the optimizer's state; the model stands as it is trained."""
        load_optimizer(trainer, folder)
