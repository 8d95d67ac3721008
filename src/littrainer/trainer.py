"""`Trainer` with its documented methods; each calls the package that does the work."""

from __future__ import annotations

import inspect
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from littrainer import session
from littrainer.arguments.training_arguments import TrainingArguments
from littrainer.callbacks.handler import DefaultFlowCallback, pop_matching
from littrainer.callbacks.lightning_callbacks import add_lightning_callback, remove_lightning_callback
from littrainer.callbacks.progress import default_progress_callback
from littrainer.checkpoint.layout import TRAINER_STATE_NAME, make_output_dir
from littrainer.checkpoint.remote import upload_files
from littrainer.checkpoint.run_record import describe_run, write_run_record
from littrainer.compat.trainer_attributes import TrainerAttributes
from littrainer.compat.v4_trainer import EarlierTrainerMembers, accept_earlier_keywords
from littrainer.data.collators import get_default_collator
from littrainer.data.columns import explain_dropped_columns
from littrainer.data.loaders import count_examples
from littrainer.distributed.collectives import raise_on_all_ranks, sum_across_processes
from littrainer.distributed.layout import set_layout_from_model, tensor_parallel_size
from littrainer.evaluation.loop import EvaluationLoop
from littrainer.evaluation.results import EvalLoopOutput, PredictionOutput, TrainOutput, speed_metrics
from littrainer.hooks import NO_CONTEXT, TrainerHooks
from littrainer.hub.model_card import Texts
from littrainer.hub.push_to_hub import END_OF_TRAINING, push_model
from littrainer.hub.repository import make_repository
from littrainer.lightning.conversion import convert_lightning_checkpoint
from littrainer.lightning.lightning_extras import LightningExtras
from littrainer.lightning_adapter import run_lightning
from littrainer.loop import checks, loss, reports
from littrainer.loop.fast_dev_run import should_push_automatically
from littrainer.loop.overrides import accept_earlier_signatures, refuse_ignored_overrides, register_package_class
from littrainer.loop.plan import plan_training
from littrainer.loop.reports import CONSTRUCTION, MemoryReport
from littrainer.model.facts import count_parameters_without_embeddings
from littrainer.optim.optimizers import build_optimizer, get_optimizer_class_and_keywords
from littrainer.optim.parameter_groups import get_decayed_parameter_names, parameter_groups
from littrainer.optim.schedules import get_scheduler
from littrainer.redirection.redirect import restore_gc_threshold
from littrainer.runtime.notes import EVALUATION, part_of_training
from littrainer.runtime.tracebacks import ShortTraceback
from littrainer.search import searching
from littrainer.search.record import BestRun
from littrainer.strategies.full_state import reshard_gathered
from littrainer.strategies.sequence_parallel import cut_sequences

if TYPE_CHECKING:
    from littrainer.check.findings import CheckReport

DEFAULT_CALLBACKS: list[type] = [DefaultFlowCallback]
DEFAULT_PROGRESS_CALLBACK: type = default_progress_callback()


@register_package_class
class Trainer(LightningExtras, TrainerHooks, TrainerAttributes, EarlierTrainerMembers):
    """A trainer and evaluator on Lightning, with the interface and the numbers of transformers' Trainer.

    Parameters:
        model: the module to train; its forward returns the loss under `"loss"` or as first element of a tuple.
        args: the settings; by default `TrainingArguments("tmp_trainer")`.
        data_collator: makes a batch of a list of samples; by default pads with `processing_class`, or else stacks.
        train_dataset, eval_dataset: map-style or iterable dataset; for evaluation also a dict of them by name.
        processing_class: tokenizer or processor, saved with the model.
        model_init: makes a new model at each `train()`; instead of `model`.
        compute_loss_func: takes outputs, labels and `num_items_in_batch`, returns the loss.
        compute_metrics: takes an `EvalPrediction`, returns a dict; or torchmetrics metrics (see `StreamingMetrics`).
        callbacks: Trainer callbacks and Lightning callbacks.
        optimizers, optimizer_cls_and_kwargs: optimizer and schedule, or class and keywords, not from the arguments.
        preprocess_logits_for_metrics: applied to logits and labels of each batch before they are stored.
        lightning: further keywords for `lightning.Trainer`, such as `profiler`.

    Raises:
        ValueError, TypeError, NotImplementedError: a parameter or an argument is invalid, or not supported here.
        RuntimeError: no model, or optimizers in addition to `model_init` or `optimizer_cls_and_kwargs`.

    Examples:
        >>> args = TrainingArguments("runs/first", max_steps=2, eval_strategy="steps", eval_steps=1)
        >>> trainer = Trainer(model, args, train_dataset=train_dataset, eval_dataset=eval_dataset)
        >>> trainer.train().global_step
        {'eval_loss': ...}
        2
    """

    @accept_earlier_keywords(tokenizer="processing_class")
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
        self.lightning_keywords = checks.validate_lightning_keywords(lightning)
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
        set_layout_from_model(args, self.model)
        self.is_model_parallel = self._has_foreign_device_map()
        self.place_model_on_device = self._should_place_model()
        if self.place_model_on_device:
            self._move_model_to_device(self.model, args.device)
        if self.is_model_parallel:
            args._n_gpu = 1
        else:
            args._warn_of_idle_gpus()
        self.model_wrapped = self.model
        self.train_dataset, self.eval_dataset, self.processing_class = train_dataset, eval_dataset, processing_class
        self.data_collator = data_collator or get_default_collator(processing_class)
        self.compute_loss_func, self.compute_metrics = compute_loss_func, compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer, self.lr_scheduler = checks.validate_optimizers(optimizers)
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs

        self._update_model_facts()
        with ShortTraceback():
            self._validate_args()
            # Overrides of add_callback are called only for the progress callback, and for callbacks added later.
            add_callback = partial(Trainer.add_callback, self)
            self._create_callbacks(DEFAULT_CALLBACKS, callbacks, add_callback, DEFAULT_PROGRESS_CALLBACK)
        if should_push_automatically(self):
            with raise_on_all_ranks("creating the repository on the Hub"):
                self.init_hf_repo()
        with raise_on_all_ranks(f"creating output_dir={args.output_dir}"):
            if args.should_save:
                make_output_dir(args.output_dir)

        self._create_state()
        self.current_gradient_accumulation_steps = args.gradient_accumulation_steps
        self._signature_columns, self._dropped_columns = None, {}
        self._train_batch_size = args.train_batch_size
        self.control = self.callback_handler.on_init_end(args, self.state, self.control)
        if (config := getattr(self.model, "config", None)) is not None:
            config.use_cache = args.use_cache
        self.session.memory.stop(CONSTRUCTION)
        restore_gc_threshold()

    # ---- Data -------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """Return the training DataLoader; override to supply another."""
        dataset, batch_size, sampler_fn = self.train_dataset, self._train_batch_size, self._get_train_sampler
        if dataset is None:
            raise ValueError("train() needs a train_dataset: pass one to the Trainer.")
        checks.check_is_dataset(dataset, "train_dataset", "get_train_dataloader")
        return self._get_dataloader(
            dataset=dataset, description="Training", is_training=True, sampler_fn=sampler_fn, batch_size=batch_size
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the evaluation DataLoader; override to supply another.

        Parameters:
            eval_dataset: a dataset, or a name in the Trainer's dict of datasets; by default the Trainer's dataset.
        """
        is_default = eval_dataset is None or eval_dataset is self.eval_dataset
        key = "eval" if is_default else eval_dataset if isinstance(eval_dataset, str) else None
        if self.args.dataloader_persistent_workers and key in self._eval_dataloaders:
            return self._eval_dataloaders[key]
        dataset = checks.select_eval_dataset(self.eval_dataset, eval_dataset)
        checks.check_not_empty(dataset, "eval_dataset")
        batch_size, sampler_fn = self.args.eval_batch_size, self._get_eval_sampler
        return self._get_dataloader(
            dataset=dataset, description="Evaluation", batch_size=batch_size, sampler_fn=sampler_fn, dataloader_key=key
        )

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return the DataLoader of `predict()`; override to supply another.

        Parameters:
            test_dataset: a map-style or iterable dataset.
        """
        if test_dataset is None:
            raise ValueError("predict() needs a test_dataset, and was given None: pass a dataset.")
        checks.check_is_dataset(test_dataset, "test_dataset", "get_test_dataloader")
        checks.check_not_empty(test_dataset, "test_dataset")
        batch_size, sampler_fn = self.args.eval_batch_size, self._get_eval_sampler
        return self._get_dataloader(
            dataset=test_dataset, description="test", batch_size=batch_size, sampler_fn=sampler_fn
        )

    def num_examples(self, dataloader: Any) -> int:
        """Return the number of samples in a loader, estimated from its length if its dataset has none.

        Parameters:
            dataloader: the loader.
        """
        return count_examples(dataloader, self.args.per_device_train_batch_size)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device | None = None
    ) -> tuple[list[Any], torch.Tensor | int | None]:
        """Return the micro-batches of the next optimizer step, and their label tokens if the loss is divided by them.

        Parameters:
            epoch_iterator, num_batches: the epoch's micro-batches, and the number to draw, fewer at the end.
            device: for the count of label tokens; by default the arguments' device.
        """
        window = list(itertools.islice(epoch_iterator, num_batches))
        return window, self._get_num_items_in_batch(window, self.args.device if device is None else device)

    # ---- Optimizer and schedule -------------------------------------------------------------------------------------

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Create optimizer and schedule; override this, or one of the two methods it calls.

        Parameters:
            num_training_steps: optimizer steps of the whole training.
        """
        self.create_optimizer()
        self.create_scheduler(num_training_steps=num_training_steps)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer that the arguments name, unless it exists; norms and biases have no weight decay.

        Parameters:
            model: the model to optimize; by default the Trainer's.
        """
        if self.optimizer is None:
            model = self.model if model is None else model
            # Otherwise parameters gathered by earlier forward passes would be trained.
            reshard_gathered(model)
            groups: Any = parameter_groups(model, self.get_decay_parameter_names(model), self.args.weight_decay)
            choice = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, model)
            self.optimizer = build_optimizer(model, groups, *choice)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Create the schedule that the arguments name, unless it exists.

        Parameters:
            num_training_steps, optimizer: optimizer steps of the whole training; by default the Trainer's optimizer.
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
        """Return class and keywords of the optimizer that the arguments name.

        Parameters:
            args, model: the arguments, and the model if the optimizer groups parameters by name or layer.

        Raises:
            ValueError, ImportError: its settings are invalid, or its library is not installed.
        """
        return get_optimizer_class_and_keywords(args, model)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the names of the parameters with weight decay: all except norms and biases.

        Parameters:
            model: the model.
        """
        return get_decayed_parameter_names(model)

    # ---- Training ---------------------------------------------------------------------------------------------------

    @accept_earlier_keywords(model_path="resume_from_checkpoint")
    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: Sequence[str] | None = None,
    ) -> TrainOutput:
        """Train the model, and return the number of optimizer steps, their mean loss, and metrics of the training.

        Parameters:
            resume_from_checkpoint: a checkpoint folder, or the .ckpt of a `lightning.Trainer` with a
                `TransformersModule`; True for the newest intact checkpoint in `output_dir`; "auto" for the same or, if
                there is none, a fresh start; None for "auto" if the arguments say so, else a fresh start.
            trial, ignore_keys_for_eval: the trial of a search, and model outputs that evaluations ignore.

        Raises:
            ValueError: the data is missing, empty or of unknown length, or the checkpoint does not exist.
        """
        with (
            ShortTraceback(),
            explain_dropped_columns(self),
            convert_lightning_checkpoint(self, resume_from_checkpoint) as checkpoint,
        ):
            return session.train(self, checkpoint, trial, ignore_keys_for_eval)

    def check(self) -> CheckReport:
        """Report errors that a training would raise late, its memory and its duration; leave its numbers unchanged.

        Raises:
            RuntimeError, NotImplementedError: a training runs, no model, or a sharded model (use `littrainer check`).
        """
        from littrainer.check.checking import TrainingCheck

        return TrainingCheck(self).run()

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Run forward and backward of a micro-batch, and return the detached loss; override to change a step.

        Parameters:
            model, inputs: the model in training mode, with the strategy's wrappers, and the collator's micro-batch.
            num_items_in_batch: label tokens in the whole window of the optimizer step.
        """
        scaled = self._forward_for_training(model, inputs, num_items_in_batch)
        # DeepSpeed would divide again by the number of micro-batches.
        self.accelerator.backward(scaled, **({"scale_wrt_gas": False} if self.is_deepspeed_enabled else {}))
        return scaled.detach()

    def overrides_training_step(self) -> bool:
        """Return whether a subclass or this instance overrides `training_step`, which then calls backward itself."""
        return bool(self._find_overrides("training_step"))

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """Return the scalar loss of a micro-batch; override for another loss.

        Parameters:
            model, inputs: the model with the strategy's wrappers, and the micro-batch on its device.
            return_outputs: return the pair of loss and model outputs.
            num_items_in_batch: label tokens in the whole window, the divisor of a summed loss.
        """
        value, outputs = loss.compute_loss_and_outputs(self, model, inputs, num_items_in_batch)
        value = loss.scale_for_gradient_mean(self, value, num_items_in_batch)
        return (value, outputs) if return_outputs else value

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]:
        """Return the context for computing losses, which contains `autocast_smart_context_manager`."""
        stack, inner = ExitStack(), self.autocast_smart_context_manager()
        if type(inner) is not nullcontext:
            stack.enter_context(inner)
        return stack

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[Any]:
        """Return a context for forward passes; override it for custom precision. Mixed precision needs none.

        Parameters:
            cache_enabled: as in `torch.autocast`.
        """
        return NO_CONTEXT

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: Any, total_train_batch_size: int | None = None
    ) -> tuple[int, int, int, float, int, int, int]:
        """Return the length of a training: the fields of a `TrainingPlan`.

        Parameters:
            args, dataloader: the Trainer's arguments, and the training DataLoader.
            total_train_batch_size: samples per optimizer step; by default `get_total_train_batch_size`.
        """
        total = self.get_total_train_batch_size(args) if total_train_batch_size is None else total_train_batch_size
        return plan_training(self, dataloader, total, self.num_examples)

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Return the number of samples per optimizer step, over all processes.

        Parameters:
            args: the Trainer's arguments.
        """
        copies = args.world_size // self.get_tp_size() // self.get_cp_size() // self.get_sp_size()
        return self._train_batch_size * args.gradient_accumulation_steps * copies

    def get_tp_size(self) -> int:
        """Return the number of processes that share a copy of the model by tensor parallelism."""
        model_size = getattr(self.model, "_tp_size", None)
        return tensor_parallel_size(self.args) if model_size is None else model_size

    # ---- Evaluation and prediction ----------------------------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Sequence[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate on a dataset, log loss, speed and the results of `compute_metrics`, and return these metrics.

        Parameters:
            eval_dataset: a dataset, a name in the Trainer's dict of datasets, or a dict of datasets, whose names become
                part of the metrics' names; by default the Trainer's dataset.
            ignore_keys, metric_key_prefix: model outputs that are not predictions, and a prefix for the metrics' names.

        Raises:
            ValueError, KeyError: the dataset is missing or empty, or its name is unknown.
        """
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(chosen, dict):
            return self._evaluate_datasets(chosen, eval_dataset is None, ignore_keys, metric_key_prefix)
        with (
            ShortTraceback(),
            part_of_training(EVALUATION),
            run_lightning.group_validations(self),
            explain_dropped_columns(self),
            self.session.memory.measure("eval"),
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
            metrics = self._add_speed_metrics(output, metric_key_prefix, start_time)
            self.log(metrics)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            self.session.memory.stop("eval", metrics)
        return metrics

    def predict(
        self, test_dataset: Any, ignore_keys: Sequence[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Return arrays of predictions and labels, padded with -100, and metrics if the dataset has labels.

        Parameters:
            test_dataset: a map-style or iterable dataset.
            ignore_keys, metric_key_prefix: as in `evaluate`.

        Raises:
            ValueError: the dataset is None or empty.
        """
        with ShortTraceback(), explain_dropped_columns(self), self.session.memory.measure("test"):
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
        """Run the loop over a loader that `evaluate()` and `predict()` share.

        Parameters:
            dataloader, description: the batches, and the name of the loop in logs.
            prediction_loss_only: do not store predictions; by default the argument of the same name decides.
            ignore_keys, metric_key_prefix: as in `evaluate`.
        """
        prediction_loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        accept_earlier_signatures(self)
        evaluation = EvaluationLoop(
            self,
            dataloader,
            description,
            prediction_loss_only,
            ignore_keys,
            metric_key_prefix,
            overrides_prediction_step=bool(self._find_overrides("prediction_step")),
            shifts_labels=self._loss_shifts_labels,
            move_input=self._prepare_input,
        )
        reads_logits = not prediction_loss_only or bool(self._find_overrides("compute_loss", "prediction_step"))
        with (
            run_lightning.group_validations(self),
            self.accelerator.evaluating(dataloader),
            self.session.tracked.paused(),
            cut_sequences(self.session, self.args, self.model, reads_logits) as sequences,
        ):
            run_lightning.shard_for_evaluation(self)
            model = self._prepare_model_for_evaluation()
            if sequences is not None:
                sequences.check()
            evaluation.begin(model)
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
        """Return loss, predictions and labels of a batch, possibly nested, each None if there is none.

        Parameters:
            model, inputs: the model in evaluation mode, and the collator's batch.
            prediction_loss_only: return the loss alone.
            ignore_keys: model outputs that are not predictions.
        """
        return self._predict_batch(model, inputs, prediction_loss_only, ignore_keys)

    # ---- Saving and loading -----------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save model, configuration, processing class and arguments for `from_pretrained`; push them if configured.

        Parameters:
            output_dir: a folder, or a URL such as s3://bucket/model; by default `args.output_dir`.
        """
        self._write_model(output_dir, _internal_call)
        if should_push_automatically(self) and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def save_state(self) -> None:
        """Write the state to trainer_state.json and the arguments to littrainer_run.json in `output_dir`."""
        if self.is_world_process_zero():
            self.state.save_to_json(os.path.join(self.args.output_dir, TRAINER_STATE_NAME))
            # Without the facts of a training no model is described, since its weights may be trained by now.
            checkpoints = self.session.checkpoints
            facts = checkpoints.facts or describe_run(None, self.train_dataset, self.eval_dataset)
            facts["run"].update(checkpoints.times)
            write_run_record(self.args, self.args.output_dir, facts)
            upload_files(self.args.output_dir)

    # ---- The Hub ----------------------------------------------------------------------------------------------------

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Create the repository to push to, unless it exists, in the first process.

        Parameters:
            token: access token with write permission; by default `hub_token`, or the logged-in token.
            private: privacy of a new repository; by default `hub_private_repo`.

        Raises:
            huggingface_hub.errors.HfHubHTTPError: the Hub refuses it; a note contains advice.
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
        """Save the model to `output_dir`, write its card, and push that folder to the Hub, except checkpoints.

        Parameters:
            commit_message: message of the commit.
            blocking: return the commit when it is pushed; otherwise return a Future. Only the first process returns it.
            token, private: as in `init_hf_repo`.
            revision: branch, created if it does not exist; by default `hub_revision`, or the main branch.
            kwargs: keywords of `create_model_card`.

        Raises:
            TypeError, huggingface_hub.errors.HfHubHTTPError: an unknown keyword; the Hub refuses it, with a note.
        """
        finish_earlier = self._finish_earlier_pushes
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
        """Write a draft of a model card to README.md in `output_dir`, unless the file has been edited.

        Parameters:
            language, license: ISO code, and by default the license of the base model, if the Hub is reachable.
            tags, model_name: further tags, and the title; by default the name of the output folder.
            finetuned_from, tasks: base model and the Hub's task names; by default derived from the model.
            dataset_tags, dataset, dataset_args: names on the Hub, displayed names and configurations of the datasets.

        Raises:
            ValueError: the Hub would refuse the metadata.
        """
        parameters = {name: value for name, value in locals().items() if name != "self"}
        if self.is_world_process_zero():
            self._write_model_card(parameters)

    # ---- Logging ----------------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add values to the history and pass them to the callbacks.

        Parameters:
            logs: values by name; epoch and token counts are added to it.
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
        run_lightning.publish(self.lightning_module, logs)
        state.log_history.append({**logs, "step": state.global_step})
        self.control = self.callback_handler.on_log(self.args, state, self.control, logs)

    def track(self, name: str, value: torch.Tensor | float) -> None:
        """Log the mean of a value over each logging interval; in a model's `forward` call `littrainer.track` instead.

        Parameters:
            name, value: the name in the logs, and a number or scalar tensor, which stays on its device until then.

        Raises:
            TypeError, ValueError: the value is not a single number, or the Trainer uses the name itself.
        """
        self.session.tracked.add(name, value)

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Print metrics as a table, on the first process only.

        Parameters:
            split, metrics: `train`, `eval` or `test` for the heading, and numbers by name; `..._runtime` is in seconds.
        """
        if self.is_world_process_zero():
            reports.print_metrics(split, metrics)

    @staticmethod
    def metrics_format(metrics: dict[str, Any]) -> dict[str, Any]:
        """Return metrics as `log_metrics` prints them: `h:mm:ss.cc`, memory in MB, operations in GF, four decimals.

        Parameters:
            metrics: numbers by name.
        """
        return reports.metrics_format(metrics)

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Write metrics to `<split>_results.json` in `output_dir`, on the first process only.

        Parameters:
            split, metrics: `train`, `eval`, `test` or `all`, and numbers by name.
            combined: add them to `all_results.json` too.
        """
        if self.is_world_process_zero():
            reports.save_metrics(self.args.output_dir, split, metrics, combined)
            upload_files(self.args.output_dir)

    def store_flos(self) -> None:
        """Add the operations since the last call to the state."""
        self.state.total_flos += sum_across_processes(self.current_flos, self.args.device, self._get_batch_copies())
        self.current_flos = 0

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return the operations of a micro-batch: 6 per token and parameter outside of embeddings (Kaplan et al. 2020).

        Parameters:
            inputs: the micro-batch with the model's main input.
        """
        session = self.session
        if session.main_input_name is None or not self.is_in_train:
            session.main_input_name = getattr(self.model, "main_input_name", "input_ids")
        if session.main_input_name not in inputs or not hasattr(self.model, "num_parameters"):
            return 0
        if session.parameters_without_embeddings is None or not self.is_in_train:
            session.parameters_without_embeddings = count_parameters_without_embeddings(self.model)
        return 6 * inputs[session.main_input_name].numel() * session.parameters_without_embeddings

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
        """Train with many sets of arguments, and return the best trial, or the Pareto-optimal trials.

        Parameters:
            hp_space: takes the trial, returns arguments by name; by default learning rate, epochs, seed, batch size.
            compute_objective: takes an evaluation's metrics, returns a number or a list; by default their sum, or loss.
            n_trials: number of trials; None with Optuna for no limit other than `timeout` or `Study.stop`.
            direction: `minimize` or `maximize`; a list for several objectives.
            backend: `optuna`, `ray` or `wandb`; by default the first that is installed.
            hp_name: takes the trial, returns its name and the name of its folder; by default `run-<id>`.
            kwargs: of `create_study`, `Study.optimize`, Ray's `tune.run`; `keep_best_trial` keeps Optuna's best model.

        Raises:
            RuntimeError, ValueError, TypeError: no trial was completed, no `model_init` or backend, or invalid input.
        """
        with ShortTraceback():
            return searching.hyperparameter_search(
                self, hp_space, compute_objective, n_trials, direction, backend, hp_name, **kwargs
            )

    # ---- Callbacks --------------------------------------------------------------------------------------------------

    def add_callback(self, callback: Any) -> None:
        """Add a callback; a Lightning callback is active from the next `train()`.

        Parameters:
            callback: a callback of transformers or of Lightning, or its class; a TypeError otherwise.
        """
        if run_lightning.is_lightning_callback(callback):
            add_lightning_callback(self.lightning_callbacks, callback)
        else:
            self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback and return it; None if there is none.

        Parameters:
            callback: the callback, or a class for its first instance.
        """
        if run_lightning.is_lightning_callback(callback):
            return pop_matching(self.lightning_callbacks, callback)
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback.

        Parameters:
            callback: the callback, or a class for its first instance.
        """
        if run_lightning.is_lightning_callback(callback):
            remove_lightning_callback(self.lightning_callbacks, callback)
        else:
            self.callback_handler.remove_callback(callback)

    # ---- Processes, devices and models ------------------------------------------------------------------------------

    def end(self) -> None:
        """Leave the process group, as the last call of a script."""
        self.accelerator.end_training()

    def is_local_process_zero(self) -> bool:
        """Return whether this is the first process of its node."""
        return self.args.local_process_index == 0

    def is_world_process_zero(self) -> bool:
        """Return whether this is the first of all processes."""
        return self.args.process_index == 0

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Return a new model from `model_init`.

        Parameters:
            trial: passed to a `model_init` with a parameter; None outside of a search.
        """
        assert self.model_init is not None
        parameters = len(inspect.signature(self.model_init).parameters)
        if parameters > 1:
            raise RuntimeError(
                f"model_init takes {parameters} parameters, and may take none, or the trial: wrap it, as in "
                "lambda: make_model(...)."
            )
        model = self.model_init(trial) if parameters == 1 else self.model_init()
        if model is None:
            raise RuntimeError("model_init returned None; it has to return the model.")
        return model
