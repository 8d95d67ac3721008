"""The methods of `Trainer` that transformers' Trainer has not, each handing over to a room."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from littrainer.lightning_features import batch_size_finder, learning_rate_finder
from littrainer.lightning_features.learning_rate_finder import RangeTest
from littrainer.search import searching
from littrainer.search.record import BestRun

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.plain_lightning.data_module import TrainerDataModule
    from littrainer.plain_lightning.module import TransformersModule


class BeyondTransformers:
    """What Lightning and searches give a `Trainer` besides the documented methods; mixed into it."""

    # ---- Before a training: what to set -----------------------------------------------------------------------------

    def lr_find(
        self: Any,
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
    ) -> RangeTest:
        """Take optimizer steps with rising learning rates and watch the loss; the Trainer is left as it was.

        Parameters:
            min_lr, max_lr: the first and the last learning rate.
            num_training: optimizer steps, each with a learning rate of its own.
            mode: `exponential` or `linear`, how the rates rise.
            early_stop_threshold: times the lowest loss so far at which the test ends; None for never.

        Returns:
            the rates and losses, with `suggestion()` and `plot()`.

        Raises:
            ValueError: a parameter is wrong, or there is no training data.
            RuntimeError, NotImplementedError: the Trainer could not be left as it was.
        """
        return learning_rate_finder.lr_find(self, min_lr, max_lr, num_training, mode, early_stop_threshold)

    def scale_batch_size(
        self: Any,
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> int:
        """Find the largest micro-batch on a device that there is memory for; the Trainer is left as it was.

        Parameters:
            mode: `power` doubles until memory runs out, `binsearch` then looks in between.
            steps_per_trial: optimizer steps with each size.
            init_val: samples in the first micro-batches.
            max_trials: sizes to try.
            margin: share of what `binsearch` has found that is taken off again, for safety.
            max_val: the largest size to try, where the data has as many samples.

        Returns:
            the size, for `per_device_train_batch_size`.

        Raises:
            ValueError: a parameter is wrong, or there is no training data.
            RuntimeError, NotImplementedError: no size fits, or the Trainer could not be left as it was.
        """
        return batch_size_finder.scale_batch_size(self, mode, steps_per_trial, init_val, max_trials, margin, max_val)

    def apply_best(self: Any, best: BestRun, hp_space: Callable[[Any], dict[str, Any]] | None = None) -> None:
        """Set the arguments to those of a search's best trial, so that `train()` repeats it.

        Parameters:
            best: what `hyperparameter_search` returned, or one of several.
            hp_space: the space that it was drawn from; by default that of the last search.

        Raises:
            ValueError, TypeError: these hyperparameters are no arguments of this Trainer.
        """
        searching.apply_best(self, best, hp_space)

    # ---- Programs with a lightning.Trainer --------------------------------------------------------------------------

    def to_lightning(self: Any, **keywords: Any) -> tuple[TransformersModule, TrainerDataModule, pl.Trainer]:
        """What a program on Lightning needs to go on from where this Trainer stands.

        `lightning_trainer.fit(module, datamodule=datamodule)` takes the optimizer steps that are left, as `train()`
        would: the model is shared, and optimizer, schedule, counts, place in the data and random numbers go over.

        Parameters:
            keywords: for `lightning.Trainer`, in the place of those that the arguments stand for.

        Returns:
            the module, the data module, and the `lightning.Trainer`.

        Raises:
            RuntimeError: training is going on.
            NotImplementedError: the model is split between processes, or a method is overridden that nothing there
                would call.
        """
        from littrainer.plain_lightning.crossing import to_lightning

        return to_lightning(self, **keywords)

    @classmethod
    def from_lightning(
        cls: Any,
        module: TransformersModule,
        datamodule: TrainerDataModule | None = None,
        lightning_trainer: pl.Trainer | None = None,
        args: TrainingArguments | None = None,
        **keywords: Any,
    ) -> Any:
        """A Trainer that goes on from where a program on Lightning stands; the model is shared.

        Parameters:
            module: what was trained there.
            datamodule: where the datasets are taken from.
            lightning_trainer: what it was trained with: the next `train()` takes the steps that are left, unless it is
                told to resume from something else. None for a Trainer that has trained nothing yet.
            args: by default those of the module, with length, accumulation, precision and clipping of the
                `lightning.Trainer`.
            keywords: for the Trainer, in the place of what module and data module give.

        Returns:
            the Trainer, of the class that this is called on.

        Raises:
            TypeError: the module is no `TransformersModule`, or the data module no `TrainerDataModule`.
            ValueError, RuntimeError, NotImplementedError: what it was trained with is nothing that a Trainer has.
        """
        from littrainer.plain_lightning.crossing import from_lightning

        return from_lightning(cls, module, datamodule, lightning_trainer, args, **keywords)
