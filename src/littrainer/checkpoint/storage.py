"""How a checkpoint holds weights and the optimizer's state: in whole, put together from shards, or as a strategy has them.

One row of `STORAGES` for each. Everything else in a checkpoint is the same whatever the strategy.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from littrainer.checkpoint.layout import OPTIMIZER_NAME
from littrainer.checkpoint.reader import load_optimizer
from littrainer.checkpoint.safe_loading import load_tensors
from littrainer.checkpoint.sealing import Seal
from littrainer.checkpoint.shards import (
    is_sharded,
    load_whole_optimizer_state,
    load_whole_state_dict,
    whole_optimizer_state,
    whole_state_dict,
)
from littrainer.checkpoint.weights import fitted, holds_weights, load_weights, read_weights, refuse_other_weights
from littrainer.checkpoint.writer import write_files
from littrainer.processes.agreement import failing_together

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


class WholeFromShards(WholeStorage):
    """Weights and optimizer state are spread over the processes, and whole in a checkpoint, as those of one process are.

    They are put together in the first process, which writes them, and sent to the others from it.
    """

    def weights(self, trainer: Trainer) -> dict[str, Any] | None:
        """The whole weights, in the first process."""
        weights = whole_state_dict(trainer.model)
        return weights if trainer.args.process_index == 0 else None

    def optimizer_state(self, trainer: Trainer) -> dict[str, Any] | None:
        """The whole optimizer's state, in the first process."""
        state = whole_optimizer_state(trainer.model, trainer.optimizer)
        return state if trainer.args.process_index == 0 else None

    def save_model(self, trainer: Trainer, output_dir: str) -> None:
        """Write the model in the first process, whatever `save_on_each_node` says: no other has the weights."""
        weights = self.weights(trainer)
        if weights is not None:
            trainer._save(output_dir, state_dict=weights)

    def load_model(
        self, trainer: Trainer, model: nn.Module, folder: Path, to_resume: bool, tell: Callable[[Any], None]
    ) -> None:
        """Load weights into the shards; only the first process reads them."""
        state: dict[str, Any] = {}
        with failing_together(f"reading the weights in {folder}"):
            if trainer.args.process_index == 0:
                state, differences = fitted(model, read_weights(folder))
                refuse_other_weights(model, folder, differences, to_resume)
        load_whole_state_dict(model, state)

    def load_optimizer(self, trainer: Trainer, folder: Path) -> None:
        """Load the optimizer's state into the shards; only the first process reads it."""
        state: dict[str, Any] = {}
        with failing_together(f"reading {folder / OPTIMIZER_NAME}"):
            if trainer.args.process_index == 0:
                state = load_tensors(folder / OPTIMIZER_NAME)
        load_whole_optimizer_state(trainer.model, trainer.optimizer, state)


# Name -> whether a Trainer's model is held so, and how. The first that applies is taken.
STORAGES: dict[str, tuple[Callable[[Trainer], bool], WholeStorage]] = {
    "whole, put together from shards": (lambda trainer: is_sharded(trainer.model), WholeFromShards()),
    "whole": (lambda trainer: True, WholeStorage()),
}


def storage_of(trainer: Trainer) -> WholeStorage:
    """How checkpoints of a Trainer hold weights and the optimizer's state, as its strategy stands at this moment."""
    return next(storage for applies, storage in STORAGES.values() if applies(trainer))
