"""`Trainer`: the documented methods. Each is short, and hands its work to the package that does it."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from littrainer import session
from littrainer.arguments.training_arguments import TrainingArguments
from littrainer.callbacks.handler import CallbackHandler, DefaultFlowCallback, callbacks_in_list, popped
from littrainer.callbacks.lightning_callbacks import add_lightning_callback, has_progress_bar, remove_lightning_callback
from littrainer.callbacks.progress import PrinterCallback, default_progress_callback
from littrainer.callbacks.state import TrainerControl, TrainerState, is_exportable
from littrainer.checkpoint.layout import TRAINER_STATE_NAME, make_output_dir
from littrainer.checkpoint.remote import send_files
from littrainer.checkpoint.run_record import facts_of_run, write_run_record
from littrainer.compat.trainer_attributes import TrainerAttributes
from littrainer.compat.v4_trainer import EarlierTrainerMembers, accepts_earlier_keywords
from littrainer.data.collators import default_collator_for
from littrainer.data.columns import DroppedColumns, naming_dropped_columns
from littrainer.data.loaders import count_examples
from littrainer.distributed.collectives import raise_on_all_ranks, sum_across_processes
from littrainer.distributed.layout import follow_model, tensor_parallel_size
from littrainer.evaluation.loop import EvaluationLoop
from littrainer.evaluation.prediction import predict_batch
from littrainer.evaluation.results import EvalLoopOutput, PredictionOutput, TrainOutput, speed_metrics
from littrainer.hooks import NO_CONTEXT, TrainerHooks
from littrainer.hub.model_card import Texts, collect_badges, write_card
from littrainer.hub.push_to_hub import END_OF_TRAINING, get_pushes, push_model
from littrainer.hub.repository import make_repository
from littrainer.lightning.conversion import checkpoint_of_trainer
from littrainer.lightning.lightning_extras import LightningExtras
from littrainer.lightning_adapter import run_lightning
from littrainer.loop import checks, loss, reports
from littrainer.loop.development_run import pushes_by_itself, trackers_reported_to
from littrainer.loop.overrides import accept_earlier_signatures, of_the_package, refuse_ignored_overrides
from littrainer.loop.plan import plan_training
from littrainer.loop.preemption import listed_callbacks
from littrainer.loop.reports import CONSTRUCTION, MemoryReport
from littrainer.model.facts import parameters_without_embeddings
from littrainer.optim.optimizers import build_optimizer, optimizer_class_and_keywords
from littrainer.optim.parameter_groups import decayed_parameter_names, parameter_groups
from littrainer.optim.schedules import get_scheduler
from littrainer.redirection.redirect import collect_garbage_as_usual
from littrainer.runtime.notes import EVALUATION, SAVE, part_of_training
from littrainer.runtime.remote_folder import local_folder
from littrainer.runtime.tracebacks import ShortTraceback
from littrainer.search import searching
from littrainer.search.record import BestRun
from littrainer.strategies.shards import free_gathered
from littrainer.tracking.lightning_loggers import adopt_loggers
from littrainer.tracking.selection import trackers_for

if TYPE_CHECKING:
    from littrainer.check.findings import CheckReport

logger = logging.getLogger(__name__)

DEFAULT_CALLBACKS: list[type] = [DefaultFlowCallback]
DEFAULT_PROGRESS_CALLBACK: type = default_progress_callback()


@of_the_package
class Trainer(LightningExtras, TrainerHooks, TrainerAttributes, EarlierTrainerMembers):
    """Trains and evaluates a model on Lightning, with the interface and the numbers of transformers' Trainer.

    Parameters:
        model: the module to train; its forward returns the loss under `"loss"` or as first element of a tuple.
        args: how to train; by default `TrainingArguments("tmp_trainer")`.
        data_collator: turns a list of samples into a batch; by default pads with `processing_class`, else stacks.
        train_dataset: map-style or iterable dataset.
        eval_dataset: one of these, or a dict of them by name.
        processing_class: tokenizer or processor, saved with the model.
        model_init: makes a new model at each `train()`; instead of `model`.
        compute_loss_func: takes outputs, labels and `num_items_in_batch`, returns the loss.
        compute_metrics: takes an `EvalPrediction`, returns a dict of metrics; or torchmetrics metrics, updated
            batch by batch (see `StreamingMetrics`).
        callbacks: Trainer callbacks, and Lightning callbacks, in one list.
        optimizers: optimizer and schedule to use instead of those that the arguments name.
        optimizer_cls_and_kwargs: optimizer class and keywords to use instead.
        preprocess_logits_for_metrics: applied to the logits (and labels) of each batch before they are kept.
        lightning: further keywords for `lightning.Trainer`, such as `profiler`.

    Raises:
        ValueError: parameters or arguments that contradict each other, or that this machine cannot carry out.
        TypeError: a parameter that is unknown or of another kind, such as the name of a model instead of a model.
        RuntimeError: no model, or optimizers together with what makes the model or the optimizer itself.
        NotImplementedError: an argument that is refused by name.
    """

    # Whether `compute_loss` already divides by the window; None: it does where `num_items_in_batch` reached the model.
    loss_is_scaled_for_ga: bool | None = None

    @accepts_earlier_keywords(tokenizer="processing_class")
    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., nn.Module] | None = None,
        compute_loss_func: Callable[..., torch.Tensor] | None = None,
        compute_metrics: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        lightning: dict[str, Any] | None = None,
    ):
        self.args = args = TrainingArguments(output_dir="tmp_trainer") if args is None else args
        checks.check_args(args)
        self.lightning_keywords = checks.checked_lightning_keywords(lightning)
        refuse_ignored_overrides(self)
        checks.check_arguments(args)
        checks.check_model_source(model, model_init)
        run_lightning.import_lightning()
        session.seed_everything(args)
        self.session.memory = MemoryReport(not args.skip_memory_metrics)
        self.session.memory.start(CONSTRUCTION)

        # The accelerator may depend on the model.
        self.model = model
        self.create_accelerator_and_postprocess()
        self.model_init = model_init
        self.model = self.call_model_init() if model is None else model
        follow_model(args, self.model)
        self.is_model_parallel = self._has_foreign_device_map()
        self.place_model_on_device = self._should_place_model()
        if self.place_model_on_device:
            self._move_model_to_device(self.model, args.device)
        if self.is_model_parallel:
            args._n_gpu = 1
        else:
            args._warn_of_idle_gpus()
        self.model_wrapped = self.model
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.processing_class = processing_class
        self.data_collator = data_collator or default_collator_for(processing_class)
        self.compute_loss_func, self.compute_metrics = compute_loss_func, compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer, self.lr_scheduler = checks.checked_optimizers(optimizers)
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs

        self._update_model_facts()
        with ShortTraceback():
            self._validate_args()

        self.lightning_callbacks = []
        self.callback_handler = CallbackHandler(
            DEFAULT_CALLBACKS, self.model, self.processing_class, self.optimizer, self.lr_scheduler
        )
        by_arguments = [*trackers_for(trackers_reported_to(self)), *listed_callbacks(self)]
        for callback in [*by_arguments, *callbacks_in_list(callbacks)]:
            # An override of add_callback hears of the callback that shows progress, and of what is added later.
            Trainer.add_callback(self, callback)
        if not has_progress_bar(self.lightning_callbacks, args):
            self.add_callback(PrinterCallback if args.disable_tqdm else DEFAULT_PROGRESS_CALLBACK)
        adopt_loggers(self, self.callback_handler)
        if pushes_by_itself(self):
            with raise_on_all_ranks("creating the repository on the Hub"):
                self.init_hf_repo()
        with raise_on_all_ranks(f"creating output_dir={args.output_dir}"):
            if args.should_save:
                make_output_dir(args.output_dir)

        self.control = TrainerControl()
        exportable = [*self.callback_handler.callbacks, self.control]
        self.state = TrainerState(
            is_local_process_zero=self.is_local_process_zero(),
            is_world_process_zero=self.is_world_process_zero(),
            stateful_callbacks=list(filter(is_exportable, exportable)),
        )
        self.current_gradient_accumulation_steps = args.gradient_accumulation_steps
        self.model_preparation_time = None
        self._signature_columns = None
        self._dropped_columns = {}
        self._train_batch_size = args.train_batch_size
        self._parameters_without_embeddings = None
        self.control = self.callback_handler.on_init_end(args, self.state, self.control)
        config: Any = getattr(self.model, "config", None)
        if config is not None:
            config.use_cache = args.use_cache
        self.session.memory.stop(CONSTRUCTION)
        collect_garbage_as_usual()

    def _validate_args(self) -> None:
        checks.check_construction(self)

    # ---- Data -------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """The training DataLoader; override to bring your own.

        Raises:
            ValueError: there is no train_dataset.
        """
        if self.train_dataset is None:
            raise ValueError("train() needs a train_dataset: pass one to the Trainer.")
        checks.check_is_dataset(self.train_dataset, "train_dataset", "get_train_dataloader")
        return self._get_dataloader(
            dataset=self.train_dataset,
            description="Training",
            is_training=True,
            sampler_fn=self._get_train_sampler,
            batch_size=self._train_batch_size,
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The evaluation DataLoader; override to bring your own.

        Parameters:
            eval_dataset: a dataset, or the name of one in a dict of `eval_dataset`s; by default the Trainer's.

        Raises:
            ValueError: there is no eval_dataset, or a dict of them and none is named.
            KeyError: none has that name.
        """
        # A dataset that is given just for once has no loader to be kept.
        is_own = eval_dataset is None or eval_dataset is self.eval_dataset
        key = "eval" if is_own else eval_dataset if isinstance(eval_dataset, str) else None
        if self.args.dataloader_persistent_workers and key in self._eval_dataloaders:
            return self._eval_dataloaders[key]
        dataset = checks.chosen_eval_dataset(self.eval_dataset, eval_dataset)
        checks.check_not_empty(dataset, "eval_dataset")
        return self._get_dataloader(
            dataset=dataset,
            description="Evaluation",
            dataloader_key=key,
            sampler_fn=self._get_eval_sampler,
            batch_size=self.args.eval_batch_size,
        )

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The DataLoader of `predict()`; override to bring your own.

        Parameters:
            test_dataset: a map-style or iterable dataset.

        Raises:
            ValueError: the dataset is None or empty.
        """
        if test_dataset is None:
            raise ValueError("predict() needs a test_dataset, and was given None: pass a dataset.")
        checks.check_is_dataset(test_dataset, "test_dataset", "get_test_dataloader")
        checks.check_not_empty(test_dataset, "test_dataset")
        return self._get_dataloader(
            dataset=test_dataset,
            description="test",
            sampler_fn=self._get_eval_sampler,
            batch_size=self.args.eval_batch_size,
        )

    def num_examples(self, dataloader: Any) -> int:
        """Samples in a loader, estimated from its length where its dataset has none.

        Parameters:
            dataloader: the loader to count.
        """
        return count_examples(dataloader, self.args.per_device_train_batch_size)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device | None = None
    ) -> tuple[list[Any], torch.Tensor | int | None]:
        """Draw the micro-batches of one optimizer step.

        Parameters:
            epoch_iterator: hands out the epoch's micro-batches.
            num_batches: micro-batches to draw.
            device: where the count of label tokens goes; by default that of the arguments.

        Returns:
            the micro-batches, fewer where the data ends, and their label tokens where the loss is divided by them.
        """
        window = list(itertools.islice(epoch_iterator, num_batches))
        return window, self._get_num_items_in_batch(window, self.args.device if device is None else device)

    # ---- Optimizer and schedule -------------------------------------------------------------------------------------

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Make the optimizer and the schedule; override this, or one of the two methods it calls.

        Parameters:
            num_training_steps: optimizer steps of the whole training.
        """
        self.create_optimizer()
        self.create_scheduler(num_training_steps=num_training_steps)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make the optimizer that the arguments name, unless there is one; norms and biases have no weight decay.

        Parameters:
            model: whose parameters it trains; by default the Trainer's.
        """
        if self.optimizer is None:
            model = self.model if model is None else model
            # Parameters that forward passes have gathered and kept would be trained instead of the shards.
            free_gathered(model)
            groups: Any = parameter_groups(model, self.get_decay_parameter_names(model), self.args.weight_decay)
            optimizer_class, keywords = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(
                self.args, model
            )
            self.optimizer = build_optimizer(model, groups, optimizer_class, keywords)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Make the schedule that the arguments name, unless there is one.

        Parameters:
            num_training_steps: optimizer steps of the whole training.
            optimizer: the optimizer it drives; by default the Trainer's.
        """
        if self.lr_scheduler is None:
            options: Any = self.args.lr_scheduler_kwargs
            self.lr_scheduler = get_scheduler(
                self.args.lr_scheduler_type,
                self._require_optimizer() if optimizer is None else optimizer,
                num_warmup_steps=self.args.get_warmup_steps(num_training_steps),
                num_training_steps=num_training_steps,
                scheduler_specific_kwargs=options,
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: nn.Module | None = None) -> tuple[Any, Any]:
        """The class and keywords of the optimizer that the arguments name.

        Parameters:
            args: `optim`, `optim_args`, `learning_rate` and the Adam settings count.
            model: needed by optimizers that treat parameters by name or layer.

        Raises:
            ValueError, ImportError: its settings cannot be read, or the library that has it is not installed.
        """
        return optimizer_class_and_keywords(args, model)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters that weight decay applies to: all but norms and biases.

        Parameters:
            model: whose parameters are named.
        """
        return decayed_parameter_names(model)

    # ---- Training ---------------------------------------------------------------------------------------------------

    @accepts_earlier_keywords(model_path="resume_from_checkpoint")
    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: Sequence[str] | None = None,
    ) -> TrainOutput:
        """Train the model as the arguments say.

        Parameters:
            resume_from_checkpoint: a checkpoint's folder; True for the newest intact one in `output_dir`; "auto" for
                that one or, if there is none, a fresh start, as a job needs that may be ended at any time; or a .ckpt
                that a `lightning.Trainer` wrote of a `TransformersModule`. None takes "auto" if the arguments say so.
            trial: the trial of a hyperparameter search.
            ignore_keys_for_eval: model outputs that evaluations during training leave out.

        Returns:
            optimizer steps done, the mean loss over them, and metrics of the whole training.

        Raises:
            ValueError: the data is missing, empty or of unknown length, or there is no such checkpoint.
        """
        with (
            ShortTraceback(),
            naming_dropped_columns(self),
            checkpoint_of_trainer(self, resume_from_checkpoint) as checkpoint,
        ):
            return session.train(self, checkpoint, trial, ignore_keys_for_eval)

    def check(self) -> CheckReport:
        """Find out what would fail late in a training; afterwards `train()` has the same numbers as without.

        Returns:
            what passed, what would fail and when, memory and time of the whole training; print it for a page.

        Raises:
            RuntimeError: a training goes on, or there is no model.
            NotImplementedError: processes split the model; `littrainer check SCRIPT` checks such a training.
        """
        from littrainer.check.checking import TrainingCheck

        return TrainingCheck(self).run()

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Forward and backward pass of one micro-batch; override to change what a step does.

        Parameters:
            model: the model in training mode, as it is wrapped for several processes.
            inputs: the micro-batch, what the collator made.
            num_items_in_batch: label tokens in the whole window of the optimizer step.

        Returns:
            the detached loss, a tensor with one element, as it went into the backward pass.
        """
        scaled = self._forward_for_training(model, inputs, num_items_in_batch)
        # DeepSpeed would divide once more by the number of micro-batches.
        self.accelerator.backward(scaled, **({"scale_wrt_gas": False} if self.is_deepspeed_enabled else {}))
        return scaled.detach()

    def overrides_training_step(self) -> bool:
        """Whether a subclass, or this instance, has its own `training_step`, which calls backward itself."""
        return bool(self._find_overrides("training_step"))

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """The loss of a micro-batch; override for a loss of your own.

        Parameters:
            model: the model, as it is wrapped for several processes.
            inputs: the micro-batch, on the model's device.
            return_outputs: return the model's outputs too.
            num_items_in_batch: label tokens in the whole window; a loss summed over the micro-batch is divided by it.

        Returns:
            the loss, a tensor with one element; a pair of it and the outputs where they are asked for.

        Raises:
            ValueError: the model returns no loss.
        """
        value, outputs = loss.loss_and_outputs(self, model, inputs, num_items_in_batch)
        value = loss.scaled_for_mean_gradient(self, value, num_items_in_batch)
        return (value, outputs) if return_outputs else value

    def compute_loss_context_manager(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which losses are computed, with that of `autocast_smart_context_manager` in it."""
        stack, inner = contextlib.ExitStack(), self.autocast_smart_context_manager()
        if type(inner) is not contextlib.nullcontext:
            stack.enter_context(inner)
        return stack

    def autocast_smart_context_manager(
        self, cache_enabled: bool | None = True
    ) -> contextlib.AbstractContextManager[Any]:
        """A context for forward passes of your own precision; override it. Mixed precision needs none.

        Parameters:
            cache_enabled: as in `torch.autocast`.
        """
        return NO_CONTEXT

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: Any, total_train_batch_size: int | None = None
    ) -> tuple[int, int, int, float, int, int, int]:
        """The length of a training over a loader.

        Parameters:
            args: the Trainer's.
            dataloader: the training DataLoader.
            total_train_batch_size: samples of an optimizer step; by default what `get_total_train_batch_size` says.

        Returns:
            a `TrainingPlan`: epochs, optimizer steps of an epoch, samples of an epoch and of the training, samples of
            an optimizer step over all devices, micro-batches of an epoch, and optimizer steps of the training.
        """
        total = self.get_total_train_batch_size(args) if total_train_batch_size is None else total_train_batch_size
        return plan_training(self, dataloader, total, self.num_examples)

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Samples per optimizer step, over all processes.

        Parameters:
            args: whose accumulation and processes count.
        """
        copies = args.world_size // self.get_tp_size() // self.get_cp_size() // self.get_sp_size()
        return self._train_batch_size * args.gradient_accumulation_steps * copies

    def get_tp_size(self) -> int:
        """Processes that share one copy of the model by tensor parallelism; 1 if each has its own copy."""
        of_model = getattr(self.model, "_tp_size", None)
        return tensor_parallel_size(self.args) if of_model is None else of_model

    def get_cp_size(self) -> int:
        """Processes that share a sequence by context parallelism: 1, each has whole sequences."""
        return 1

    def get_sp_size(self) -> int:
        """Processes that share a sequence by sequence parallelism: 1, each has whole sequences."""
        return 1

    # ---- Evaluation and prediction ----------------------------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Sequence[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate on a dataset and log the metrics.

        Parameters:
            eval_dataset: a dataset, the name of one of the Trainer's, or a dict of them, whose names go into the
                metrics' names; by default the Trainer's.
            ignore_keys: model outputs that are no predictions.
            metric_key_prefix: prefix of the metrics' names.

        Returns:
            loss, metrics and speed (seconds, samples and batches per second), each name with the prefix, and the epoch
            during training.

        Raises:
            ValueError: there is no dataset, or it is empty.
            KeyError: none of the Trainer's has that name.
        """
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(chosen, dict):
            return self._evaluate_datasets(chosen, eval_dataset is None, ignore_keys, metric_key_prefix)
        with (
            ShortTraceback(),
            part_of_training(EVALUATION),
            run_lightning.validation_round(self),
            naming_dropped_columns(self),
            self.session.memory.measuring("eval"),
        ):
            dataloader = self.get_eval_dataloader(chosen)
            start_time = time.time()
            output = self.evaluation_loop(
                dataloader,
                description="Evaluation",
                prediction_loss_only=True if self.compute_metrics is None else None,
                ignore_keys=ignore_keys,
                metric_key_prefix=metric_key_prefix,
            )
            found = self._add_speed_metrics(output, metric_key_prefix, start_time)
            self.log(found)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, found)
            self.session.memory.stop("eval", found)
        return found

    def predict(
        self, test_dataset: Any, ignore_keys: Sequence[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predict a dataset; metrics are computed where it has labels.

        Parameters:
            test_dataset: a map-style or iterable dataset, with labels or without.
            ignore_keys: model outputs that are no predictions.
            metric_key_prefix: prefix of the metrics' names.

        Returns:
            predictions and labels as NumPy arrays of shape `(samples, ...)`, padded with -100 where batches differ in
            length, and metrics.

        Raises:
            ValueError: the dataset is None or empty.
        """
        with ShortTraceback(), naming_dropped_columns(self), self.session.memory.measuring("test"):
            dataloader = self.get_test_dataloader(test_dataset)
            start_time = time.time()
            output = self.evaluation_loop(
                dataloader, description="Prediction", ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix
            )
            metrics = self._add_speed_metrics(output, metric_key_prefix, start_time)
            self.control = self.callback_handler.on_predict(self.args, self.state, self.control, metrics)
            self.session.memory.stop("test", metrics)
        return PredictionOutput(output.predictions, output.label_ids, metrics)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: Sequence[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """The loop over a loader that `evaluate()` and `predict()` share.

        Parameters:
            dataloader: the batches.
            description: the name of the pass in logs, such as `"Evaluation"`.
            prediction_loss_only: keep the loss and no predictions; by default what the arguments say.
            ignore_keys: model outputs that are no predictions.
            metric_key_prefix: prefix of the metrics' names.
        """
        if prediction_loss_only is None:
            prediction_loss_only = self.args.prediction_loss_only
        accept_earlier_signatures(self)
        evaluation = EvaluationLoop(
            self,
            dataloader,
            description,
            prediction_loss_only,
            ignore_keys,
            metric_key_prefix,
            has_own_step=bool(self._find_overrides("prediction_step")),
        )
        with (
            run_lightning.validation_round(self),
            self.accelerator.evaluating(dataloader),
            self.session.tracked.paused(),
        ):
            run_lightning.shard_for_evaluation(self)
            evaluation.begin(self._prepare_model_for_evaluation())
            run_lightning.evaluate(self, evaluation)
            self._reset_gather_function()
            return evaluation.finish()

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: Sequence[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Loss, predictions and labels of one batch; override to change what a prediction is.

        Parameters:
            model: the model in evaluation mode.
            inputs: the batch, what the collator made.
            prediction_loss_only: nothing but the loss is wanted.
            ignore_keys: model outputs that are no predictions.

        Returns:
            a tensor with one element, and tensors of shape `(samples in the batch, ...)`, possibly nested; each is None
            if there is none.
        """
        return predict_batch(self, model, inputs, prediction_loss_only, ignore_keys)

    # ---- Saving and loading -----------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save model, configuration, processing class and arguments so that `from_pretrained` loads them.

        With `push_to_hub` the model is pushed too.

        Parameters:
            output_dir: the folder, or an address such as s3://bucket/model; by default `args.output_dir`.
        """
        if self.is_deepspeed_enabled and cast(Any, self.args.hf_deepspeed_config).is_zero3():
            # The engine puts a model together whose parameters it has sharded.
            from littrainer.strategies.deepspeed import start_for_evaluation

            start_for_evaluation(self)
        storage = self._build_state_io()
        # A push saves to output_dir by an internal call too, and wants the model whole.
        is_of_checkpoint = _internal_call and output_dir is not None
        write = storage.save_model_of_checkpoint if is_of_checkpoint else storage.save_model
        with part_of_training(SAVE), run_lightning.weights_to("save", self.lightning_module):
            folder = self.args.output_dir if output_dir is None else output_dir
            folder = folder if is_of_checkpoint else local_folder(os.fspath(folder))
            write(folder)
        if not is_of_checkpoint and self.args.should_save:
            send_files(folder)
        if pushes_by_itself(self) and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def save_state(self) -> None:
        """Write the trainer's state to trainer_state.json in `output_dir`, and its arguments to littrainer_run.json."""
        if self.is_world_process_zero():
            self.state.save_to_json(os.path.join(self.args.output_dir, TRAINER_STATE_NAME))
            # The weights are no longer those that a training began with, unless it noted them.
            facts = self.session.checkpoints.facts or facts_of_run(None, self.train_dataset, self.eval_dataset)
            write_run_record(self.args, self.args.output_dir, facts)
            send_files(self.args.output_dir)

    # ---- The Hub ----------------------------------------------------------------------------------------------------

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Create the repository that the model is pushed to, unless there is one; the first process does it.

        Parameters:
            token: access token with the right to write; by default `hub_token`, or the one that is logged in.
            private: whether a repository that is created is private; by default `hub_private_repo`.

        Raises:
            huggingface_hub.errors.HfHubHTTPError: the Hub refuses it; a note says what to do.
        """
        if self.is_world_process_zero():
            self.hub_model_id = make_repository(self.args, token, private)

    def push_to_hub(
        self,
        commit_message: str | None = END_OF_TRAINING,
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save the model to `output_dir`, write its card, and push what lies there to the Hub, but for checkpoints.

        Parameters:
            commit_message: of the commit.
            blocking: return when it has been pushed; else it is pushed in the background.
            token: access token with the right to write; by default `hub_token`, or the one that is logged in.
            revision: branch to push to, created if it does not exist; by default `hub_revision`, or the main one.
            private: whether a repository that is created is private; by default `hub_private_repo`.
            kwargs: what `create_model_card` takes.

        Returns:
            the commit, as the Hub's client describes it; where `blocking` is False a Future of it. None in all
            processes but the first.

        Raises:
            TypeError: `create_model_card` takes no such keyword.
            huggingface_hub.errors.HfHubHTTPError: the Hub refuses it; a note says what to do.
        """

        def finish_earlier() -> Any:
            self._finish_current_push()
            self.push_in_progress = get_pushes(self.args, self.push_in_progress)
            return self.push_in_progress

        return push_model(self, finish_earlier, commit_message, blocking, token, revision, private, **kwargs)

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: Texts = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: Texts = None,
        dataset_tags: Texts = None,
        dataset: Texts = None,
        dataset_args: Texts = None,
    ) -> None:
        """Write README.md, a draft of a model card, into `output_dir`; one that somebody has edited is kept.

        Parameters:
            language: ISO code of the data's language.
            license: by default that of the model which was fine-tuned, where the Hub can be asked.
            tags: further tags.
            model_name: title of the card; by default the name of the output folder.
            finetuned_from: the model that was fine-tuned; by default what the model's configuration says.
            tasks: the Hub's name of what the model does; by default found by the model's class.
            dataset_tags: names of the datasets on the Hub; by default what a dataset says of itself.
            dataset: names of the datasets for readers.
            dataset_args: the configuration of each dataset.

        Raises:
            ValueError: the Hub would refuse the metadata.
        """
        parameters = {name: value for name, value in locals().items() if name != "self"}
        if not self.is_world_process_zero():
            return
        model = self.accelerator.unwrap_model(self.model)
        evaluated_on = self.train_dataset if self.eval_dataset is None else self.eval_dataset
        write_card(
            self.args, self.state, model, evaluated_on, collect_badges(self.callback_handler.callbacks), parameters
        )
        send_files(self.args.output_dir)

    # ---- Logging ----------------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add values to the history and hand them to the callbacks.

        Parameters:
            logs: names and values; epoch and token counts are added to it.
            start_time: `time.time()` at the start of training, for tokens per second.
        """
        state = self.state
        if state.epoch is not None:
            logs["epoch"] = state.epoch
        if self.args.include_num_input_tokens_seen != "no":
            logs["num_input_tokens_seen"] = state.num_input_tokens_seen
            if start_time is not None:
                tokens_in_this_call = state.num_input_tokens_seen - self._initial_num_input_tokens_seen
                logs.update(speed_metrics("train", start_time, num_tokens=tokens_in_this_call))
        run_lightning.publish(self, logs)
        state.log_history.append({**logs, "step": state.global_step})
        self.control = self.callback_handler.on_log(self.args, state, self.control, logs)

    def track(self, name: str, value: torch.Tensor | float) -> None:
        """Log the mean of a value over each logging interval, next to the loss; evaluations do not count.

        Call it in `compute_loss` or a callback as often as wanted, and `littrainer.track` in a model's `forward`.

        Parameters:
            name: what it is logged as.
            value: one number, or a tensor with one, which stays on its device until the mean is logged.

        Raises:
            TypeError: the value is not one number.
            ValueError: the Trainer logs something else under this name.
        """
        self.session.tracked.add(name, value)

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Print metrics as a table, on the first process only.

        Parameters:
            split: `train`, `eval` or `test`, for the heading.
            metrics: numbers by name; `..._runtime` is in seconds.
        """
        if self.is_world_process_zero():
            reports.print_metrics(split, metrics)

    @staticmethod
    def metrics_format(metrics: dict[str, Any]) -> dict[str, Any]:
        """The metrics as `log_metrics` prints them.

        Parameters:
            metrics: numbers by name.

        Returns:
            times as `h:mm:ss.cc`, memory in MB, operations in GF, other numbers with four decimals.
        """
        return reports.metrics_format(metrics)

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Write metrics to `<split>_results.json` in `output_dir`, on the first process only.

        Parameters:
            split: `train`, `eval`, `test` or `all`.
            metrics: numbers by name.
            combined: add them to `all_results.json` too.
        """
        if self.is_world_process_zero():
            reports.save_metrics(self.args.output_dir, split, metrics, combined)
            send_files(self.args.output_dir)

    def store_flos(self) -> None:
        """Move the operations counted since the last call into the state."""
        self.state.total_flos += sum_across_processes(self.current_flos, self.args.device, self.get_tp_size())
        self.current_flos = 0

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Operations of forward and backward over a micro-batch: 6 for each token and parameter outside embeddings.

        (Kaplan et al. 2020, "Scaling laws for neural language models".) 0 for models that do not count parameters.

        Parameters:
            inputs: the micro-batch, whose tokens are counted in the model's main input.
        """
        main_input = getattr(self.model, "main_input_name", "input_ids")
        if main_input not in inputs or not hasattr(self.model, "num_parameters"):
            return 0
        if self._parameters_without_embeddings is None or not self.is_in_train:
            self._parameters_without_embeddings = parameters_without_embeddings(self.model)
        return 6 * inputs[main_input].numel() * self._parameters_without_embeddings

    # ---- Hyperparameter search --------------------------------------------------------------------------------------

    def hyperparameter_search(
        self,
        hp_space: Callable[[Any], dict[str, Any]] | None = None,
        compute_objective: Callable[[dict[str, float]], Any] | None = None,
        n_trials: int | None = 20,
        direction: str | Sequence[str] = "minimize",
        backend: Any = None,
        hp_name: Callable[[Any], str] | None = None,
        **kwargs: Any,
    ) -> BestRun | list[BestRun]:
        """Train with many sets of arguments and find the best one; afterwards the arguments are what they were.

        Parameters:
            hp_space: takes the trial, returns the arguments to set by name; by default learning rate, epochs, seed and
                micro-batch size.
            compute_objective: takes an evaluation's metrics, returns the number to optimize, or a list of them; by
                default the loss, or the sum of all metrics if there are any.
            n_trials: trainings to carry out; None, with Optuna, for as many as `timeout` allows, and without one
                until the study is stopped.
            direction: `minimize` or `maximize`; a list for several objectives.
            backend: `optuna`, `ray` or `wandb`; by default the first that is installed.
            hp_name: takes the trial, returns its name, which is that of its folder too; by default `run-<id>`.
            kwargs: with Optuna those of `create_study` and `Study.optimize`, with Ray Tune those of `tune.run`.

        Returns:
            the best trial, or those that no other surpasses if there are several objectives.

        Raises:
            RuntimeError: there is no model_init, the backend is not installed, or no trial was completed.
            ValueError, TypeError: the input is wrong, or what the functions return.
        """
        with ShortTraceback():
            found: Any = searching.hyperparameter_search(
                self, hp_space, compute_objective, n_trials, direction, backend, hp_name, **kwargs
            )
        return found

    # ---- Callbacks --------------------------------------------------------------------------------------------------

    def add_callback(self, callback: Any) -> None:
        """Add a callback; one of Lightning's kind joins with the next `train()`.

        Parameters:
            callback: a callback, or a class of which an instance is made.

        Raises:
            TypeError: it is neither a Trainer callback nor one of Lightning's.
        """
        if run_lightning.is_lightning_callback(callback):
            add_lightning_callback(self.lightning_callbacks, callback)
        else:
            self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove and return a callback; None if there is none.

        Parameters:
            callback: the callback, or a class of which the first one is taken.
        """
        if run_lightning.is_lightning_callback(callback):
            return popped(self.lightning_callbacks, callback)
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback.

        Parameters:
            callback: the callback, or a class of which the first one is taken.
        """
        if run_lightning.is_lightning_callback(callback):
            remove_lightning_callback(self.lightning_callbacks, callback)
        else:
            self.callback_handler.remove_callback(callback)

    # ---- Processes, devices and models ------------------------------------------------------------------------------

    def end(self) -> None:
        """Leave the process group, if there is one; the last call of a script."""
        self.accelerator.end_training()

    def is_local_process_zero(self) -> bool:
        """Whether this is the first process of its node."""
        return self.args.local_process_index == 0

    def is_world_process_zero(self) -> bool:
        """Whether this is the first process of all."""
        return self.args.process_index == 0

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Make a model with `model_init`, which takes the trial or nothing.

        Parameters:
            trial: the trial of a search; None outside of one.

        Raises:
            RuntimeError: `model_init` takes several parameters, or returned None.
        """
        assert self.model_init is not None
        parameters = len(inspect.signature(self.model_init).parameters)
        if parameters > 1:
            raise RuntimeError(
                f"model_init takes no parameter, or the trial; this one takes {parameters}: wrap it, as in "
                "lambda: make_model(...)."
            )
        model = self.model_init(trial) if parameters == 1 else self.model_init()
        if model is None:
            raise RuntimeError("model_init returned None; it has to return the model.")
        return model
