"""The undocumented methods of `Trainer` that subclasses override, with transformers' names and signatures."""

from __future__ import annotations

import functools
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.utils.data import IterableDataset, SequentialSampler

from littrainer import session
from littrainer.arguments.choices import HPSearchBackend
from littrainer.arguments.deepspeed import has_deepspeed, update_deepspeed
from littrainer.arguments.sharding import get_sharding_plan
from littrainer.callbacks.early_stopping import restore_patience
from littrainer.callbacks.handler import CallbackHandler, normalize_callbacks, restore_callbacks
from littrainer.callbacks.lightning_callbacks import has_progress_bar
from littrainer.callbacks.progress import PrinterCallback, show_loaded_checkpoint
from littrainer.callbacks.state import TrainerControl, TrainerState, is_exportable
from littrainer.checkpoint import reader
from littrainer.checkpoint.layout import SCALER_NAME, SCHEDULER_NAME, random_state_name
from littrainer.checkpoint.manager import SaveRequest
from littrainer.checkpoint.remote import upload_files
from littrainer.checkpoint.state_io import FullStateIO, TrainingObjects, choose_state_io
from littrainer.checkpoint.weights import log_key_mismatch
from littrainer.checkpoint.writer import write_tokenizer_and_args
from littrainer.compat.accelerator import AcceleratorFacade
from littrainer.data.collators import RemoveColumnsCollator
from littrainer.data.columns import (
    DroppedColumns,
    drop_extra_columns,
    find_accepted_columns,
    make_empty_batch_error,
    make_unnamed_batch_error,
)
from littrainer.data.limits import count_development_batches, is_overfit_run
from littrainer.data.loaders import PrefetchLoader, build_loader, has_length
from littrainer.data.packing import collate_with_labels, pack_documents
from littrainer.data.resume.rng import get_rng_states
from littrainer.data.samplers import make_evaluation_sampler, make_train_sampler, warn_about_dropped_lengths
from littrainer.data.token_batches import collate_up_to, find_length_groups, make_token_batch_sampler
from littrainer.distributed.collectives import broadcast_object, raise_on_all_ranks, run_with_keepalive
from littrainer.distributed.layout import get_process_layout
from littrainer.evaluation import prediction
from littrainer.evaluation.results import EvalLoopOutput, TrainOutput, speed_metrics
from littrainer.hub.model_card import collect_badges, write_card
from littrainer.hub.push_to_hub import PushInProgress, finish_pushes, get_pushes, push_save
from littrainer.lightning_adapter import run_lightning
from littrainer.loop import log_eval_save, loss
from littrainer.loop.checks import check_arguments, check_construction
from littrainer.loop.loss_normalization import EXACT, detect_loss_reduction
from littrainer.loop.out_of_memory import empty_device_cache, sync_forward_failures
from littrainer.loop.overrides import find_overrides
from littrainer.loop.preemption import make_jit_checkpoint_callbacks
from littrainer.loop.reports import MemoryReport
from littrainer.model.facts import read_model_facts
from littrainer.model.traversal import list_parameters, move_model, set_training_mode
from littrainer.optim.schedules import is_metric_driven, step_on_metric
from littrainer.optim.stepping import clip_gradient_norm, is_on_several_meshes
from littrainer.runtime.lazy_isinstance import is_a
from littrainer.runtime.notes import EVALUATION, SAVE, part_of_training
from littrainer.runtime.remote_folder import local_folder
from littrainer.search import trial as search_trial
from littrainer.session import TrainerAttributesBase
from littrainer.strategies.full_state import is_sharded
from littrainer.strategies.model_wrapping import (
    autocast_and_compile,
    is_wrapped_by_trainer,
    move_to_device,
    wrap_for_training,
)
from littrainer.tracking.lightning_loggers import add_logger_trackers
from littrainer.tracking.selection import create_trackers

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments


logger = logging.getLogger(__name__)

NO_CONTEXT: AbstractContextManager[Any] = nullcontext()


class TrainerHooks(TrainerAttributesBase):
    """The overridable steps between the documented methods of `Trainer`."""

    # ---- Facts of the arguments and the model ------------------------------------------------------------------------

    def _has_foreign_device_map(self) -> bool:
        """Return whether a device map uses several devices, or another device than the arguments'."""
        device_map: Any = getattr(self.model, "hf_device_map", None) or {}
        devices = set(device_map.values()) - {"cpu", "disk"}
        return len(devices) > 1 or any(torch.device(device) != self.args.device for device in devices)

    def _get_batch_copies(self) -> int:
        """Return the number of processes with the same batch."""
        shares_rows = self.session.sequences is not None
        return self.get_tp_size() * (get_process_layout(self.args).sequence_parallel if shares_rows else 1)

    def _should_place_model(self) -> bool:
        if self.args.place_model_on_device is not None:
            return self.args.place_model_on_device
        # DeepSpeed, FSDP, and evaluations that cast the model move it later; a model-parallel model is placed already.
        is_placed_elsewhere = self.is_model_parallel or self.is_deepspeed_enabled or self.is_fsdp_enabled
        return not (self.args.bf16_full_eval or self.args.fp16_full_eval or is_placed_elsewhere)

    def _update_model_facts(self) -> None:
        facts = read_model_facts(self.model)
        self._described_model_class = type(self.model)
        self.model_accepts_loss_kwargs = facts.accepts_loss_kwargs
        self.label_names = facts.label_names if self.args.label_names is None else self.args.label_names
        self.can_return_loss = facts.can_return_loss
        self._loss_shifts_labels = facts.shifts_labels
        self.label_smoother = loss.make_label_smoother(self.model, self.args.label_smoothing_factor)
        self.neftune_noise_alpha = self.args.neftune_noise_alpha

    def apply_changed_arguments(self, changed: set[str], makes_accelerator: bool = True) -> None:
        """Update all parts that depend on the changed arguments, by default including the accelerator."""
        args = self.args
        if makes_accelerator:
            check_arguments(args)
            self.create_accelerator_and_postprocess()
        self._train_batch_size = args.train_batch_size
        self.current_gradient_accumulation_steps = args.gradient_accumulation_steps
        if "label_smoothing_factor" in changed:
            self.label_smoother = loss.make_label_smoother(self.model, args.label_smoothing_factor)
        if "neftune_noise_alpha" in changed:
            self.neftune_noise_alpha = args.neftune_noise_alpha
        if "label_names" in changed:
            self._signature_columns = None
            if self.model is not None:
                self._update_model_facts()
            else:
                self._described_model_class = type(None)
        if "skip_memory_metrics" in changed:
            self.session.memory = MemoryReport(not args.skip_memory_metrics)
        if changed & {"fp16_full_eval", "bf16_full_eval", "place_model_on_device", "fsdp", "deepspeed"}:
            self.place_model_on_device = self._should_place_model()

    # ---- Construction ------------------------------------------------------------------------------------------------

    def _validate_args(self) -> None:
        check_construction(self)

    def _create_callbacks(
        self,
        default_callbacks: list[type],
        callbacks: list[Any] | None,
        add_callback: Callable[[Any], None],
        progress_callback: type,
    ) -> None:
        self.lightning_callbacks = []
        self.callback_handler = CallbackHandler(
            default_callbacks, self.model, self.processing_class, self.optimizer, self.lr_scheduler
        )
        trackers = "none" if count_development_batches(self) else self.args.report_to
        argument_callbacks = [*create_trackers(trackers), *make_jit_checkpoint_callbacks(self.args, self)]
        for callback in [*argument_callbacks, *normalize_callbacks(callbacks)]:
            add_callback(callback)
        if not has_progress_bar(self.lightning_callbacks, self.args):
            self.add_callback(PrinterCallback if self.args.disable_tqdm else progress_callback)
        add_logger_trackers(self, self.callback_handler)

    def _create_state(self) -> None:
        self.control = TrainerControl()
        callbacks = [*self.callback_handler.callbacks, self.control]
        self.state = TrainerState(
            is_local_process_zero=self.is_local_process_zero(),
            is_world_process_zero=self.is_world_process_zero(),
            stateful_callbacks=list(filter(is_exportable, callbacks)),
        )

    # ---- Data --------------------------------------------------------------------------------------------------------

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Any] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> PrefetchLoader:
        args = self.args
        collate = self.data_collator
        if args.max_tokens_per_batch is not None and not isinstance(dataset, IterableDataset):
            collate = partial(collate_up_to, args.max_tokens_per_batch, collate)
        # The untrimmed dataset has the column of lengths.
        untrimmed = dataset
        if is_a(dataset, "datasets.Dataset"):
            dataset = self._remove_unused_columns(dataset, description=description)
        else:
            collate = self._get_collator_with_removed_columns(collate, description=description)
        sampler = None if sampler_fn is None or isinstance(dataset, IterableDataset) else sampler_fn(dataset)
        if args.max_tokens_per_batch is not None:
            sampler = make_token_batch_sampler(
                args, untrimmed, sampler, self.processing_class, self.data_collator, is_training
            )
        elif args.pack_to_length is not None and description == "Evaluation":
            collate = partial(collate_with_labels, collate)
        elif args.pack_to_length is not None and is_training:
            dataset, sampler, collate = pack_documents(
                args, (untrimmed, dataset), sampler, collate, self.processing_class, self.model
            )
        settings = getattr(self.accelerator, "dataloader_config", None)
        loader = build_loader(
            args,
            dataset,
            collate=collate,
            batch_size=batch_size,
            sampler=sampler,
            is_training=is_training,
            settings=settings,
        )
        loader.set_destination(args.device, settings)
        if dataloader_key is not None and args.dataloader_persistent_workers:
            self._eval_dataloaders[dataloader_key] = loader
        return loader

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        if dataset is None or not has_length(dataset):
            return None
        if is_overfit_run(self):
            return SequentialSampler(dataset)
        return make_train_sampler(self.args, dataset, self.processing_class)

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        if eval_dataset is None or not has_length(eval_dataset):
            return None
        return make_evaluation_sampler(self.args, eval_dataset, self.processing_class)

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            self._signature_columns = find_accepted_columns(self.model, self.label_names, self.args.signature_columns)

    def _get_signature_columns(self) -> list[str]:
        self._set_signature_columns_if_needed()
        return self.args.signature_columns or self._signature_columns or []

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        if not self.args.remove_unused_columns:
            return dataset
        accepted = self._get_signature_columns()
        model = None if self.args.signature_columns else self.model
        trimmed = drop_extra_columns(dataset, accepted, model, description)
        names, model_name = [name for name in dataset.column_names if name not in accepted], type(self.model).__name__
        self._dropped_columns[description] = DroppedColumns(names, description, model and model_name, accepted)
        warn_about_dropped_lengths(self.args, dataset, trimmed)
        return trimmed

    def _get_collator_with_removed_columns(
        self, data_collator: Callable[[list[Any]], Any], description: str | None = None
    ) -> Callable[[list[Any]], Any]:
        if not self.args.remove_unused_columns:
            return data_collator
        accepted = self._get_signature_columns()
        model_name = None if self.args.signature_columns else type(self.model).__name__
        collator = RemoveColumnsCollator(data_collator, accepted, logger, model_name, description)
        self._dropped_columns[description] = DroppedColumns(collator.dropped, description, model_name, accepted)
        return collator

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> torch.Tensor | int | None:
        if not self.session.loss_reduction.is_known and self.args.loss_normalization == EXACT:
            self.session.loss_reduction = detect_loss_reduction(
                self, self.model_wrapped or self.model, batch_samples, device
            )
        return loss.items_in_window(self, batch_samples, device)

    # ---- Optimizer and schedule --------------------------------------------------------------------------------------

    def _require_optimizer(self) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise ValueError("There is no optimizer yet: train() creates it when it begins, or create_optimizer().")
        return self.optimizer

    def _create_optimizer_and_schedule(self, max_steps: int) -> tuple[Any, Any]:
        if self.is_deepspeed_enabled:
            from littrainer.strategies.deepspeed import create_engine

            overridden = self._find_overrides("create_optimizer", "create_scheduler")
            return create_engine(self, max_steps, overridden)
        # The schedule of an earlier train() may have a different length.
        if self._created_lr_scheduler:
            self.lr_scheduler = None
            self._created_lr_scheduler = False
        if self.model_wrapped is not self.model and is_wrapped_by_trainer(self.model_wrapped, self.model):
            # As in transformers, no time is counted for a wrapped model.
            self.model_preparation_time = 0.0
        # An override that creates both is called before wrapping; a schedule alone may need the wrapped model.
        if self._find_overrides("create_optimizer_and_scheduler"):
            self.create_optimizer_and_scheduler(num_training_steps=max_steps)
            wrapped = wrap_for_training(self, self._wrap_model)
        else:
            self.create_optimizer()
            wrapped = wrap_for_training(self, self._wrap_model)
            self.create_scheduler(num_training_steps=max_steps)
        self.model_wrapped = wrapped
        # A subclass's wrapper is for training only.
        self._model_is_prepared = is_wrapped_by_trainer(self.model_wrapped, self.model)
        return self.optimizer, self.lr_scheduler

    def _get_learning_rate(self) -> float:
        if is_metric_driven(self.lr_scheduler) or self.is_schedule_overridden:
            rate = self._require_optimizer().param_groups[0]["lr"]
        else:
            rate = self.lr_scheduler.get_last_lr()[0]
        return rate.item() if isinstance(rate, torch.Tensor) else rate

    # ---- Training ----------------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Create `accelerator` and read its settings."""
        self.accelerator = AcceleratorFacade(self.args)
        # Some subclasses set `accelerator.gather` during a loop.
        self._reset_gather_function()
        update_deepspeed(self.args)
        self.is_deepspeed_enabled = has_deepspeed(self.args)
        self.is_fsdp_enabled = get_sharding_plan(self.args) is not None

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: TrainingArguments | None = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: Sequence[str] | None = None,
    ) -> TrainOutput:
        return session.train_with_batch_size(self, batch_size, resume_from_checkpoint, trial, ignore_keys_for_eval)

    def _update_auto_batch_size(self, batch_size: int) -> None:
        self._train_batch_size = batch_size
        if not self.is_deepspeed_enabled:
            self.model_wrapped = self.model

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        assert self.training_run is not None
        start = self.training_run.reset_state()
        if resume_from_checkpoint is not None:
            self._load_callback_state()
        return start

    def _finalize_training(self, trial: Any, num_train_samples: float, start_time: float) -> TrainOutput:
        assert self.training_run is not None
        self.session.checkpoints.wait()
        output = self.training_run.finish(num_train_samples, start_time)
        args = self.args
        best = self.state.best_model_checkpoint
        if args.load_best_model_at_end and best is not None:
            with raise_on_all_ranks("loading the best model"):
                self._load_best_model()
        self.session.checkpoints.delete_all_but_best(args, self._get_output_dir(trial), best)
        self.control = self.callback_handler.on_train_end(args, self.state, self.control)
        if args.push_to_hub:
            run_with_keepalive(self._finish_current_push)
            push_error = broadcast_object(getattr(self.push_in_progress, "failure_at_end", None))
        else:
            self._finish_current_push()
            push_error = getattr(self.push_in_progress, "failure_at_end", None)
        if push_error is not None:
            output.metrics["push_to_hub_error"] = push_error
        # Record a signal received after the last step, for the script to read.
        self.preemption.sync_signal()
        return output

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        self.push_in_progress = push_save(self, checkpoint_folder)

    def _finish_current_push(self) -> None:
        finish_pushes(self.push_in_progress)

    def _finish_earlier_pushes(self) -> PushInProgress:
        self._finish_current_push()
        self.push_in_progress = get_pushes(self.args, self.push_in_progress)
        return self.push_in_progress

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        if self.is_deepspeed_enabled and not training:
            from littrainer.strategies.deepspeed import create_evaluation_engine

            create_evaluation_engine(self)
        return model

    def _forward_for_training(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None
    ) -> torch.Tensor:
        speed = self.session.speed
        set_training_mode(model)
        if callable(train_mode := getattr(self.optimizer, "train", None)):
            train_mode()
        speed.enter("to_device")
        inputs = self._prepare_inputs(inputs)
        speed.enter("forward")
        step = self.state.global_step
        args = self.args
        keywords = {"return_outputs": True} if args.log_loss_terms else {}
        compute_loss: Callable[..., Any] = self.compute_loss
        # With `auto_micro_batch` the number of passes differs between processes.
        is_trial = self.hp_search_backend is not None and not args.auto_micro_batch
        if is_trial or args.auto_find_batch_size:
            compute_loss = sync_forward_failures(args, step - self.session.first_step, is_trial)(compute_loss)
        with self.compute_loss_context_manager():
            value = compute_loss(model, inputs, num_items_in_batch=num_items_in_batch, **keywords)
        if args.log_loss_terms:
            value, _ = self.session.tracked.add_loss_terms(value)
        if args.torch_empty_cache_steps is not None and step % args.torch_empty_cache_steps == 0:
            empty_device_cache()
        return loss.scale_for_accumulation(self, value, num_items_in_batch)

    def _prepare_inputs(self, inputs: Any) -> Any:
        inputs = self._prepare_input(inputs)
        if not hasattr(inputs, "__len__"):
            raise make_unnamed_batch_error(inputs, self.model)
        if len(inputs) == 0:
            raise make_empty_batch_error(self._dropped_columns.values(), self._get_signature_columns(), self.model)
        return inputs

    def _prepare_input(self, data: Any) -> Any:
        if isinstance(data, torch.Tensor):
            if self.is_deepspeed_enabled:
                from littrainer.strategies.deepspeed import cast_to_engine_dtype

                data = cast_to_engine_dtype(self.args, data)
            if data.device == self.args.device:
                return data
            config: Any = self.args.accelerator_config
            return data.to(self.args.device, non_blocking=getattr(config, "non_blocking", False))
        if isinstance(data, (dict, Mapping)):  # A `dict` is recognized faster than a `Mapping`.
            kind: Any = type(data)
            return kind({name: self._prepare_input(value) for name, value in data.items()})
        if isinstance(data, (tuple, list)):
            return type(data)(self._prepare_input(value) for value in data)
        return data

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        if self._has_mixed_mesh_grads(model):
            return self._mixed_mesh_grad_norm(model, self.args.max_grad_norm)
        parameters = list_parameters(model)
        # DDP shares its parameters with the model.
        inner = model.module if type(model) is nn.parallel.DistributedDataParallel else model
        self.session.clipped_parameters = parameters if inner is self.model else None
        return self.accelerator.clip_grad_norm_(parameters, self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if grad_norm is not None:
            return grad_norm
        # An infinite bound only computes the norm.
        if self._has_mixed_mesh_grads(model):
            return self._mixed_mesh_grad_norm(model, float("inf"))
        return self.accelerator.clip_grad_norm_(list_parameters(model), float("inf"))

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        # Sharding does not change during a training.
        if self.session.has_mixed_mesh_grads is None:
            self.session.has_mixed_mesh_grads = is_on_several_meshes(list_parameters(model))
        return self.session.has_mixed_mesh_grads

    def _mixed_mesh_grad_norm(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        return clip_gradient_norm(model.parameters(), max_norm)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if self.args.include_num_input_tokens_seen != "no":
            processing_class, copies = self.processing_class, self._get_batch_copies()
            number = self.session.tokens.count(inputs, self.args, self.model, processing_class, copies)
            self.state.num_input_tokens_seen += number

    def _maybe_log_save_evaluate(
        self,
        tr_loss: torch.Tensor,
        grad_norm: Any,
        model: nn.Module,
        trial: Any,
        epoch: float,
        ignore_keys_for_eval: Sequence[str] | None,
        start_time: float | None = None,
        learning_rate: float | None = None,
    ) -> None:
        state, summed, preemption, speed = self.state, self.session.loss, self.preemption, self.session.speed
        if self.control.should_log and state.global_step > summed.step_of_last_log:
            rate = self._get_learning_rate() if learning_rate is None else learning_rate
            logs = log_eval_save.collect_logs(summed, tr_loss, state.global_step, grad_norm, rate)
            logs.update(self.session.tracked.take(self.args.device))
            self.store_flos()
            logs.update(speed.logs(state, self.control))
            self.log(logs, start_time)
        if self.control.should_evaluate and preemption.stop_signal is None:
            with part_of_training(EVALUATION), preemption.interruptible_evaluation(state):
                metrics = self._evaluate(trial, ignore_keys_for_eval)
                is_new_best = self._determine_best_metric(metrics=metrics, trial=trial)
                log_eval_save.update_save_flag(self.args, state, self.control, is_new_best)
        preemption.request_save_and_stop(state, self.control)
        if not self.control.should_save:
            return
        speed.enter("save")
        with part_of_training(SAVE):
            self._save_in_training(model, trial)

    def _save_in_training(self, model: nn.Module, trial: Any) -> None:
        checkpoints = self.session.checkpoints
        if checkpoints.is_async and checkpoints.can_save_async(self._build_state_io()):
            if self.hp_search_backend is None and trial is None:
                self.store_flos()
            checkpoints.save_in_background(self._build_save_request(self._get_output_dir(trial=trial)))
            self.control.should_save = False
            return
        self._save_checkpoint(model, trial)
        with raise_on_all_ranks("on_save of callbacks"):
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        checkpoints.finish_save()

    def _on_background_save_done(self, folder: str, state: TrainerState) -> None:
        checkpoints = self.session.checkpoints
        should_save_again = self.control.should_save
        with raise_on_all_ranks(f"on_save of callbacks for {folder}"):
            self.control = self.callback_handler.on_save(self.args, state, self.control)
        self.control.should_save = self.control.should_save or should_save_again
        if checkpoints.is_writer(self.args, Path(folder).parent):
            checkpoints.finish_save(folder)
        if self.args.push_to_hub:
            self._push_from_checkpoint(folder)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        return log_eval_save.update_best_metric(self.args, self.state, metrics)

    # ---- Evaluation --------------------------------------------------------------------------------------------------

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: Sequence[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        with run_lightning.group_validations(self):
            evaluate = functools.partial(self.evaluate, ignore_keys=ignore_keys_for_eval)
            metrics = log_eval_save.evaluate_in_training(self.args, self.state.global_step, evaluate)
        self._report_to_hp_search(trial, self.state.global_step, metrics)
        if is_metric_driven(self.lr_scheduler) and not skip_scheduler:
            step_on_metric(self.lr_scheduler, metrics, self.args.metric_for_best_model)
        return metrics

    def _predict_batch(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Sequence[str] | None
    ) -> tuple[Any, Any, Any]:
        if not hasattr(inputs, "keys"):
            raise make_unnamed_batch_error(inputs, model, override="prediction_step")
        label_names = self.label_names
        has_loss = prediction.can_compute_loss(inputs, label_names, self.can_return_loss)
        inputs = self._prepare_inputs(inputs)
        if ignore_keys is None:
            ignore_keys = prediction.get_ignored_outputs(self.model)

        labels = None
        if has_loss:
            # Before the forward pass, since `compute_loss` may remove labels from the inputs.
            labels = prediction.extract_labels(inputs, label_names)
            num_items = self._get_num_items_in_batch([inputs], self.args.device)

        value = None
        with torch.no_grad(), self.compute_loss_context_manager():
            if has_loss:
                value, outputs = prediction.compute_loss(self, model, inputs, num_items, prediction_loss_only)
            else:
                outputs = model(**inputs)

        if prediction_loss_only:
            return value, None, None
        compared = None
        if self.compute_metrics is not None and self.preprocess_logits_for_metrics is None:
            compared = label_names
        return value, prediction.extract_logits(outputs, ignore_keys, labels, has_loss, compared), labels

    def _prepare_model_for_evaluation(self) -> nn.Module:
        """Return the model for evaluations on its device; outside of training cast it if so configured."""
        model = self._wrap_model(self.model, training=False)
        if not self._model_is_prepared and model is self.model:
            start_time = time.time()
            move_to_device(self.model, self.args)
            model = autocast_and_compile(self.model, self.args)
            # Keep FSDP 1's wrapper, which the training uses.
            if model is not self.model and not is_sharded(self.model_wrapped):
                self.model_wrapped = model
            self.model_preparation_time = round(time.time() - start_time, 4)
            self._model_is_prepared = True
        if not self.is_in_train:
            for name, dtype in (("fp16_full_eval", torch.float16), ("bf16_full_eval", torch.bfloat16)):
                if getattr(self.args, name):
                    self.model.to(dtype=dtype)
                    move_to_device(self.model, self.args)
        is_flat = model is self.model and is_a(self.model_wrapped, "flat sharded module")
        return self.model_wrapped if is_flat else model

    def overrides_evaluation(self) -> bool:
        """Return whether a subclass or this instance overrides the evaluation, whose metrics may have other names."""
        return bool(self._find_overrides("evaluate", "evaluation_loop", "_evaluate"))

    _find_overrides = find_overrides

    def _reset_gather_function(self) -> None:
        gather = self.accelerator.gather_for_metrics
        self.gather_function = partial(gather, use_gather_object=self.args.eval_use_gather_object)

    def _evaluate_datasets(
        self,
        datasets: dict[str, Any],
        are_named: bool,
        ignore_keys: Sequence[str] | None,
        prefix: str,
        **gen_kwargs: Any,
    ) -> dict[str, float]:
        metrics: dict[str, float] = {}
        with run_lightning.group_validations(self):
            for name, dataset in datasets.items():
                keywords = {"ignore_keys": ignore_keys, "metric_key_prefix": f"{prefix}_{name}", **gen_kwargs}
                metrics.update(self.evaluate(name if are_named else dataset, **keywords))
        return metrics

    def _add_speed_metrics(self, output: EvalLoopOutput, prefix: str, start_time: float) -> dict[str, float]:
        metrics = output.metrics if output.metrics is not None else {}
        num_samples = output.num_samples or 0
        start_time += metrics.get(f"{prefix}_model_preparation_time", 0.0)
        steps = math.ceil(num_samples / (self.args.eval_batch_size * self.args.world_size))
        if find_length_groups(self.callback_handler.eval_dataloader) is not None:
            steps = len(self.callback_handler.eval_dataloader)
        metrics.update(speed_metrics(prefix, start_time, num_samples=num_samples, num_steps=steps))
        return metrics

    # ---- Saving and loading ------------------------------------------------------------------------------------------

    def _write_model(self, output_dir: str | None, is_internal: bool) -> None:
        if self.is_deepspeed_enabled and cast(Any, self.args.hf_deepspeed_config).is_zero3():
            # The engine gathers the sharded parameters.
            from littrainer.strategies.deepspeed import create_evaluation_engine

            create_evaluation_engine(self)
        state_io = self._build_state_io()
        # A push saves the full model to output_dir by an internal call too.
        is_in_checkpoint = is_internal and output_dir is not None
        write = state_io.save_checkpoint_model if is_in_checkpoint else state_io.save_model
        with part_of_training(SAVE), run_lightning.swap_in_weights_for("save", self.lightning_module):
            folder = self.args.output_dir if output_dir is None else output_dir
            folder = folder if is_in_checkpoint else local_folder(os.fspath(folder))
            write(folder)
        if not is_in_checkpoint and self.args.should_save:
            upload_files(folder)

    def _write_model_card(self, parameters: dict[str, Any]) -> None:
        model = self.accelerator.unwrap_model(self.model)
        dataset = self.train_dataset if self.eval_dataset is None else self.eval_dataset
        badges = collect_badges(self.callback_handler.callbacks)
        write_card(self.args, self.state, model, dataset, badges, parameters)
        upload_files(self.args.output_dir)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        folder = self.args.output_dir if output_dir is None else output_dir
        self.session.checkpoints.get_writer(folder).write_model(self.model, state_dict)
        write_tokenizer_and_args(folder, self.args, self._get_processing_class_to_save())

    def _get_processing_class_to_save(self) -> Any:
        return self.processing_class or getattr(self.data_collator, "tokenizer", None)

    def _get_output_dir(self, trial: Any) -> str:
        return search_trial.get_trial_folder(self.session.search, self.args.output_dir, trial)

    def _build_state_io(self) -> FullStateIO:
        return choose_state_io(
            TrainingObjects(
                self.args,
                self.model,
                self.optimizer,
                self.model_wrapped,
                self.deepspeed,
                self._get_processing_class_to_save(),
                self._save,
                self._issue_warnings_after_load,
                self.session.checkpoints.get_writer,
            )
        )

    def _build_save_request(self, run_dir: str | None = None) -> SaveRequest:
        run_dir = self._get_output_dir(trial=self._trial) if run_dir is None else run_dir
        callbacks = [*self.callback_handler.callbacks, self.control]
        record = None if self.training_run is None else self.training_run.resume_record
        weights = partial(run_lightning.swap_in_weights_for, "save", self.lightning_module)
        when_complete = self._on_background_save_done
        return SaveRequest(self, self.args, self.state, run_dir, callbacks, record, weights, when_complete)

    def _save_checkpoint(self, model: nn.Module, trial: Any, metrics: dict[str, float] | None = None) -> None:
        # Passed only by callers written for transformers 4; otherwise metrics are compared before.
        if metrics is not None:
            self._determine_best_metric(metrics=metrics, trial=trial)
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        folder = self.session.checkpoints.save(self._build_save_request(self._get_output_dir(trial=trial)))
        if self.args.push_to_hub:
            self._push_from_checkpoint(folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._build_state_io().save_training_state(Path(output_dir))
        if self.args.should_save and not getattr(self.lr_scheduler, "is_saved_by_engine", False):
            self.session.checkpoints.get_writer(output_dir).write_objects(
                {SCHEDULER_NAME: self.lr_scheduler.state_dict()}
            )

    def _save_scaler(self, output_dir: str) -> None:
        if self.args.should_save and self.accelerator.scaler is not None:
            self.session.checkpoints.get_writer(output_dir).write_objects(
                {SCALER_NAME: self.accelerator.scaler.state_dict()}
            )

    def _save_rng_state(self, output_dir: str) -> None:
        self.session.checkpoints.get_writer(output_dir).write_objects({random_state_name(self.args): get_rng_states()})

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        logger.info(f"Loading model from {resume_from_checkpoint}.")
        target = self.model if model is None else model
        self._build_state_io().load_model(target, Path(resume_from_checkpoint), to_resume=True)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        log_key_mismatch(load_result)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self._build_state_io().load_training_state(Path(checkpoint))
            reader.load_scheduler(self.lr_scheduler, len(self._require_optimizer().param_groups), Path(checkpoint))

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            reader.load_scaler(self.accelerator.scaler, Path(checkpoint))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            reader.load_random_states(Path(checkpoint), self.args)

    def _load_callback_state(self) -> None:
        states = self.state.stateful_callbacks
        if self.args.restore_callback_states_from_checkpoint:
            self.control = restore_callbacks(self.callback_handler, states, self.control)
        # A rollback discards the evaluations that were counted after the checkpoint.
        elif getattr(self.args, "_restores_patience", False) or self.session.health.rollback_counts:
            restore_patience(self.callback_handler.callbacks, states)

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        logger.info(f"Loading best model from {self.state.best_model_checkpoint} (score: {self.state.best_metric}).")
        folder = Path(self.state.best_model_checkpoint)
        state_io = self._build_state_io()
        if state_io.has_weights(folder):
            state_io.load_model(self.model, folder, to_resume=False)
            show_loaded_checkpoint(self.args, self.state)
        else:
            logger.warning(f"The best model, {folder}, has no weights to load: the model keeps those of the last step.")

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        move_model(model, device)

    # ---- Hyperparameter search ---------------------------------------------------------------------------------------

    def _hp_search_setup(self, trial: Any) -> None:
        search_trial.set_up_trial(self, trial)

    def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
        pruned = search_trial.report(self.session.search, trial, step, metrics)
        if pruned is not None:
            self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
            raise pruned
        if trial is not None and self.hp_search_backend == HPSearchBackend.RAY:
            from littrainer.search.ray_backend import report_to_ray

            report_to_ray(self, metrics, self._tune_save_checkpoint)

    def release_training_memory(self) -> None:
        """Free the objects of a training, and empty the device's cache."""
        self.session = self.session.copy_without_training()
        self.model = self.model_wrapped = None
        for name in ("model", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader"):
            setattr(self.callback_handler, name, None)
        # This also collects Lightning's reference cycles.
        self.accelerator.clear()
        empty_device_cache()

    def _tune_save_checkpoint(self, checkpoint_dir: str) -> None:
        # The state's best checkpoint does not change.
        self.store_flos()
        request = self._build_save_request(checkpoint_dir)
        self.session.checkpoints.write(request, request.folder, with_optimizer=True)
