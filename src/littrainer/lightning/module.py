"""`TransformersModule`: a model trained by any `lightning.Trainer` as a Trainer trains it."""

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
from littrainer.checkpoint.lightning_format import MARK
from littrainer.checkpoint.weights import COMPILED_PART, fitted
from littrainer.distributed.collectives import process_rank
from littrainer.engine.lightning_internals import upcoming_batches
from littrainer.engine.module import StepsAfterBackward
from littrainer.evaluation import generation
from littrainer.evaluation.prediction import has_loss_in, is_loss_to_be_had, labels_in, logits_in, outputs_to_ignore
from littrainer.evaluation.streaming import streaming_metrics
from littrainer.lightning import preparation
from littrainer.lightning.arguments import arguments_from
from littrainer.lightning.evaluation import TEST, VALIDATION, Evaluations, is_watched
from littrainer.lightning.ignored_arguments import warn_of_ignored_arguments
from littrainer.lightning.model_source import (
    export_model,
    hyper_parameters_of,
    made_at_once,
    made_by,
    mark_of,
    model_kept_in,
    module_from_folder,
    shown_hyper_parameters,
    steps_of_training,
)
from littrainer.lightning.windows import (
    ModuleLossSettings,
    Window,
    loss_settings_of,
    model_inputs,
    window_of,
)
from littrainer.optim.parameter_groups import decayed_parameter_names, parameter_groups
from littrainer.training import loss as losses
from littrainer.training.loss_normalization import EXACT, find_loss_head


class TransformersModule(StepsAfterBackward):
    """A model in a `lightning.Trainer`, with a Trainer's optimizer, schedule, loss over a window, metrics and folders.

    Parameters:
        model: the module to train, whose forward returns the loss under `"loss"` or as first element of a tuple; a name
            or folder for `from_pretrained`; or a function that makes the model, called in `configure_model`.
        args: training arguments, or a dict of them. Those about the model's training count; what the lightning.Trainer
            decides instead is named in one warning.
        model_class: the class of a model that is loaded by name, such as "AutoModelForSequenceClassification".
        compute_metrics: takes an `EvalPrediction`, returns a dict of metrics; or torchmetrics metrics, updated batch by
            batch.
        processing_class: tokenizer or processor, saved with the model.
        data_collator: turns a list of samples into a batch; used by a `TrainerDataModule` that was given none.
        compute_loss_func: takes outputs, labels and `num_items_in_batch`, returns the loss.
        preprocess_logits_for_metrics: applied to the logits (and labels) of each batch before they are kept.
        optimizers: optimizer and schedule to use instead of those that the arguments name.
        optimizer_cls_and_kwargs: optimizer class and keywords to use instead.
        generation_kwargs: keywords of the model's `generate` under `predict_with_generate`.

    Subclasses override `compute_loss`, `prediction_outputs`, `optimizer_groups` or any hook of Lightning.

    Raises:
        TypeError, ValueError, NotImplementedError: as TrainingArguments; or there is no model.
    """

    def __init__(
        self,
        model: nn.Module | str | Callable[..., nn.Module] | Mapping[str, Any] | None = None,
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
        self.args = arguments_from(args)
        # Not as a part of the module: what a metric holds is neither trained nor kept in checkpoints.
        vars(self)["compute_metrics"] = compute_metrics
        self.processing_class = processing_class
        self.data_collator = data_collator
        self.compute_loss_func = compute_loss_func
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.given_optimizers = optimizers
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self.generation_kwargs = dict(generation_kwargs or {})
        self._source_name = model if isinstance(model, str) else None
        self._model_init: Any = None
        self._loss_settings: ModuleLossSettings | None = None
        self._tensor_parallel_size = 1
        self._window: Window | None = None
        self._has_divided_the_loss = False
        self.evaluations = Evaluations(streaming_metrics(compute_metrics))
        self._preparations = ExitStack()
        self._step_was_skipped = False
        self.model: Any = None
        made = made_at_once(model, model_class)
        if made is None:
            self._model_init = model
            self._keep_hyper_parameters()
        else:
            self._adopt(made)

    def _adopt(self, model: nn.Module) -> None:
        self.model = model
        self._loss_settings = None
        config: Any = getattr(model, "config", None)
        if config is not None:
            config.use_cache = self.args.use_cache
        wanted = getattr(self.args, "generation_config", None)
        if wanted is not None:
            self.model.generation_config = generation.load_config(wanted)
        if self.generates:
            generation.check_that_it_can_generate(model)
        self._keep_hyper_parameters()

    def _keep_hyper_parameters(self) -> None:
        self.save_hyperparameters(shown_hyper_parameters(type(self), self.args, self._source_name))

    # ---- The model ---------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, so that the module can stand in its place in your own loop."""
        return self.model(*args, **kwargs)

    def configure_model(self) -> None:
        """Make the model, if a function does, and let a ModelParallelStrategy split it; each once.

        Raises:
            TypeError: `configure_callbacks` has left `RunHooks` out, without which a run would go wrong.
        """
        if self.model is None:
            self._adopt(made_by(self._model_init))
        pl_trainer = self.attached_trainer()
        if pl_trainer is not None and not are_called_by(pl_trainer):
            raise TypeError(
                f"{type(self).__name__}.configure_callbacks() leaves out the callback with which TransformersModule "
                "prepares the model and computes metrics: let it return [*super().configure_callbacks(), ...]."
            )
        strategy = getattr(pl_trainer, "strategy", None)
        self._tensor_parallel_size = preparation.split_model(self.model, strategy, self.args)
        self._loss_settings = None

    @property
    def loss_settings(self) -> ModuleLossSettings:
        """What the loss depends on, as it is read from the model, the arguments and the lightning.Trainer."""
        if self._loss_settings is None:
            self._loss_settings = loss_settings_of(self.model, self.args, self.compute_loss_func)
        settings = self._loss_settings
        settings.args.world_size = getattr(self.attached_trainer(), "world_size", 1)
        settings.tensor_parallel_size = self._tensor_parallel_size
        return settings

    @property
    def learning_rate(self) -> float:
        """The learning rate of the arguments, which Lightning's learning rate finder sets."""
        return self.args.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self.args.learning_rate = value
        self._keep_hyper_parameters()

    @property
    def label_names(self) -> list[str]:
        """The inputs that are labels."""
        return self.loss_settings.label_names

    @property
    def rank(self) -> int:
        """Rank of this process among all processes."""
        pl_trainer = self.attached_trainer()
        return process_rank() if pl_trainer is None else pl_trainer.global_rank

    @property
    def generates(self) -> bool:
        """Whether predictions are what the model generates."""
        return generation.is_asked_for(self.args)

    @property
    def has_own_prediction_outputs(self) -> bool:
        """Whether a subclass overrides `prediction_outputs`."""
        return type(self).prediction_outputs is not TransformersModule.prediction_outputs

    def attached_trainer(self) -> pl.Trainer | None:
        """The lightning.Trainer at work; None in your own loop, or Fabric's."""
        try:
            trainer = self.trainer
        except RuntimeError:
            return None
        return trainer if isinstance(trainer, pl.Trainer) else None

    def __getstate__(self) -> dict[str, Any]:
        # Callbacks that average weights copy the module; what belongs to the current run stays behind.
        state = super().__getstate__()
        return {**state, "_preparations": ExitStack(), "_window": None}

    # ---- Hooks for subclasses ----------------------------------------------------------------------------------------

    def compute_loss(
        self, inputs: dict[str, Any], num_items_in_window: torch.Tensor | int | None = None
    ) -> tuple[torch.Tensor, Any]:
        """Run the model on a batch; override for another loss.

        Parameters:
            inputs: the batch, on the module's device.
            num_items_in_window: label tokens in the window of the optimizer step; the sum of the batch's losses is
                divided by it. In a lightning.Trainer with `average_tokens_across_devices` it counts the tokens of all
                processes. If it is None, the loss is the mean over the batch.

        Returns:
            the loss, and the model's outputs, from which predictions are taken in evaluations.
        """
        return losses.loss_and_outputs(self.loss_settings, self.model, inputs, num_items_in_window)

    def prediction_outputs(self, inputs: dict[str, Any], wants_loss: bool = True) -> tuple[Any, Any, Any]:
        """Loss, predictions and labels of one batch of an evaluation; override to change what a prediction is.

        Parameters:
            inputs: the batch, on the module's device.
            wants_loss: false in `predict`, which asks for nothing but predictions.

        Returns:
            the three; None for what is missing. Predictions are logits, or generated tokens.
        """
        settings = self.loss_settings
        can_give_loss = is_loss_to_be_had(inputs, settings.label_names, settings.can_return_loss)
        gives_loss = wants_loss and can_give_loss
        if self.generates:
            return self._generated_outputs(inputs, gives_loss)
        labels, value = None, None
        if gives_loss:
            labels = labels_in(inputs, settings.label_names)
            value, outputs = self._loss_of(inputs, self.items_in_window([inputs]))
        else:
            outputs = self.model(**inputs)
        are_compared = self.compute_metrics is not None and self.preprocess_logits_for_metrics is None
        compared = settings.label_names if are_compared else None
        has_loss = gives_loss or (can_give_loss and has_loss_in(outputs))
        return value, logits_in(outputs, outputs_to_ignore(self.model), labels, has_loss, compared), labels

    def _generated_outputs(self, inputs: dict[str, Any], gives_loss: bool) -> tuple[Any, Any, Any]:
        keywords = generation.keywords_of_a_call(self.args, self.generation_kwargs)
        tokens = generation.generated_tokens(self.model, inputs, keywords, self.loss_settings.args.world_size)
        tokens, labels = generation.padded_alike(self.model, tokens, inputs.get("labels"), self._pad_tokens)
        value = self._loss_of(inputs, None)[0] if gives_loss else None
        return value, tokens, labels

    def _pad_tokens(self, tokens: torch.Tensor, length: int) -> torch.Tensor:
        return generation.padded(tokens, length, generation.padding_token(self.model, self.processing_class))

    def optimizer_groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups: all parameters of the module, norms and biases without weight decay."""
        return parameter_groups(self, decayed_parameter_names(self), self.args.weight_decay)

    # ---- Training ----------------------------------------------------------------------------------------------------

    def configure_callbacks(self) -> list[pl.Callback]:
        """What the module does at the hooks of a run; a subclass adds its own callbacks to `super()`'s."""
        if not are_called_by(self.trainer):
            # Before all others, which look at what it logs.
            self.trainer.callbacks.insert(0, RunHooks())  # type: ignore[attr-defined]
        return []

    def check_run(self, pl_trainer: pl.Trainer, stage: str) -> None:
        """Refuse what a training cannot do, and warn of arguments that the module does not act on."""
        if stage == "fit":
            preparation.check_accumulation(pl_trainer)
            warn_of_ignored_arguments(self.args, pl_trainer)

    def prepare_training(self) -> None:
        """Prepare the model, and put it into training mode if `from_pretrained` has left it in evaluation mode."""
        self._preparations.close()
        self._preparations.enter_context(preparation.prepared_for_training(self))
        self._window = None
        preparation.put_into_training_mode(self.model)

    def undo_preparations(self) -> None:
        """Undo what was done to the model for the length of the training."""
        self._preparations.close()

    def on_train_start(self) -> None:
        """A trial begins, for which Lightning takes the callbacks away; else one of them has done this."""
        if not are_called_by(self.trainer):
            self.set_optimizer_modes("train")

    def set_optimizer_modes(self, mode: str) -> None:
        """Put optimizers that have modes into one, "train" or "eval".

        Schedule-free optimizers train other weights than they are evaluated with.
        """
        for optimizer in self.trainer.optimizers:
            if callable(getattr(optimizer, mode, None)):
                getattr(optimizer, mode)()

    def items_in_window(self, window: list[Any]) -> torch.Tensor | int | None:
        """Count the label tokens of an optimizer step's micro-batches; None if the loss is not divided by them.

        All processes call this. Without a lightning.Trainer each counts its own tokens.

        Parameters:
            window: the micro-batches of the step.
        """
        settings = self.loss_settings
        if not settings._loss_head.is_known and (self.training or settings.args.loss_normalization == EXACT):
            is_own = type(self).compute_loss is not TransformersModule.compute_loss
            settings._loss_head = find_loss_head(settings, self.model, window, self.device, is_own)
        has_labels = all(isinstance(batch, Mapping) and "labels" in batch for batch in window)
        if not (has_labels or settings._loss_head.is_exact):
            return None
        return losses.items_in_window(settings, window, self.device)

    def training_step(self, batch: Any, batch_idx: int = 0) -> torch.Tensor:
        """Forward pass of a micro-batch; logs `train_loss` of the window with which the optimizer steps."""
        pl_trainer, settings, inputs = self.attached_trainer(), self.loss_settings, model_inputs(batch)
        accumulation = 1 if pl_trainer is None else pl_trainer.accumulate_grad_batches
        steps = pl_trainer is None or (batch_idx + 1) % accumulation == 0 or pl_trainer.is_last_batch
        known = getattr(getattr(pl_trainer, "train_dataloader", None), "handed_out", {}).get(batch_idx)
        window = self._window
        if window is None or batch_idx % accumulation == 0:
            # A training may resume in the middle of a window, whose remaining micro-batches then count for themselves.
            others = accumulation - batch_idx % accumulation - 1
            upcoming = upcoming_batches(pl_trainer, others) if pl_trainer is not None and known is None else []
            window = self._window = window_of(self.items_in_window, inputs, known, upcoming)
        number, settings.current_gradient_accumulation_steps = window.number, window.size
        value, _ = self._loss_of(inputs, number)
        value = losses.normalised(settings, value, number)
        window.loss = window.loss + value.detach()
        # Whatever Lightning divides it by next.
        self._has_divided_the_loss = True
        if steps:
            self._window = None
            self._log_train_loss(window.loss)
        return value

    def _loss_of(self, inputs: dict[str, Any], number: torch.Tensor | int | None) -> tuple[torch.Tensor, Any]:
        value, outputs = self.compute_loss(dict(inputs), number)
        return losses.scaled_for_mean_gradient(self.loss_settings, value, number), outputs

    def _log_train_loss(self, value: torch.Tensor) -> None:
        pl_trainer: Any = self.attached_trainer()
        if pl_trainer is None or not pl_trainer.training:
            return
        # Processes wait for each other if loggers or callbacks read it; in between, each bar shows its process's loss.
        is_told = (pl_trainer.global_step + 1) % max(pl_trainer.log_every_n_steps, 1) == 0
        is_told = is_told or is_watched("train_loss", pl_trainer.callbacks)
        # Lightning reads it from the device after each micro-batch if it is for a bar.
        shown = bool(getattr(pl_trainer.progress_bar_callback, "is_enabled", pl_trainer.progress_bar_callback))
        self.log("train_loss", value, prog_bar=shown, on_step=True, on_epoch=False, sync_dist=is_told, batch_size=1)

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward on the loss before Lightning has divided it, unless a subclass's `training_step` made it."""
        pl_trainer = self.attached_trainer() if self.automatic_optimization else None
        division = 1 if pl_trainer is None else pl_trainer.accumulate_grad_batches
        if division > 1 and self._has_divided_the_loss:
            # The division's own backward pass divides this number again, by itself: exactly 1 is left.
            kwargs["gradient"] = torch.full_like(loss, division)
        self._has_divided_the_loss = False
        super().backward(loss, *args, **kwargs)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip to the lightning.Trainer's `gradient_clip_val`, or if that is None to `max_grad_norm`."""
        preparation.clip_gradients(self, optimizer, gradient_clip_val, gradient_clip_algorithm, self.args.max_grad_norm)

    # ---- Optimizer and schedule --------------------------------------------------------------------------------------

    def configure_optimizers(self) -> Any:
        """Make the optimizer and the schedule that the arguments name; the schedule ends with the run."""
        optimizer, schedule = self.optimizer_and_schedule(steps_of_training(self.trainer))
        return preparation.for_lightning(self, optimizer, schedule)

    def optimizer_and_schedule(self, num_training_steps: float | None = None) -> tuple[Any, Any]:
        """Make optimizer and schedule, for your own loop too.

        Parameters:
            num_training_steps: optimizer steps of the whole training.

        Returns:
            the two; the schedule steps once for each optimizer step.

        Raises:
            ValueError: the schedule needs to know the number of steps.
        """
        optimizer = preparation.make_optimizer(self)
        return optimizer, preparation.make_schedule(self, optimizer, num_training_steps)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Run forward, backward and step in one, as Lightning does; the step finds gradients in place."""
        scale = self._loss_scale()
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self._step_was_skipped = scale is not None and self._loss_scale() < scale

    @property
    def step_was_skipped(self) -> bool:
        """Whether loss scaling has left the last optimizer step out."""
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
            weights_only: false loads any Python object, and may run any code that the file brings along.
            kwargs: keywords of the module, which come before what the checkpoint says. A model that is none of
                transformers' classes has to be given as `model=`.

        Returns:
            the module, of the class that this is called on.

        Raises:
            ValueError: the folder is damaged, or the checkpoint does not say how its model is made.
        """
        if isinstance(checkpoint_path, (str, os.PathLike)) and Path(checkpoint_path).is_dir():
            module = module_from_folder(cls, Path(checkpoint_path), strict, kwargs)
            return module if map_location is None else module.to(map_location)
        # What a checkpoint runs when it is read is nobody's wish.
        only = True if weights_only is None else weights_only
        kwargs = {**model_kept_in(cls, checkpoint_path), **kwargs}
        return super().load_from_checkpoint(checkpoint_path, map_location, hparams_file, strict, only, **kwargs)

    def export_pretrained(self, directory: str | os.PathLike[str], max_shard_size: int | str | None = None) -> None:
        """Write the model, and the processing class, to a folder that `from_pretrained` loads; all processes call this.

        Parameters:
            directory: the folder; it appears when it is complete.
            max_shard_size: bytes, or text such as "5GB", beyond which weights are spread over several files.

        Raises:
            ValueError: there is no model yet, or its weights cannot be gathered.
            OSError: the folder cannot be written.
        """
        export_model(self, Path(directory), max_shard_size)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights, whether parts of the module are compiled, or were then, or not."""
        return super().load_state_dict(fitted(self, state_dict)[0], strict, assign)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Mark a checkpoint of weights alone too, for which Lightning calls no callback."""
        self.mark_checkpoint(checkpoint)

    def mark_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Say in a checkpoint what wrote it, and how the model is made."""
        own = hyper_parameters_of(self.model, self.args, self._source_name)
        checkpoint[MARK] = mark_of(self.trainer, own)
        # Under names that do not say which parts are compiled.
        weights = checkpoint["state_dict"].items()
        checkpoint["state_dict"] = {name.replace(f"{COMPILED_PART}.", ""): value for name, value in weights}
        shown = checkpoint.setdefault(self.CHECKPOINT_HYPER_PARAMS_KEY, {})
        if isinstance(shown.get("model"), nn.Module):
            # A subclass that keeps its options has kept the model too, which nobody could load safely.
            del shown["model"]

    # ---- Evaluation --------------------------------------------------------------------------------------------------

    def begin_evaluation(self, stage: str) -> None:
        """Forget the evaluation before, and put optimizers that have modes into the one for it."""
        self.evaluations.begin(self.trainer, stage)
        self.set_optimizer_modes("eval")

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        """One batch of a validation."""
        return self.evaluations.step(self, VALIDATION, batch, dataloader_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        """One batch of a test."""
        return self.evaluations.step(self, TEST, batch, dataloader_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Return the logits of a batch, or generated tokens under `predict_with_generate`.

        Parameters:
            batch: what the loader hands out.
            batch_idx: its number, from 0.
            dataloader_idx: the number of its loader, from 0.
        """
        return self.prediction_outputs(model_inputs(batch), wants_loss=False)[1]


def _of_module(act: Callable[..., None]) -> Any:
    """Make a hook of what is to be done with a TransformersModule; other modules are left alone."""

    def hook(self: Any, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        if isinstance(pl_module, TransformersModule):
            act(pl_module, trainer, *args, **kwargs)

    return hook


class RunHooks(pl.Callback):
    """Prepares a module for its training, begins and ends its evaluations, and marks its checkpoints.

    As hooks of the module these would be lost if a subclass overrides such a hook, since in Lightning nobody calls
    `super()` there. It has no state, and leaves other modules that its lightning.Trainer runs afterwards alone.
    """

    setup = _of_module(lambda module, trainer, stage: module.check_run(trainer, stage))
    on_fit_start = _of_module(lambda module, trainer: module.prepare_training())
    on_fit_end = on_exception = _of_module(lambda module, trainer, *error: module.undo_preparations())
    on_train_start = _of_module(lambda module, trainer: module.set_optimizer_modes("train"))
    # An optimizer with modes leaves the weights that are meant to be used.
    on_train_end = _of_module(lambda module, trainer: module.set_optimizer_modes("eval"))
    on_validation_epoch_start = _of_module(lambda module, trainer: module.begin_evaluation(VALIDATION))
    on_test_epoch_start = _of_module(lambda module, trainer: module.begin_evaluation(TEST))
    on_validation_epoch_end = on_test_epoch_end = _of_module(lambda module, trainer: module.evaluations.end(module))
    on_validation_end = _of_module(
        lambda module, trainer: module.set_optimizer_modes("train" if trainer.state.fn == "fit" else "eval")
    )
    on_save_checkpoint = _of_module(lambda module, trainer, checkpoint: module.mark_checkpoint(checkpoint))


def are_called_by(pl_trainer: pl.Trainer) -> bool:
    """Whether a lightning.Trainer has `RunHooks` among its callbacks."""
    return any(isinstance(callback, RunHooks) for callback in pl_trainer.callbacks)  # type: ignore[attr-defined]
