"""How a checkpoint holds weights and the optimizer's state: whole, put together from shards, or as a strategy has them.

One row of `STORAGES` for each. Everything else in a checkpoint is the same whatever the strategy.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from littrainer.checkpoint.deepspeed_storage import EngineStorage
from littrainer.checkpoint.fsdp_storage import FsdpStorage, PartsStorage, saves_parts
from littrainer.checkpoint.layout import OPTIMIZER_NAME
from littrainer.checkpoint.reader import refuse_other_optimizer
from littrainer.checkpoint.safe_loading import load_tensors
from littrainer.checkpoint.shards import (
    is_sharded,
    load_whole_optimizer_state,
    load_whole_state_dict,
    numbered_as_if_whole,
    numbered_for,
    whole_optimizer_state,
    whole_state_dict,
)
from littrainer.checkpoint.weights import fitted, read_weights, refuse_other_weights
from littrainer.checkpoint.whole_storage import WholeStorage
from littrainer.distributed.agreement import failing_together

if TYPE_CHECKING:
    from littrainer.trainer import Trainer


class WholeFromShards(WholeStorage):
    """Weights and optimizer state are spread over the processes, and whole in a checkpoint, like those of one process.

    They are put together in the first process, which writes them, and sent to the others from it.
    """

    def weights(self, trainer: Trainer) -> dict[str, Any] | None:
        """The whole weights, in the first process."""
        weights = whole_state_dict(trainer.model)
        return weights if trainer.args.process_index == 0 else None

    def optimizer_state(self, trainer: Trainer) -> dict[str, Any] | None:
        """The whole optimizer's state, in the first process."""
        state = whole_optimizer_state(trainer.model, trainer.optimizer)
        if trainer.args.process_index != 0:
            return None
        return numbered_as_if_whole(trainer.model, trainer.optimizer, state)

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
                state = numbered_for(trainer.model, trainer.optimizer, load_tensors(folder / OPTIMIZER_NAME))
                refuse_other_optimizer(folder / OPTIMIZER_NAME, trainer, state)
        load_whole_optimizer_state(trainer.model, trainer.optimizer, state)


# Name -> whether a Trainer's model is held so, and how. The first that applies is taken.
STORAGES: dict[str, tuple[Callable[[Trainer], bool], WholeStorage]] = {
    "as DeepSpeed's engine writes it": (lambda trainer: trainer.is_deepspeed_enabled, EngineStorage()),
    "FSDP, each process its part": (saves_parts, PartsStorage()),
    "FSDP": (lambda trainer: trainer.is_fsdp_enabled, FsdpStorage()),
    "whole, put together from shards": (lambda trainer: is_sharded(trainer.model), WholeFromShards()),
    "whole": (lambda trainer: True, WholeStorage()),
}


def storage_of(trainer: Trainer) -> WholeStorage:
    """How checkpoints of a Trainer hold weights and the optimizer's state, as its strategy stands at this moment."""
    return next(storage for applies, storage in STORAGES.values() if applies(trainer))
