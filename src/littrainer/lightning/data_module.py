"""The data module for Lightning with a Trainer's data loading and resume."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import IterableDataset, SequentialSampler

from littrainer.arguments.training_arguments import TrainingArguments
from littrainer.checkpoint.lightning_format import DATA_VERSION
from littrainer.data.collators import RemoveColumnsCollator, get_default_collator
from littrainer.data.columns import (
    DroppedColumns,
    drop_extra_columns,
    explain_missing_columns,
    find_accepted_columns,
)
from littrainer.data.loaders import PrefetchLoader, build_loader, has_length
from littrainer.data.resume.position import DataPosition
from littrainer.data.samplers import make_evaluation_sampler, make_train_sampler, warn_about_dropped_lengths
from littrainer.data.stream_end import check_equal_lengths
from littrainer.distributed.collectives import all_gather_object, is_distributed
from littrainer.lightning.arguments import ArgumentsUnderLightning, resolve_arguments
from littrainer.lightning.batches import (
    SAVED_FIELDS,
    CountItems,
    EvaluationBatches,
    TrainingBatches,
    parse_positions,
)
from littrainer.lightning.ignored_arguments import ArgumentsSource
from littrainer.lightning_adapter.lightning_internals import RecordingBatchSampler
from littrainer.loop.checks import check_is_dataset, check_not_empty
from littrainer.loop.plan import describe_empty_loader
from littrainer.model.facts import read_model_facts
from littrainer.runtime.lazy_isinstance import is_a

logger = logging.getLogger(__name__)

LOADERS = {
    "train_dataset": "train_dataloader",
    "eval_dataset": "val_dataloader",
    "test_dataset": "test_dataloader",
    "predict_dataset": "predict_dataloader",
}


class TrainerDataModule(pl.LightningDataModule):
    """A data module that loads data as a Trainer does, for any LightningModule.

    Parameters:
        train_dataset: map-style or iterable, for `fit`.
        eval_dataset: for `fit` and `validate`; may be a dict of datasets by name.
        test_dataset: for `test`, and for `predict` if there is no `predict_dataset`; may be a dict too.
        args: settings of order and batches: `per_device_*_batch_size`, `train_sampling_strategy`, `dataloader_*`,
            `remove_unused_columns`, `label_names`, `data_seed`, `accelerator_config` and others; by default the
            LightningModule's.
        data_collator: turns a list of samples into a batch; by default the LightningModule's, else pads with
            `processing_class`, else stacks.
        processing_class: tokenizer or processor; by default the LightningModule's.
        model: its forward's parameters are the columns to keep; by default the LightningModule's `model`.
        predict_dataset: for `predict`.
        windows: read the micro-batches of an optimizer step together, to count its label tokens before its first
            forward pass (`trainer.train_dataloader.handed_out[batch_idx]`); by default for modules that count them, as
            `TransformersModule` does.

    A subclass may create its datasets in `setup`, and then calls `super().setup(stage)`. Data is sharded as in a
    Trainer; Lightning's `use_distributed_sampler` has no effect. A resumed training gets the same batches and random
    draws as an uninterrupted training. With another batch size it continues after the same number of samples of the
    epoch, with a warning. Lightning skips a validation that was due at the checkpoint and had not begun.

    Raises:
        TypeError, ValueError, NotImplementedError: as TrainingArguments.

    Examples:
        >>> from littrainer import TrainerDataModule
        >>> data = TrainerDataModule(train_dataset, args={"per_device_train_batch_size": 4}, model=model)
        >>> len(data.train_dataloader())
        2
    """

    def __init__(
        self,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        test_dataset: Any = None,
        args: ArgumentsSource = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        processing_class: Any = None,
        model: Any = None,
        *,
        predict_dataset: Any = None,
        windows: bool | None = None,
    ):
        super().__init__()
        self.train_dataset, self.eval_dataset, self.test_dataset = train_dataset, eval_dataset, test_dataset
        self.predict_dataset = predict_dataset
        self.args: TrainingArguments | None = None if args is None else resolve_arguments(args)
        self.data_collator, self.processing_class = data_collator, processing_class
        self.model = model
        self.windows = windows
        self._training_batches: TrainingBatches | None = None
        # A checkpoint's state until reading begins.
        self._loaded_state: dict[str, Any] | None = None
        self._has_warned_of_columns = False
        # By description of the data.
        self._loaders: dict[str, PrefetchLoader] = {}
        self._dropped_columns: dict[str, DroppedColumns] = {}

    @property
    def batch_size(self) -> int:
        """Samples of a training micro-batch of one process; writable for Lightning's batch-size finder."""
        return self._resolve_arguments().per_device_train_batch_size

    @batch_size.setter
    def batch_size(self, value: int) -> None:
        self.args = copy.copy(self._resolve_arguments())
        self.args.per_device_train_batch_size = value

    def setup(self, stage: str) -> None:
        """Check the datasets, before a model is moved to its device.

        Parameters:
            stage: Lightning's stage; `"fit"` without an `eval_dataset` does not validate.

        Raises:
            ValueError: a dataset is empty.
            TypeError: a dataset is a DataLoader.
        """
        for name, method in LOADERS.items():
            source = getattr(self, name)
            datasets = source if isinstance(source, dict) else {} if source is None else {None: source}
            for key, dataset in datasets.items():
                description = name if key is None else f"{name} {key!r}"
                check_is_dataset(dataset, description, method)
                check_not_empty(dataset, description)
        vars(self).pop("val_dataloader", None)
        if stage == TrainerFn.FITTING:
            self._training_batches = None
            # From a failed fit; Lightning loads the state of this fit later.
            self._loaded_state = None
            if self.eval_dataset is None and type(self).val_dataloader is TrainerDataModule.val_dataloader:

                @functools.wraps(super().val_dataloader)
                def no_loaders() -> list[Any]:
                    return []

                # Lightning does not validate with a wrapper of Lightning's method.
                vars(self)["val_dataloader"] = no_loaders

    def _get_dataset(self, name: str, method: str) -> Any:
        dataset = getattr(self, name)
        if dataset is None:
            raise ValueError(
                f"There is no {name} for {method}: pass one to {type(self).__name__}, or set it in setup() before "
                "super().setup(stage)."
            )
        return dataset

    # ---- Loaders -----------------------------------------------------------------------------------------------------

    def train_dataloader(self) -> Any:
        """Return the batches for `fit`; without a `lightning.Trainer` a plain DataLoader.

        Raises:
            ValueError: there is no dataset or no batch, or processes have different numbers of batches.
        """
        args, dataset = self._arguments(), self._get_dataset("train_dataset", "fit()")
        loader = self._loader(dataset, "Training", args.train_batch_size, self._train_sampler, is_training=True)
        check_equal_lengths(loader, "training data")
        if has_length(loader) and len(loader) == 0:
            raise ValueError(describe_empty_loader(args, loader))
        if self.trainer is None:
            return loader
        self._training_batches = TrainingBatches(
            loader, args, self.trainer, count_items=self._get_item_counter(), take_position=self._take_position
        )
        return self._training_batches

    def val_dataloader(self) -> Any:
        """Return the batches of `eval_dataset`, or of each of its datasets by name."""
        return self._evaluation_batches(self._get_dataset("eval_dataset", "validate()"), "Evaluation")

    def test_dataloader(self) -> Any:
        """Return the batches of `test_dataset`, or of each of its datasets by name."""
        return self._evaluation_batches(self._get_dataset("test_dataset", "test()"), "test")

    def predict_dataloader(self) -> Any:
        """Return the batches of `predict_dataset`, or of `test_dataset` without `predict_dataset`."""
        name = "test_dataset" if self.predict_dataset is None else "predict_dataset"
        return self._evaluation_batches(self._get_dataset(name, "predict()"), "test")

    def _evaluation_batches(self, dataset: Any, description: str) -> Any:
        if isinstance(dataset, dict):
            return {name: self._evaluation_batches(part, description) for name, part in dataset.items()}
        size = self._arguments().eval_batch_size
        batches = EvaluationBatches(
            functools.partial(self._loader, dataset, description, size, self._evaluation_sampler)
        )
        check_equal_lengths(batches.loader, f"{description.lower()} data")
        return batches

    def _loader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        make_sampler: Callable[[Any], Any],
        is_training: bool = False,
    ) -> PrefetchLoader:
        dataset, collate = self._drop_unused_columns(dataset, description)
        has_fixed_order = isinstance(dataset, IterableDataset) or not has_length(dataset)
        loader = self._loaders[description] = build_loader(
            self._arguments(),
            dataset,
            collate=collate,
            batch_size=batch_size,
            sampler=None if has_fixed_order else make_sampler(dataset),
            is_training=is_training,
        )
        # Dispatched batches are split after reading.
        if not has_fixed_order and loader.dispatch is None and getattr(self.trainer, "predicting", False):
            vars(loader)["batch_sampler"] = RecordingBatchSampler(loader.batch_sampler)  # type: ignore[arg-type]
        return loader

    def _train_sampler(self, dataset: Any) -> Any:
        pl_trainer: Any = self.trainer
        if pl_trainer is not None and pl_trainer.overfit_batches:
            return SequentialSampler(dataset)
        return make_train_sampler(self._arguments(), dataset, self._find_setting("processing_class"))

    def _evaluation_sampler(self, dataset: Any) -> Any:
        return make_evaluation_sampler(self._arguments(), dataset, self._find_setting("processing_class"))

    def _drop_unused_columns(self, dataset: Any, description: str) -> tuple[Any, Callable[[list[Any]], Any]]:
        args = self._arguments()
        collate = self._find_setting("data_collator")
        if collate is None:
            collate = get_default_collator(self._find_setting("processing_class"))
        model = self._find_setting("model") if args.remove_unused_columns else None
        if args.signature_columns:
            accepted, model_name = args.signature_columns, None
        elif model is None:
            if args.remove_unused_columns and not self._has_warned_of_columns:
                self._has_warned_of_columns = True
                logger.warning(
                    "remove_unused_columns=True has no effect: the LightningModule has no `model` whose forward names "
                    "its columns. Pass model=... to %s, or set remove_unused_columns=False.",
                    type(self).__name__,
                )
            return dataset, collate
        else:
            label_names = read_model_facts(model).label_names if args.label_names is None else args.label_names
            accepted, model_name = find_accepted_columns(model, label_names), type(model).__name__
        if is_a(dataset, "datasets.Dataset"):
            source, dataset = dataset, drop_extra_columns(dataset, accepted, model_name and model, description)
            warn_about_dropped_lengths(args, source, dataset)
            names: Any = [name for name in source.column_names if name not in accepted]
        else:
            collate = RemoveColumnsCollator(collate, accepted, logger, model_name, description)
            names = collate.dropped
        self._dropped_columns[description] = DroppedColumns(names, description, model_name, accepted)
        return dataset, collate

    def on_exception(self, exception: BaseException) -> None:
        """Add a note to an error about a column that was dropped.

        Parameters:
            exception: the error, whose type and arguments stay.
        """
        model = self._find_setting("model")
        explain_missing_columns(exception, self._dropped_columns.values(), self._loaders.values(), model)

    def _get_item_counter(self) -> CountItems | None:
        count = self._get_module_attribute("items_in_window")
        if self.windows and not callable(count):
            raise ValueError(
                f"windows=True counts the items of each optimizer step, and "
                f"{type(self._lightning_module).__name__} has no items_in_window(window) to count them. Leave windows "
                "at None, or train a TransformersModule."
            )
        return None if self.windows is False or not callable(count) else count

    # ---- Defaults from the LightningModule ---------------------------------------------------------------------------

    @property
    def _lightning_module(self) -> Any:
        return None if self.trainer is None else self.trainer.lightning_module

    def _get_module_attribute(self, name: str) -> Any:
        return getattr(self._lightning_module, name, None)

    def _find_setting(self, name: str) -> Any:
        value = getattr(self, name)
        return self._get_module_attribute(name) if value is None else value

    def _resolve_arguments(self) -> TrainingArguments:
        if self.args is None:
            module_args = self._get_module_attribute("args")
            if isinstance(module_args, TrainingArguments):
                return module_args
            self.args = resolve_arguments(None)
        return self.args

    def _arguments(self) -> Any:
        args = self._resolve_arguments()
        return args if self.trainer is None else ArgumentsUnderLightning(args, self.trainer)

    # ---- Checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the positions of all processes, in a collective call; empty before a training."""
        if self._training_batches is None:
            return self._loaded_state or {}
        saved = self._training_batches.position().dump_fields(*SAVED_FIELDS)
        return {"version": DATA_VERSION, "processes": all_gather_object(saved) if is_distributed() else [saved]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the positions of a checkpoint for the next `fit`.

        Parameters:
            state_dict: the result of `state_dict`.

        Raises:
            ValueError: the state has another version, or is not from a TrainerDataModule.
        """
        # Evaluations load the state without resuming.
        if self.trainer is None or self.trainer.state.fn == TrainerFn.FITTING:
            parse_positions(state_dict)
            self._loaded_state = state_dict

    def _take_position(self) -> DataPosition | None:
        state, self._loaded_state = self._loaded_state, None
        if state is None:
            return None
        positions, rank = parse_positions(state), 0 if self.trainer is None else self.trainer.global_rank
        # New processes begin at rank 0's position.
        return positions[rank] if rank < len(positions) else replace(positions[0], data=None, random=None)
