"""From a Trainer to a program with a `lightning.Trainer`, and back, in the middle of a training.

Both sides share the model. What stands beside it (optimizer, schedule, counts, place in the data, random numbers) goes
over as a checkpoint in memory, from which the first training on the other side goes on.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.plugins.io import CheckpointIO

from littrainer.callbacks.handler import DefaultFlowCallback
from littrainer.callbacks.progress import PrinterCallback, ProgressCallback
from littrainer.checkpoint.lightning_format import TrainingStates, lightning_checkpoint
from littrainer.checkpoint.lightning_io import TransformersCheckpointIO
from littrainer.checkpoint.random_state import capture_random_states
from littrainer.checkpoint.shards import is_sharded
from littrainer.compat.own_methods import overrides, own_methods
from littrainer.data.generators import host_states, set_host_states
from littrainer.data.loaders import has_length
from littrainer.distributed import environment
from littrainer.distributed.agreement import from_each, from_first
from littrainer.errors.notes import kind_of
from littrainer.lightning_internals import hand_in_checkpoint
from littrainer.plain_lightning.data_module import TrainerDataModule
from littrainer.plain_lightning.intervals import ValidatesAtSteps, ValidatesOutsideFitOnly
from littrainer.plain_lightning.lightning_settings import (
    arguments_under,
    checkpoint_callback,
    lightning_keywords,
    saves,
    validation_callback,
)
from littrainer.plain_lightning.module import TransformersModule
from littrainer.plain_lightning.run_hooks import RunHooks
from littrainer.plain_lightning.trainer_format import TAKEN_OVER, states_of
from littrainer.tracking.base import TrackerCallback
from littrainer.tracking.lightning_loggers import LightningLoggersCallback
from littrainer.training.plan import plan_training
from littrainer.training.resuming import resume_record

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments
    from littrainer.trainer import Trainer

logger = logging.getLogger(__name__)

AnyTrainer = TypeVar("AnyTrainer", bound="Trainer")
# Methods of a Trainer that decide its numbers -> what of the other side to override in their place.
IN_THEIR_PLACE: dict[str, str] = {
    **dict.fromkeys(
        ("compute_loss", "training_step", "_inner_training_loop", "prediction_step", "evaluation_loop", "evaluate"),
        "TransformersModule",
    ),
    **dict.fromkeys(
        ("create_optimizer", "create_scheduler", "create_optimizer_and_scheduler", "get_decay_parameter_names"),
        "TransformersModule",
    ),
    **dict.fromkeys(
        ("get_train_dataloader", "get_eval_dataloader", "get_test_dataloader", "_get_train_sampler"),
        "TrainerDataModule",
    ),
    **dict.fromkeys(("_get_eval_sampler", "get_batch_samples"), "TrainerDataModule"),
}
# Methods of a TransformersModule that decide its numbers -> what of a Trainer to override in their place.
IN_A_TRAINER: dict[str, str] = {
    "compute_loss": "compute_loss",
    "prediction_outputs": "prediction_step",
    "items_in_window": "_get_num_items_in_batch",
    "optimizer_groups": "create_optimizer",
    "optimizer_and_schedule": "create_optimizer_and_scheduler",
    "configure_optimizers": "create_optimizer_and_scheduler",
    "training_step": "training_step",
    "backward": "training_step",
    "optimizer_step": "create_optimizer",
    "lr_scheduler_step": "create_scheduler",
    "configure_gradient_clipping": "_clip_grad_norm",
    "validation_step": "prediction_step",
}
# Methods of a TrainerDataModule -> what of a Trainer to override in their place.
DATA_IN_A_TRAINER: dict[str, str] = {
    "train_dataloader": "get_train_dataloader",
    "val_dataloader": "get_eval_dataloader",
    "test_dataloader": "get_test_dataloader",
    "predict_dataloader": "get_test_dataloader",
    "on_before_batch_transfer": "_prepare_inputs",
    "transfer_batch_to_device": "_prepare_inputs",
    "on_after_batch_transfer": "_prepare_inputs",
}
# Lightning's callbacks whose work is a Trainer's own.
DONE_BY_TRAINER = (pl.callbacks.ModelCheckpoint, pl.callbacks.ProgressBar, pl.callbacks.ModelSummary)
# Keywords of lightning.Trainer with which its user says when `fit` validates.
WHEN_TO_VALIDATE = {"limit_val_batches", "val_check_interval", "check_val_every_n_epoch", "fast_dev_run"}
# Callbacks whose work is Lightning's own over there.
DONE_BY_LIGHTNING = (DefaultFlowCallback, ProgressCallback, PrinterCallback, LightningLoggersCallback)


def to_lightning(trainer: Trainer, **keywords: Any) -> tuple[TransformersModule, TrainerDataModule, pl.Trainer]:
    """See `Trainer.to_lightning`."""
    _refuse_what_stays_behind(trainer)
    args = trainer.args
    schedule = None if trainer._created_lr_scheduler else trainer.lr_scheduler
    module = TransformersModule(
        trainer.model,
        args,
        compute_metrics=trainer.compute_metrics,
        processing_class=trainer.processing_class,
        data_collator=trainer.data_collator,
        compute_loss_func=trainer.compute_loss_func,
        preprocess_logits_for_metrics=trainer.preprocess_logits_for_metrics,
        optimizers=(trainer.optimizer, schedule),
        optimizer_cls_and_kwargs=trainer.optimizer_cls_and_kwargs,
    )
    datamodule = TrainerDataModule(
        trainer.train_dataset,
        trainer.eval_dataset,
        args=args,
        data_collator=trainer.data_collator,
        processing_class=trainer.processing_class,
        model=trainer.model,
    )
    if trainer._train_batch_size != datamodule.batch_size:
        # It is what auto_find_batch_size has found.
        datamodule.batch_size = trainer._train_batch_size
    return module, datamodule, _lightning_trainer(trainer, module, keywords)


def _refuse_what_stays_behind(trainer: Trainer) -> None:
    if trainer.is_in_train:
        raise RuntimeError("to_lightning() is called while train() runs. Call it when train() has returned.")
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled or is_sharded(trainer.model):
        raise NotImplementedError(
            "to_lightning() shares the model, and this one is split between processes by the Trainer's strategy. Save "
            "a checkpoint, and resume from it with lightning.Trainer(plugins=[TransformersCheckpointIO(module)])."
        )
    overridden = own_methods(trainer, tuple(IN_THEIR_PLACE))
    if overridden:
        places = " and ".join(sorted({IN_THEIR_PLACE[name] for name in overridden}))
        raise NotImplementedError(
            f"{type(trainer).__name__} overrides {', '.join(sorted(overridden))}, which no lightning.Trainer would "
            f"call. Override what does the same in {places}, and make these yourself."
        )
    accumulation, dataset = trainer.args.gradient_accumulation_steps, trainer.train_dataset
    if accumulation > 1 and dataset is not None and not has_length(dataset):
        logger.warning(
            "train_dataset has no length. Where it ends within the %d micro-batches of an optimizer step, a "
            "lightning.Trainer takes the step with those that there are, and a Trainer goes on with the next pass over "
            "it: from then on they train on other data.",
            accumulation,
        )
    callbacks = trainer.callback_handler.callbacks
    others = [one for one in callbacks if not isinstance(one, DONE_BY_LIGHTNING)]
    if others:
        names = ", ".join(type(one).__name__ for one in others)
        logger.warning(
            "These callbacks of the Trainer stay behind, since a lightning.Trainer calls Lightning's only: %s.%s",
            names,
            " Pass to_lightning(logger=...) to report there."
            if any(isinstance(one, TrackerCallback) for one in others)
            else "",
        )


def _lightning_trainer(trainer: Trainer, module: TransformersModule, given: dict[str, Any]) -> pl.Trainer:
    args = trainer.args
    total_steps = functools.cache(lambda: _total_steps(trainer))
    in_arguments: Any = args.lightning
    chosen = {**(in_arguments or {}), **trainer.lightning_keywords, **given}
    known = {**lightning_keywords(args, total_steps), **chosen}
    if given.keys() & {"max_epochs", "max_steps"}:
        # The one says how long training is, without the other.
        known.update({"max_epochs": -1, "max_steps": -1, **{name: given[name] for name in given}})
    callbacks = [*trainer.lightning_callbacks, *_as_list(known.pop("callbacks", None))]
    validation = None if chosen.keys() & WHEN_TO_VALIDATE else validation_callback(args, total_steps)
    callbacks += _as_list(validation)
    if known["enable_checkpointing"] and saves(args) and not any(isinstance(one, ModelCheckpoint) for one in callbacks):
        callbacks.append(checkpoint_callback(args, total_steps, validation))
    callbacks.append(_goes_on(trainer))
    plugins = _as_list(known.pop("plugins", None))
    if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
        plugins.append(TransformersCheckpointIO(module, trainer.processing_class))
    known.setdefault("logger", _loggers(trainer))
    return pl.Trainer(callbacks=callbacks, plugins=plugins, **known)


def _total_steps(trainer: Trainer) -> int:
    # Making a loader may draw random numbers, which a training would then lack.
    before = host_states()
    try:
        return plan_training(trainer, trainer.get_train_dataloader()).max_steps
    finally:
        set_host_states(before)


def _loggers(trainer: Trainer) -> list[Logger] | bool:
    callbacks = trainer.callback_handler.callbacks
    given = [
        one for callback in callbacks if isinstance(callback, LightningLoggersCallback) for one in callback.loggers
    ]
    reports = any(isinstance(callback, TrackerCallback) for callback in callbacks)
    return given or ([CSVLogger(trainer.args.output_dir)] if reports else False)


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _states_of(trainer: Trainer) -> TrainingStates | None:
    """Where a Trainer stands; None where it has not trained."""
    run, step, taken_over = trainer.training_run, trainer.state.global_step, trainer._lightning_checkpoint
    if taken_over is not None and (run is None or step == taken_over["global_step"]):
        # No training has gone on from it.
        is_first = trainer.is_world_process_zero()
        return from_first(states_of(taken_over, trainer.args, TAKEN_OVER) if is_first else None)
    if not step:
        return None
    if run is None:
        raise RuntimeError(
            f"The Trainer's state says that {step} optimizer steps are done, and no training of it has taken them, so "
            "there is no optimizer to go on with. Call train(resume_from_checkpoint=...) first."
        )
    record = resume_record(run)
    first, *others = from_each({"random_states": capture_random_states(), "data": record["data"]})
    scaler = trainer.accelerator.scaler
    return TrainingStates(
        trainer.state,
        optimizer=trainer.optimizer.state_dict(),
        schedule=trainer.lr_scheduler.state_dict(),
        scaling=None if scaler is None else scaler.state_dict(),
        record={**record, "data": first["data"]},
        random_states=first["random_states"],
        further_ranks=dict(enumerate(others, 1)),
    )


def _goes_on(trainer: Trainer) -> GoesOn:
    states = _states_of(trainer)

    def where() -> tuple[Any, int]:
        return trainer.training_run, trainer.state.global_step

    then = where()
    return GoesOn(None if states is None else lightning_checkpoint(states), lambda: where() == then)


class GoesOn(pl.Callback):
    """Lets the first fit of a `lightning.Trainer` go on where a training stands, unless it is given a `ckpt_path`.

    Parameters:
        checkpoint: where it stands, as Lightning has it, but for the weights, which the model holds already; None
            begins.
        stands_there: whether the training has not gone on by itself since, with the same weights and optimizer.
    """

    def __init__(self, checkpoint: dict[str, Any] | None, stands_there: Callable[[], bool]):
        self.checkpoint = checkpoint
        self._stands_there: Callable[[], bool] | None = stands_there

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Hand it in where Lightning looks for one.

        Raises:
            RuntimeError: the training has gone on by itself.
        """
        if stage != "fit" or self._stands_there is None:
            return
        if trainer.ckpt_path is None and not self._stands_there():
            raise RuntimeError(
                "The Trainer has trained since to_lightning() was called, so fit() cannot go on from where it stood "
                "then. Call to_lightning() again."
            )
        if self.checkpoint is not None:
            hand_in_checkpoint(trainer, {**self.checkpoint, "state_dict": pl_module.state_dict()})
        self.checkpoint = self._stands_there = None


# What `to_lightning` gives a `lightning.Trainer` to do what a Trainer does by itself.
MADE_HERE = (GoesOn, RunHooks, ValidatesAtSteps, ValidatesOutsideFitOnly)


def from_lightning(
    kind: type[AnyTrainer],
    module: Any,
    datamodule: Any,
    lightning_trainer: pl.Trainer | None,
    args: TrainingArguments | None,
    **given: Any,
) -> AnyTrainer:
    """See `Trainer.from_lightning`."""
    _check_what_is_given(kind, module, datamodule)
    _refuse_hooks(kind, module, TransformersModule, IN_A_TRAINER)
    if datamodule is not None:
        _refuse_hooks(kind, datamodule, TrainerDataModule, DATA_IN_A_TRAINER)
    _tell_what_stays_behind(lightning_trainer)
    _keep_processes(lightning_trainer)
    # First of all, since making a Trainer seeds the random generators.
    checkpoint = _checkpoint_of(module, lightning_trainer)
    data_arguments = None if datamodule is None else datamodule.args
    arguments = arguments_under(module.args, data_arguments, lightning_trainer) if args is None else args
    if getattr(arguments, "predict_with_generate", False) and not hasattr(kind, "load_generation_config"):
        raise ValueError(
            "predict_with_generate is set, and a Trainer does not generate: call Seq2SeqTrainer.from_lightning(...)."
        )
    keywords: dict[str, Any] = {
        "model": module.model,
        "args": arguments,
        "processing_class": module.processing_class,
        "data_collator": module.data_collator,
        "compute_loss_func": module.compute_loss_func,
        "compute_metrics": module.compute_metrics,
        "preprocess_logits_for_metrics": module.preprocess_logits_for_metrics,
        "optimizer_cls_and_kwargs": module.optimizer_cls_and_kwargs,
        "optimizers": module.given_optimizers,
    }
    if lightning_trainer is not None and lightning_trainer.limit_train_batches not in (None, 1.0):
        keywords["lightning"] = {"limit_train_batches": lightning_trainer.limit_train_batches}
    if datamodule is not None:
        keywords.update(train_dataset=datamodule.train_dataset, eval_dataset=datamodule.eval_dataset)
        for name in ("processing_class", "data_collator"):
            keywords[name] = keywords[name] or getattr(datamodule, name)
    trainer = kind(**{**keywords, **given})
    if args is None and lightning_trainer is not None:
        _end_where_it_would(trainer, lightning_trainer)
    if checkpoint is not None:
        own = trainer.state
        is_first = trainer.is_world_process_zero()
        trainer.state = from_first(states_of(checkpoint, arguments, TAKEN_OVER).state if is_first else own)
        trainer.state.is_world_process_zero = own.is_world_process_zero
        trainer.state.is_local_process_zero = own.is_local_process_zero
        trainer._lightning_checkpoint = checkpoint
    return trainer


def _end_where_it_would(trainer: Trainer, lightning_trainer: pl.Trainer) -> None:
    """A `lightning.Trainer` ends at the first of its limits; for a Trainer, `max_steps` comes before epochs."""
    steps, epochs = lightning_trainer.max_steps, lightning_trainer.max_epochs
    if steps < 0 or epochs is None or epochs < 0 or trainer.train_dataset is None:
        return
    if not has_length(trainer.train_dataset):
        raise ValueError(
            f"lightning.Trainer(max_epochs={epochs}, max_steps={steps}) ends at whichever comes first, and a Trainer "
            "does not know which one that is where train_dataset has no length. Give args=TrainingArguments(...) with "
            "max_steps."
        )
    trainer.args.max_steps = -1
    if _total_steps(trainer) > steps:
        trainer.args.max_steps = steps


def _keep_processes(lightning_trainer: pl.Trainer | None) -> None:
    # When a run ends, Lightning takes from the environment what it has told the processes that it has started. They
    # stay connected, and a Trainer reads there who they are.
    if lightning_trainer is None or lightning_trainer.world_size == 1 or not torch.distributed.is_initialized():
        return
    facts = {
        environment.RANK: lightning_trainer.global_rank,
        environment.WORLD_SIZE: lightning_trainer.world_size,
        environment.LOCAL_RANK: lightning_trainer.local_rank,
        environment.LOCAL_WORLD_SIZE: lightning_trainer.num_devices,
    }
    for name, value in facts.items():
        os.environ.setdefault(name, str(value))


def _check_what_is_given(kind: type[Any], module: Any, datamodule: Any) -> None:
    if not isinstance(module, TransformersModule):
        raise TypeError(
            f"from_lightning() takes a TransformersModule, and was given {kind_of(module)}. For another "
            f"LightningModule make {kind.__name__}(model=...) of the model that it carries."
        )
    if module.model is None:
        raise RuntimeError(
            "The TransformersModule has no model yet: its function makes one when a lightning.Trainer begins. Call "
            "from_lightning() after fit(), or give a Trainer the function as model_init."
        )
    if is_sharded(module.model):
        raise NotImplementedError(
            "from_lightning() shares the model, and this one is split between processes by its strategy. Save a whole "
            "checkpoint (save_distributed_checkpoint=False), and give it to train(resume_from_checkpoint=...)."
        )
    if datamodule is not None and not isinstance(datamodule, TrainerDataModule):
        raise TypeError(
            f"from_lightning() takes a TrainerDataModule, and was given {kind_of(datamodule)}. Leave it out, and give "
            "train_dataset=... and eval_dataset=... ."
        )


def _refuse_hooks(kind: type[Any], given: Any, base: type[Any], in_a_trainer: dict[str, str]) -> None:
    """Refuse what overrides a hook that decides numbers, unless the kind of Trainer overrides what stands for it."""
    missing = {
        hook: method
        for hook, method in in_a_trainer.items()
        if getattr(type(given), hook) is not getattr(base, hook) and not overrides(kind, method)
    }
    if missing:
        pairs = ", ".join(f"{hook} (a Trainer's {method})" for hook, method in missing.items())
        raise NotImplementedError(
            f"{type(given).__name__} overrides {pairs}, which {kind.__name__} would not call. Override it in a "
            "subclass of the Trainer, and call from_lightning() of that."
        )


def _tell_what_stays_behind(lightning_trainer: pl.Trainer | None) -> None:
    callbacks: list[Any] = [] if lightning_trainer is None else lightning_trainer.callbacks  # type: ignore[attr-defined]
    others = [one for one in callbacks if not isinstance(one, (*DONE_BY_TRAINER, *MADE_HERE))]
    if others:
        logger.warning(
            "These callbacks of the lightning.Trainer stay behind: %s. Pass from_lightning(callbacks=[...]) those that "
            "are to be called here too.",
            ", ".join(type(one).__name__ for one in others),
        )
    least = {name: getattr(lightning_trainer, name, None) for name in ("min_epochs", "min_steps")}
    told = [f"{name}={value}" for name, value in least.items() if value]
    if told:
        logger.warning("A Trainer has no least length, so %s of the lightning.Trainer does not count.", told)


class _KeptInMemory(CheckpointIO):
    def __init__(self) -> None:
        self.checkpoint: dict[str, Any] | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.checkpoint = checkpoint

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        raise NotImplementedError

    def remove_checkpoint(self, path: Any) -> None:
        raise NotImplementedError


def _checkpoint_of(module: TransformersModule, lightning_trainer: pl.Trainer | None) -> dict[str, Any] | None:
    """Where a `lightning.Trainer` stands, as its checkpoint; None where it has not trained.

    In several processes the first one has it.
    """
    if lightning_trainer is None or not lightning_trainer.global_step:
        return None
    if lightning_trainer.lightning_module is not module:
        raise ValueError(
            "The lightning.Trainer has trained another module than the one that from_lightning() was given. Give the "
            "one that fit() was called with."
        )
    strategy, kept = lightning_trainer.strategy, _KeptInMemory()
    own, strategy.checkpoint_io = strategy.checkpoint_io, kept
    try:
        lightning_trainer.save_checkpoint("in memory")
    finally:
        strategy.checkpoint_io = own
    return kept.checkpoint if lightning_trainer.is_global_zero else {"global_step": lightning_trainer.global_step}
