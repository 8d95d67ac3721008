"""What a `TransformersModule` does at the hooks of Lightning's callbacks.

As hooks of the module they would be lost where a subclass has such a hook of its own, since in Lightning nobody calls
`super()` there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

from littrainer.lightning import optimization
from littrainer.lightning.ignored_arguments import warn_of_ignored_arguments
from littrainer.lightning.names import TEST, VALIDATION

if TYPE_CHECKING:
    from littrainer.lightning.module import TransformersModule


class RunHooks(pl.Callback):
    """Prepares a module for its training, begins and ends its evaluations, and marks its checkpoints.

    It has no state, and leaves other modules that its lightning.Trainer runs afterwards alone.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """A run begins: say which arguments the module does not act on."""
        for module in _own(pl_module):
            if stage == "fit":
                optimization.check_accumulation(trainer)
                warn_of_ignored_arguments(module.args, trainer)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Prepare the model for the length of the training."""
        for module in _own(pl_module):
            module.prepare_training()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Undo what was done to the model for the length of the training."""
        for module in _own(pl_module):
            module.undo_preparations()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """The same where the training has failed, or was interrupted."""
        self.on_fit_end(trainer, pl_module)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Training begins."""
        for module in _own(pl_module):
            module.set_optimizer_modes("train")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Training has ended: an optimizer with modes leaves the weights that are meant to be used."""
        for module in _own(pl_module):
            module.set_optimizer_modes("eval")

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A validation begins."""
        self._begin(trainer, pl_module, VALIDATION)

    def on_test_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A test begins."""
        self._begin(trainer, pl_module, TEST)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A validation has seen its last batch: log `val_loss` and the metrics."""
        self._end(trainer, pl_module, VALIDATION, trainer.val_dataloaders)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A validation has ended, and training may go on."""
        for module in _own(pl_module):
            if trainer.state.fn == "fit":
                module.set_optimizer_modes("train")

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A test has seen its last batch: log `test_loss` and the metrics."""
        self._end(trainer, pl_module, TEST, trainer.test_dataloaders)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Say in a checkpoint what wrote it, and how the model is made anew."""
        for module in _own(pl_module):
            module.mark_checkpoint(checkpoint)

    def _begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for module in _own(pl_module):
            module.evaluations.begin(trainer, stage)
            module.set_optimizer_modes("eval")

    def _end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str, loaders: Any) -> None:
        for module in _own(pl_module):
            module.evaluations.end(module, stage, loaders)


def are_called_by(trainer: pl.Trainer) -> bool:
    """Whether a lightning.Trainer has them among its callbacks."""
    return any(isinstance(callback, RunHooks) for callback in trainer.callbacks)  # type: ignore[attr-defined]


def check_that_they_are_called(module: TransformersModule, trainer: pl.Trainer) -> None:
    """Refuse a module whose `configure_callbacks` has left them out.

    Raises:
        TypeError: a run would go without them.
    """
    if not are_called_by(trainer):
        name = type(module).__name__
        raise TypeError(
            f"{name}.configure_callbacks() leaves out the callback with which TransformersModule prepares the model "
            "and computes metrics: let it return [*super().configure_callbacks(), ...]."
        )


def _own(module: pl.LightningModule) -> Iterator[TransformersModule]:
    """The module, if it is one of these."""
    from littrainer.lightning.module import TransformersModule

    if isinstance(module, TransformersModule):
        yield module
