"""`TransformersModule`: a model in any `lightning.Trainer`, trained as by a Trainer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from typing_extensions import Self

from littrainer.arguments.training_arguments import TrainingArguments
from littrainer.checkpoint.lightning_format import MODULE_METADATA_KEY
from littrainer.checkpoint.lightning_io import TransformersCheckpointIO
from littrainer.checkpoint.weights import COMPILED_PART, match_to_model, materialize_expanded_tensors
from littrainer.data.windows import MicroBatch
from littrainer.distributed.collectives import get_rank
from littrainer.evaluation import generation
from littrainer.evaluation.prediction import (
    can_compute_loss,
    contains_loss,
    extract_labels,
    extract_logits,
    get_ignored_outputs,
)
from littrainer.evaluation.streaming import make_streaming_metrics
from littrainer.lightning.arguments import resolve_arguments
from littrainer.lightning.evaluation import TEST, VALIDATION, Evaluations, add_prefix, is_monitored
from littrainer.lightning.ignored_arguments import warn_of_ignored_arguments
from littrainer.lightning.model_source import (
    call_model_factory,
    checkpoint_metadata,
    export_model,
    get_displayed_hyper_parameters,
    read_init_kwargs,
    resolve_model,
)
from littrainer.lightning.preparation import (
    ModuleLossSettings,
    count_training_steps,
    get_model_inputs,
    make_schedule,
    set_training_mode,
    shard_model,
)
from littrainer.lightning_adapter.lightning_internals import peek_batches
from littrainer.lightning_adapter.module import ClosureFirstModule
from littrainer.loop import loss as losses
from littrainer.loop.loss_normalization import EXACT, detect_loss_reduction
from littrainer.loop.model_preparation import (
    add_embedding_noise,
    align_special_tokens,
    apply_liger_kernels,
    enable_activation_checkpointing,
)
from littrainer.optim.optimizers import build_optimizer, get_optimizer_class_and_keywords
from littrainer.optim.parameter_groups import get_decayed_parameter_names, parameter_groups
from littrainer.optim.schedules import is_metric_driven
from littrainer.optim.stepping import clip_gradient_norm, has_fused_backward, step_with_closure


class TransformersModule(ClosureFirstModule):
    """A model in a `lightning.Trainer`, with a Trainer's optimizer, schedule, loss over a window, metrics and folders.

    Parameters:
        model: the module to train, whose forward returns the loss under `"loss"` or as first element of a tuple; a name
            or folder for `from_pretrained`; or a function that makes the model, called in `configure_model`.
        args: training arguments, or a dict of them. A warning lists arguments that the lightning.Trainer decides
            instead.
        model_class: the class of a model that is loaded by name, such as "AutoModelForSequenceClassification".
        compute_metrics: takes an `EvalPrediction`, returns a dict of metrics; or torchmetrics metrics, updated with
            each batch.
        processing_class: tokenizer or processor, saved with the model.
        data_collator: turns a list of samples into a batch; used by a `TrainerDataModule` without a collator.
        compute_loss_func: takes outputs, labels and `num_items_in_batch`, returns the loss.
        preprocess_logits_for_metrics: applied to the logits (and labels) of each batch before they are stored.
        optimizers: optimizer and schedule to use instead of those of the arguments.
        optimizer_cls_and_kwargs: optimizer class and keywords to use instead.
        generation_kwargs: keywords of the model's `generate` under `predict_with_generate`.

    Subclasses override `compute_loss`, `prediction_outputs`, `optimizer_groups` or any hook of Lightning.

    Raises:
        TypeError, ValueError, NotImplementedError: as TrainingArguments; or there is no model.

    Examples:
        >>> import lightning
        >>> from littrainer import TrainerDataModule, TransformersModule
        >>> module = TransformersModule(model, {"learning_rate": 1e-3, "per_device_train_batch_size": 4})
        >>> data = TrainerDataModule(train_dataset, eval_dataset)
        >>> quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        >>> trainer = lightning.Trainer(max_steps=2, **quiet)
        >>> trainer.fit(module, datamodule=data)
        >>> module.export_pretrained("runs/first/model")
    """

    def __init__(
        self,
        # LightningCLI takes the first type that fits, so `str`, for names of functions, is late.
        model: nn.Module | Callable[..., Any] | str | Mapping[str, Any] | None = None,
        args: dict[str, Any] | TrainingArguments | None = None,
        *,
        model_class: Any = None,
        compute_metrics: Callable[..., Any] | Mapping[str, Any] | None = None,
        processing_class: Any = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: Any = None,
        generation_kwargs: dict[str, Any] | None = None,
    ):
        super().__init__()
        self.args = resolve_arguments(args)
        # Metrics are neither trained nor saved.
        vars(self)["compute_metrics"] = compute_metrics
        self.processing_class = processing_class
        self.data_collator = data_collator
        self.compute_loss_func = compute_loss_func
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.given_optimizers = optimizers
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self.generation_kwargs = dict(generation_kwargs or {})
        self._source_name = model if isinstance(model, str) else None
        self._model_factory: Any = None
        self._loss_settings: ModuleLossSettings | None = None
        self._tensor_parallel_size = 1
        self._window: MicroBatch | None = None
        self._window_loss: Any = 0.0
        self._is_loss_divided = False
        self.evaluations = Evaluations(make_streaming_metrics(compute_metrics))
        self._preparations = ExitStack()
        self._step_was_skipped = False
        self.model: Any = None
        resolved = resolve_model(model, model_class)
        if resolved is None:
            self._model_factory = model
            self._save_hyper_parameters()
        else:
            self._set_model(resolved)

    def _set_model(self, model: nn.Module) -> None:
        self.model = model
        self._loss_settings = None
        config: Any = getattr(model, "config", None)
        if config is not None:
            config.use_cache = self.args.use_cache
        generation.prepare(self.args, model, self.generates)
        self._save_hyper_parameters()

    def _save_hyper_parameters(self) -> None:
        self.save_hyperparameters(get_displayed_hyper_parameters(type(self), self.args, self._source_name))

    # ---- The model ---------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, for your own training loop."""
        return self.model(*args, **kwargs)

    def configure_model(self) -> None:
        """Create the model of a function, and shard it for a ModelParallelStrategy.

        Raises:
            TypeError: `configure_callbacks` of a subclass omits `RunHooks`.
        """
        if self.model is None:
            self._set_model(call_model_factory(self._model_factory))
        pl_trainer = self.attached_trainer()
        if pl_trainer is not None and not has_run_hooks(pl_trainer):
            raise TypeError(
                f"{type(self).__name__}.configure_callbacks() omits the callback with which TransformersModule "
                "prepares the model and computes metrics: let it return [*super().configure_callbacks(), ...]."
            )
        self._tensor_parallel_size = shard_model(self.model, getattr(pl_trainer, "strategy", None), self.args)
        self._loss_settings = None

    @property
    def loss_settings(self) -> ModuleLossSettings:
        """The loss settings of the model, the arguments and the lightning.Trainer."""
        if self._loss_settings is None:
            size = self._tensor_parallel_size
            self._loss_settings = ModuleLossSettings(self.model, self.args, self.compute_loss_func, size)
        self._loss_settings.args.world_size = getattr(self.attached_trainer(), "world_size", 1)
        return self._loss_settings

    @property
    def learning_rate(self) -> float:
        """The learning rate of the arguments; writable for Lightning's learning rate finder."""
        return self.args.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self.args.learning_rate = value
        self._save_hyper_parameters()

    @property
    def label_names(self) -> list[str]:
        """The names of inputs that are labels."""
        return self.loss_settings.label_names

    @property
    def rank(self) -> int:
        """Rank among all processes."""
        pl_trainer = self.attached_trainer()
        return get_rank() if pl_trainer is None else pl_trainer.global_rank

    @property
    def generates(self) -> bool:
        """Return whether predictions are generated tokens."""
        return generation.is_generation_requested(self.args)

    @property
    def has_own_prediction_outputs(self) -> bool:
        return type(self).prediction_outputs is not TransformersModule.prediction_outputs

    def attached_trainer(self) -> pl.Trainer | None:
        """Return the lightning.Trainer, or None in your own loop or Fabric's."""
        try:
            trainer = self.trainer
        except RuntimeError:
            return None
        return trainer if isinstance(trainer, pl.Trainer) else None

    def __getstate__(self) -> dict[str, Any]:
        # For averages of weights.
        return {**super().__getstate__(), "_preparations": ExitStack(), "_window": None}

    # ---- Hooks for subclasses ----------------------------------------------------------------------------------------

    def compute_loss(
        self, inputs: dict[str, Any], num_items_in_window: torch.Tensor | int | None = None
    ) -> tuple[torch.Tensor, Any]:
        """Run the model on a batch; override for another loss.

        Parameters:
            inputs: the batch, on the module's device.
            num_items_in_window: label tokens in the window of the optimizer step, the divisor of the sum of losses. In
                a lightning.Trainer with `average_tokens_across_devices` it counts the tokens of all processes. If it
                is None, the loss is the mean over the batch.

        Returns:
            the loss, and the model's outputs, which evaluations take predictions from.
        """
        return losses.compute_loss_and_outputs(self.loss_settings, self.model, inputs, num_items_in_window)

    def prediction_outputs(self, inputs: dict[str, Any], wants_loss: bool = True) -> tuple[Any, Any, Any]:
        """Return loss, predictions and labels of an evaluation batch; override for other predictions.

        Parameters:
            inputs: the batch, on the module's device.
            wants_loss: false in `predict`, which needs only predictions.

        Returns:
            the three, or None for a missing value. Predictions are logits or generated tokens.
        """
        settings = self.loss_settings
        has_labels = can_compute_loss(inputs, settings.label_names, settings.can_return_loss)
        should_compute_loss = wants_loss and has_labels
        if self.generates:
            return self._generate_outputs(inputs, should_compute_loss)
        labels, value = None, None
        if should_compute_loss:
            labels = extract_labels(inputs, settings.label_names)
            value, outputs = self._loss_of(inputs, self.items_in_window([inputs]))
        else:
            outputs = self.model(**inputs)
        are_compared = self.compute_metrics is not None and self.preprocess_logits_for_metrics is None
        compared = settings.label_names if are_compared else None
        has_loss = should_compute_loss or (has_labels and contains_loss(outputs))
        return value, extract_logits(outputs, get_ignored_outputs(self.model), labels, has_loss, compared), labels

    def _generate_outputs(self, inputs: dict[str, Any], should_compute_loss: bool) -> tuple[Any, Any, Any]:
        keywords = generation.merge_generation_keywords(self.args, self.generation_kwargs)
        size = self.loss_settings.args.world_size
        tokens = generation.generate_tokens(self.model, inputs, keywords, size, self.processing_class)
        tokens, labels = generation.pad_tokens_and_labels(self.model, tokens, inputs.get("labels"), self._pad_tokens)
        value = self._loss_of(inputs, None)[0] if should_compute_loss else None
        return value, tokens, labels

    def _pad_tokens(self, tokens: torch.Tensor, length: int) -> torch.Tensor:
        return generation.pad_to_length(
            tokens, length, generation.find_padding_token(self.model, self.processing_class)
        )

    def optimizer_groups(self) -> list[dict[str, Any]]:
        """Return the module's parameters in groups, norms and biases without weight decay."""
        return parameter_groups(self, get_decayed_parameter_names(self), self.args.weight_decay)

    # ---- Training ----------------------------------------------------------------------------------------------------

    def configure_callbacks(self) -> list[pl.Callback]:
        """Add `RunHooks`; a subclass adds its callbacks to the result of `super()`."""
        if not has_run_hooks(self.trainer):
            # Other callbacks read its logs.
            self.trainer.callbacks.insert(0, RunHooks())  # type: ignore[attr-defined]
        return []

    def check_run(self, pl_trainer: pl.Trainer, stage: str) -> None:
        """Raise an error for an unsupported training; warn of ignored arguments."""
        if stage != "fit":
            return
        if getattr(self, "_compiler_ctx", None) is not None:
            raise TypeError(
                f"torch.compile({type(self).__name__}) would compile what Lightning logs too. Compile the model: "
                "module.model.compile(), or module.model = torch.compile(module.model)."
            )
        accumulation, strategy = pl_trainer.accumulate_grad_batches, pl_trainer.strategy
        if strategy.handles_gradient_accumulation and accumulation > 1:
            raise ValueError(
                f"accumulate_grad_batches={accumulation} with {type(strategy).__name__}, which divides each loss by "
                "the number of micro-batches, and not by the label tokens of the window. Set "
                "accumulate_grad_batches=1 and larger batches, use FSDP, or train with littrainer.Trainer and "
                "deepspeed=."
            )
        warn_of_ignored_arguments(self.args, pl_trainer)

    def prepare_training(self) -> None:
        """Prepare the model in the order of a Trainer, and put it into training mode."""
        self.undo_preparations()
        apply_liger_kernels(self.model, self.args)
        enable_activation_checkpointing(self.model, self.args)
        align_special_tokens(self.model, self.processing_class)
        self._preparations.enter_context(add_embedding_noise(self.model, self.args.neftune_noise_alpha))
        self._window = None
        set_training_mode(self.model)

    def undo_preparations(self) -> None:
        """Undo the preparations for a training."""
        self._preparations.close()

    def on_train_start(self) -> None:
        """Put optimizers into training mode in Lightning's trials."""
        if not has_run_hooks(self.trainer):
            self.set_optimizer_modes("train")

    def set_optimizer_modes(self, mode: str) -> None:
        """Set "train" or "eval", for instance in schedule-free optimizers."""
        for optimizer in self.trainer.optimizers:
            if callable(getattr(optimizer, mode, None)):
                getattr(optimizer, mode)()

    def items_in_window(self, window: list[Any]) -> torch.Tensor | int | None:
        """Count the label tokens of an optimizer step's micro-batches; None if the loss is not divided by them.

        A collective call in a lightning.Trainer; otherwise each process counts its own tokens.

        Parameters:
            window: the micro-batches of the step.
        """
        settings = self.loss_settings
        if not settings._loss_reduction.is_known and (self.training or settings.args.loss_normalization == EXACT):
            is_overridden = type(self).compute_loss is not TransformersModule.compute_loss
            settings._loss_reduction = detect_loss_reduction(settings, self.model, window, self.device, is_overridden)
        has_labels = all(isinstance(batch, Mapping) and "labels" in batch for batch in window)
        if not (has_labels or settings._loss_reduction.is_exact):
            return None
        return losses.items_in_window(settings, window, self.device)

    def _open_window(self, inputs: dict[str, Any], batch_idx: int, accumulation: int) -> MicroBatch:
        """Return the first micro-batch of an optimizer step, with batches of a window loader or prefetched batches."""
        pl_trainer = self.attached_trainer()
        micro_batch = getattr(getattr(pl_trainer, "train_dataloader", None), "handed_out", {}).get(batch_idx)
        if micro_batch is not None:
            return micro_batch
        # After a resume within a window, the rest is a window.
        remaining = accumulation - batch_idx % accumulation - 1
        upcoming = [] if pl_trainer is None else peek_batches(pl_trainer, remaining)
        has_names = all(isinstance(batch, Mapping) for batch in upcoming)
        number = self.items_in_window([inputs, *upcoming]) if has_names else None
        return MicroBatch(None, True, not upcoming, 1 + len(upcoming), number, 0.0)

    def training_step(self, batch: Any, batch_idx: int = 0) -> torch.Tensor:
        """Return the loss of a micro-batch; log `train_loss` of its window with the last micro-batch."""
        pl_trainer, settings, inputs = self.attached_trainer(), self.loss_settings, get_model_inputs(batch)
        accumulation = 1 if pl_trainer is None else pl_trainer.accumulate_grad_batches
        window = self._window
        if window is None or batch_idx % accumulation == 0:
            window = self._window = self._open_window(inputs, batch_idx, accumulation)
            self._window_loss = 0.0
        number, settings.current_gradient_accumulation_steps = window.num_items_in_window, window.window_size
        value, _ = self._loss_of(inputs, number)
        value = losses.scale_for_accumulation(settings, value, number)
        self._window_loss = self._window_loss + value.detach()
        # `backward` reverts Lightning's division.
        self._is_loss_divided = True
        if pl_trainer is None or (batch_idx + 1) % accumulation == 0 or pl_trainer.is_last_batch:
            self._window = None
            self._log_train_loss(self._window_loss)
        return value

    def _loss_of(self, inputs: dict[str, Any], number: torch.Tensor | int | None) -> tuple[torch.Tensor, Any]:
        value, outputs = self.compute_loss(dict(inputs), number)
        return losses.scale_for_gradient_mean(self.loss_settings, value, number), outputs

    def _log_train_loss(self, value: torch.Tensor) -> None:
        pl_trainer: Any = self.attached_trainer()
        if pl_trainer is None or not pl_trainer.training:
            return
        # Synchronized only for loggers and callbacks; bars show their process's loss.
        is_read = (pl_trainer.global_step + 1) % max(pl_trainer.log_every_n_steps, 1) == 0
        is_read = is_read or is_monitored("train_loss", pl_trainer.callbacks)
        # A bar copies the value to the host after each micro-batch.
        has_bar = bool(getattr(pl_trainer.progress_bar_callback, "is_enabled", pl_trainer.progress_bar_callback))
        self.log("train_loss", value, prog_bar=has_bar, on_step=True, on_epoch=False, sync_dist=is_read, batch_size=1)

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward without Lightning's division of the loss, except for a subclass's `training_step`."""
        pl_trainer = self.attached_trainer() if self.automatic_optimization else None
        division = 1 if pl_trainer is None else pl_trainer.accumulate_grad_batches
        if division > 1 and self._is_loss_divided:
            # The division's backward pass makes it exactly 1.
            kwargs["gradient"] = torch.full_like(loss, division)
        self._is_loss_divided = False
        super().backward(loss, *args, **kwargs)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip to the lightning.Trainer's `gradient_clip_val`, by default to a 2-norm of `max_grad_norm`.

        Lightning refuses to clip with a fused optimizer under mixed precision, a Trainer's default.
        """
        bound = self.args.max_grad_norm if gradient_clip_val is None else gradient_clip_val
        if bound <= 0:
            return
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        # A fused optimizer would unscale in its step.
        if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            scaler.unscale_(optimizer)
        root: Any = self.trainer.strategy.model
        if gradient_clip_val is not None and gradient_clip_algorithm == "value":
            nn.utils.clip_grad_value_(self.parameters(), bound)
        elif callable(getattr(root, "clip_grad_norm_", None)):
            # FSDP 1 reduces the norm of its shards.
            root.clip_grad_norm_(bound)
        else:
            clip_gradient_norm(self.parameters(), bound)

    # ---- Optimizer and schedule --------------------------------------------------------------------------------------

    def configure_optimizers(self) -> Any:
        """Create optimizer and schedule of the arguments; the schedule ends with the run.

        A metric-driven schedule steps once in an epoch, with the metric of the validation.
        """
        optimizer, schedule = self.optimizer_and_schedule(count_training_steps(self.trainer))
        config = {"scheduler": schedule, "interval": "step"}
        if is_metric_driven(schedule):
            metric = add_prefix(VALIDATION, self.args.metric_for_best_model or "loss")
            config.update(interval="epoch", monitor=metric, reduce_on_plateau=True)
        return {"optimizer": optimizer, "lr_scheduler": config}

    def optimizer_and_schedule(self, num_training_steps: float | None = None) -> tuple[Any, Any]:
        """Create optimizer and schedule, also for your own loop.

        Parameters:
            num_training_steps: optimizer steps of the whole training.

        Returns:
            optimizer and schedule, which steps once for each optimizer step.

        Raises:
            ValueError: the schedule needs the number of steps, or the optimizer has its own backward pass.
        """
        optimizer, schedule = self.given_optimizers
        if optimizer is None:
            cls_and_kwargs = self.optimizer_cls_and_kwargs or get_optimizer_class_and_keywords(self.args, self.model)
            optimizer = build_optimizer(self.model, self.optimizer_groups(), *cls_and_kwargs)
            if has_fused_backward(optimizer):
                raise ValueError(
                    f"optim={self.args.optim!r} updates the weights in a backward pass that a lightning.Trainer "
                    "does not call. Train with littrainer.Trainer, or choose another optim."
                )
        return optimizer, make_schedule(self.args, optimizer, num_training_steps) if schedule is None else schedule

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        scale = self._loss_scale()
        if scale is not None and isinstance(getattr(optimizer, "optimizer", optimizer), torch.optim.LBFGS):
            raise ValueError("LBFGS cannot train with precision='16-mixed': choose 'bf16-mixed', or another optimizer.")
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self._step_was_skipped = scale is not None and self._loss_scale() < scale

    def step_optimizer(self, optimizer: Any, closure: Callable[[], Any] | None = None, loss: Any = None) -> None:
        """Step an optimizer, which may repeat the closure without accumulation."""
        if closure is None:
            optimizer.step()
            return

        def repeat() -> Any:
            accumulation = self.trainer.accumulate_grad_batches
            if accumulation > 1:
                raise ValueError(
                    "The optimizer repeats the backward pass within its step, and "
                    f"accumulate_grad_batches={accumulation} would add the gradients up. Set accumulate_grad_batches=1 "
                    "and larger batches, or choose another optimizer."
                )
            return closure()

        step_with_closure(optimizer, loss, repeat)

    @property
    def step_was_skipped(self) -> bool:
        return self._step_was_skipped

    def _loss_scale(self) -> Any:
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        return None if scaler is None else scaler.get_scale()

    # ---- Checkpoints -------------------------------------------------------------------------------------------------

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Load a module with the weights and arguments of a checkpoint: a file of Lightning, or a folder.

        Parameters:
            checkpoint_path: a `.ckpt`; or a folder that `TransformersCheckpointIO`, a Trainer or `export_pretrained`
                wrote.
            map_location: the device for the weights.
            hparams_file, strict: as in `LightningModule.load_from_checkpoint`.
            weights_only: false loads any Python object, and may run any code of the file.
            kwargs: keywords of the module, which override the checkpoint's. `model=` is required for models of other
                classes than transformers'.

        Returns:
            the module, an instance of the class.

        Raises:
            ValueError: the folder is damaged, or the checkpoint does not describe its model.
        """
        kwargs = {**read_init_kwargs(checkpoint_path, cls), **kwargs}
        if not isinstance(checkpoint_path, (str, os.PathLike)) or not Path(checkpoint_path).is_dir():
            weights_only = True if weights_only is None else weights_only
            return super().load_from_checkpoint(
                checkpoint_path, map_location, hparams_file, strict, weights_only, **kwargs
            )
        folder = Path(checkpoint_path)
        if kwargs.get("model") is None and (folder / "config.json").is_file():
            kwargs["model"] = resolve_model(folder, kwargs.get("model_class"))
        module = cls(**kwargs)
        if module.model is None:
            module.configure_model()
        checkpoint = TransformersCheckpointIO(module.model).load_checkpoint(folder)
        module.load_state_dict(checkpoint["state_dict"], strict=module.strict_loading if strict is None else strict)
        return module if map_location is None else module.to(map_location)

    def export_pretrained(self, directory: str | os.PathLike[str], max_shard_size: int | str | None = None) -> None:
        """Write model and processing class to a folder for `from_pretrained`, in a collective call.

        Parameters:
            directory: the folder, which is written atomically.
            max_shard_size: maximum size of a weights file, in bytes or as text such as "5GB".

        Raises:
            ValueError: there is no model yet, or its weights cannot be gathered.
            OSError: the folder cannot be written.
        """
        strategy = getattr(self.attached_trainer(), "strategy", None)
        export_model(self.model, self.processing_class, Path(directory), max_shard_size, strategy, self.rank)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights of compiled or other parts."""
        materialize_expanded_tensors(self)
        return super().load_state_dict(match_to_model(self, state_dict)[0], strict, assign)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add metadata to a checkpoint of weights too, for which Lightning calls no callback."""
        self.mark_checkpoint(checkpoint)

    def mark_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add metadata to a checkpoint."""
        checkpoint[MODULE_METADATA_KEY] = checkpoint_metadata(self.model, self.args, self.trainer)
        # Without marks of compiled parts.
        weights = checkpoint["state_dict"].items()
        checkpoint["state_dict"] = {name.replace(f"{COMPILED_PART}.", ""): value for name, value in weights}
        hyper_parameters = checkpoint.setdefault(self.CHECKPOINT_HYPER_PARAMS_KEY, {})
        if isinstance(hyper_parameters.get("model"), nn.Module):
            # From `save_hyperparameters` of a subclass; a pickled model is not safe to load.
            del hyper_parameters["model"]

    # ---- Evaluation --------------------------------------------------------------------------------------------------

    def begin_evaluation(self, stage: str) -> None:
        """Reset evaluations, and put optimizers into evaluation mode."""
        self.evaluations.begin(self.trainer, stage)
        self.set_optimizer_modes("eval")

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        """Evaluate a batch of a validation."""
        return self.evaluations.step(self, VALIDATION, batch, dataloader_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        """Evaluate a batch of a test."""
        return self.evaluations.step(self, TEST, batch, dataloader_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Return the logits of a batch, or generated tokens under `predict_with_generate`.

        Parameters:
            batch: a batch of the loader.
            batch_idx: its index.
            dataloader_idx: the index of its loader.
        """
        return self.prediction_outputs(get_model_inputs(batch), wants_loss=False)[1]


def _module_hook(act: Callable[..., None]) -> Any:
    """Return a hook for a TransformersModule only."""

    def hook(self: pl.Callback, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        if isinstance(pl_module, TransformersModule):
            act(pl_module, trainer, *args, **kwargs)

    return hook


class RunHooks(pl.Callback):
    """A callback that prepares a TransformersModule, runs its evaluations, and adds metadata to checkpoints.

    No hooks of the module, since subclasses override those without `super()`.
    """

    setup = _module_hook(lambda module, trainer, stage: module.check_run(trainer, stage))
    on_fit_start = _module_hook(lambda module, trainer: module.prepare_training())
    on_fit_end = on_exception = _module_hook(lambda module, trainer, *error: module.undo_preparations())
    on_train_start = _module_hook(lambda module, trainer: module.set_optimizer_modes("train"))
    # Schedule-free optimizers then leave the averaged weights.
    on_train_end = _module_hook(lambda module, trainer: module.set_optimizer_modes("eval"))
    on_validation_epoch_start = _module_hook(lambda module, trainer: module.begin_evaluation(VALIDATION))
    on_test_epoch_start = _module_hook(lambda module, trainer: module.begin_evaluation(TEST))
    on_validation_epoch_end = on_test_epoch_end = _module_hook(lambda module, trainer: module.evaluations.end(module))
    on_validation_end = _module_hook(
        lambda module, trainer: module.set_optimizer_modes("train" if trainer.state.fn == "fit" else "eval")
    )
    on_save_checkpoint = _module_hook(lambda module, trainer, checkpoint: module.mark_checkpoint(checkpoint))


def has_run_hooks(pl_trainer: pl.Trainer) -> bool:
    return any(isinstance(callback, RunHooks) for callback in pl_trainer.callbacks)  # type: ignore[attr-defined]
