"""`TFTrainer`: the methods of the interface's first edition, for a Keras 3 model on torch."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from littrainer.arguments.training_arguments import TrainingArguments
from littrainer.distributed.collectives import reduce_across_processes
from littrainer.evaluation.results import PredictionOutput, TrainOutput
from littrainer.keras.data import (
    FEATURES,
    LABELS,
    BatchedPairs,
    collate_pairs,
    make_loader,
    to_pair_dataset,
)
from littrainer.keras.model import (
    WITHOUT_DECAY,
    KerasModule,
    check_model,
    check_trainable,
    count_instances,
    run_keras_model,
)
from littrainer.loop.loss import should_sum_over_processes
from littrainer.trainer import Trainer

logger = logging.getLogger(__name__)

KERAS_FILE = "model.keras"
# Method that a TFTrainer does not call -> advice.
OVERRIDE_INSTEAD = {
    "compute_loss": "run_model, which returns loss and logits",
    **{f"get_{kind}_dataloader": f"get_{kind}_tfdataset" for kind in ("train", "eval", "test")},
    **dict.fromkeys(("create_optimizer", "create_scheduler"), "create_optimizer_and_scheduler"),
    **dict.fromkeys(("evaluation_loop", "prediction_loop"), "prediction_step, or evaluate and predict"),
    "apply_gradients": "training_step, which returns the gradients of a micro-batch; the Trainer steps the optimizer",
}
REPLICATED_ONLY = "a Keras model holds each variable whole. Leave it out; each process trains a copy of the model"
# Argument -> reason and advice.
REFUSED = {
    "label_smoothing_factor": "the loss of a TFTrainer is the model's. Compile the model with "
    "keras.losses.CategoricalCrossentropy(label_smoothing=...), or override run_model",
    "torch_compile": "torch.compile traces Keras's Python in many small pieces, which takes minutes for a model of "
    "two layers. Leave it out",
    "fsdp": REPLICATED_ONLY,
    "deepspeed": REPLICATED_ONLY,
}


class KerasTrainer(Trainer):
    def __init__(self, owner: TFTrainer, module: KerasModule, **keywords: Any):
        self.owner = owner
        # For the owner's current step.
        self.loss_of_step: torch.Tensor | None = None
        self.model_of_step: Any = None
        super().__init__(model=module, data_collator=collate_pairs, **keywords)
        if owner.overrides("training_step"):
            self.training_step = self._run_owner_training_step  # type: ignore[method-assign]
        if owner.overrides("prediction_step"):
            self.prediction_step = self._run_owner_prediction_step  # type: ignore[method-assign]

    # ---- Data and optimizer ------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        return make_loader(self.owner.get_train_tfdataset(), "get_train_tfdataset")

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return make_loader(self.owner.get_eval_tfdataset(eval_dataset), "get_eval_tfdataset", has_counts=True)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        return make_loader(self.owner.get_test_tfdataset(test_dataset), "get_test_tfdataset", has_counts=True)

    def num_examples(self, dataloader: Any) -> int:
        number = getattr(dataloader, "num_examples", None)
        return super().num_examples(dataloader) if number is None else number

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        self.owner.create_optimizer_and_scheduler(num_training_steps)
        self._require_optimizer().register_step_post_hook(self.model.apply_constraints)

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        return [name for name, _ in self.model.named_parameters() if not WITHOUT_DECAY.search(name)]

    # ---- Steps -------------------------------------------------------------------------------------------------------

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        if not batch_samples or batch_samples[0].get(LABELS) is None:
            return None
        number = torch.stack([count_instances(batch[LABELS]) for batch in batch_samples]).sum().to(device)
        return (reduce_across_processes(number) if should_sum_over_processes(self) else number) / 1

    @contextlib.contextmanager
    def _prepare_owner_step(self, model: Any, inputs: Any) -> Iterator[tuple[Any, Any]]:
        inputs = self._prepare_inputs(inputs)
        self.loss_of_step, self.model_of_step = None, model
        with self.compute_loss_context_manager():
            yield inputs[FEATURES], inputs.get(LABELS)

    def _run_owner_training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        with self._prepare_owner_step(model, inputs) as (features, labels):
            gradients = self.owner.training_step(features, labels, num_items_in_batch)
        parameters = self.owner.trainable_parameters()
        if not isinstance(gradients, (list, tuple)) or len(gradients) != len(parameters):
            raise TypeError(
                f"{type(self.owner).__name__}.training_step returned a {type(gradients).__name__}, and has to return a "
                f"list of gradients, one for each of the {len(parameters)} in model.trainable_variables."
            )
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                parameter.grad = gradient.detach() if parameter.grad is None else parameter.grad + gradient.detach()
        return torch.zeros((), device=self.args.device) if self.loss_of_step is None else self.loss_of_step

    def _run_owner_prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Sequence[str] | None = None
    ) -> tuple[Any, Any, Any]:
        with torch.no_grad(), self._prepare_owner_step(model, inputs) as (features, labels):
            number = self._get_num_items_in_batch([{FEATURES: features, LABELS: labels}], self.args.device)
            logits = self.owner.prediction_step(features, labels, number)
        # The loss is set if the override calls `super()`.
        return (self.loss_of_step, None, None) if prediction_loss_only else (self.loss_of_step, logits, labels)

    def run_step(self, features: Any, labels: Any, number_of_instances: Any, training: bool) -> dict[str, Any]:
        model = self.model if self.model_of_step is None else self.model_of_step
        model.train(training)
        outputs: dict[str, Any] = model(features, labels, number_of_instances)
        if labels is not None:
            self.loss_of_step = outputs["loss"].detach()
        return outputs

    # ---- Evaluation, logging and saving ------------------------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Sequence[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        return self.owner.evaluate(eval_dataset)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        self.owner.log(logs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not _internal_call and self.args.should_save:
            folder = output_dir or self.args.output_dir
            os.makedirs(folder, exist_ok=True)
            try:
                self.owner.model.save(os.path.join(folder, KERAS_FILE))
            except (NotImplementedError, TypeError, ValueError) as error:
                logger.warning(
                    "No %s is written; the weights are in model.safetensors. Keras says: %s", KERAS_FILE, error
                )
        super().save_model(output_dir, _internal_call)


class TFTrainer:
    """A trainer of Keras 3 models on their torch backend, with the methods of the first edition's TFTrainer.

    Other attributes (`add_callback`, `state`, `push_to_hub` and so on) are those of a Trainer.

    Parameters:
        model: a Keras model, compiled with a loss, or whose `call` returns a loss for labels.
        args: TFTrainingArguments, or TrainingArguments.
        train_dataset, eval_dataset: samples (features, labels): a sequence, a torch dataset, or a tf.data.Dataset.
        compute_metrics: takes an `EvalPrediction` of NumPy arrays, returns a dict of metrics.
        tb_writer: a SummaryWriter of torch to log to.
        optimizers: optimizer and schedule of torch to use instead of those of the arguments.

    Raises:
        NotImplementedError: the model is one of TensorFlow or JAX, or an argument is not supported.
        TypeError, ValueError: the input is wrong; the message says what to pass.
    """

    def __init__(
        self,
        model: Any,
        args: Any,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        compute_metrics: Callable[[Any], dict[str, float]] | None = None,
        tb_writer: Any = None,
        optimizers: tuple[Any, Any] = (None, None),
    ):
        check_model(model)
        self._check(args, optimizers)
        self.model = model
        train_pairs = to_pair_dataset(train_dataset, "train_dataset")
        eval_pairs = to_pair_dataset(eval_dataset, "eval_dataset")
        if not model.built:
            samples = eval_pairs if train_pairs is None else train_pairs
            if not samples:
                raise ValueError(
                    f"{type(model).__name__} has no variables yet, and there is no sample to build it with: call "
                    "model.build(input_shape), or the model on a batch, before TFTrainer."
                )
            with torch.no_grad():
                model(collate_pairs([samples[0]])[FEATURES], training=False)
        self.torch_trainer = KerasTrainer(
            self,
            KerasModule(model, self._run_on_device),
            args=args,
            train_dataset=train_pairs,
            eval_dataset=eval_pairs,
            compute_metrics=compute_metrics,
            optimizers=optimizers,
        )
        if tb_writer is not None:
            from littrainer.tracking.tensorboard import TensorBoardCallback

            self.torch_trainer.remove_callback(TensorBoardCallback)
            self.torch_trainer.add_callback(TensorBoardCallback(tb_writer))
        for service, name in (("wandb", "setup_wandb"), ("comet_ml", "setup_comet")):
            if service in (self.args.report_to or []) and self.overrides(name):
                getattr(self, name)()

    def _check(self, args: Any, optimizers: tuple[Any, Any]) -> None:
        name = type(self).__name__
        if not isinstance(args, TrainingArguments):
            raise TypeError(
                f"TFTrainer takes TFTrainingArguments as args, and they are a {type(args).__name__}: "
                'TFTrainer(model, TFTrainingArguments("folder"), ...).'
            )
        for argument, reason in REFUSED.items():
            if getattr(args, argument):
                raise NotImplementedError(f"{argument}={getattr(args, argument)!r}: {reason}.")
        packages = {type(part).__module__.partition(".")[0] for part in optimizers}
        if packages & {"keras", "tensorflow", "tf_keras"}:
            raise TypeError(
                "optimizers holds an optimizer or a schedule of Keras, and a Keras model on torch is trained by "
                "torch's: pass (torch.optim.AdamW(model.parameters()), None), or leave it to the arguments (optim, "
                "learning_rate, weight_decay, lr_scheduler_type, poly_power)."
            )
        for method, replacement in OVERRIDE_INSTEAD.items():
            if getattr(type(self), method, None) is not getattr(TFTrainer, method, None):
                raise NotImplementedError(
                    f"{name} overrides {method}, which nothing calls in a TFTrainer: override {replacement}."
                )
        if self.overrides("training_step") and (args.world_size > 1 or args.fp16):
            raise NotImplementedError(
                f"{name}.training_step returns gradients, which several processes would not share, and which fp16 "
                f"would have to scale (world_size={args.world_size}, fp16={args.fp16}): override run_model instead, "
                "or train in one process with bf16 or neither."
            )

    def __getattr__(self, name: str) -> Any:
        if "torch_trainer" in vars(self):
            return getattr(self.torch_trainer, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        inner = vars(self).get("torch_trainer")
        if inner is not None and name in ("train_dataset", "eval_dataset"):
            value = to_pair_dataset(value, name)
        elif inner is not None and name == "model":
            raise AttributeError("Another model needs another optimizer: make another TFTrainer for it.")
        is_local = inner is None or name in vars(self) or hasattr(type(self), name) or not hasattr(inner, name)
        object.__setattr__(self if is_local else inner, name, value)

    def overrides(self, name: str) -> bool:
        """Return whether this method is overridden."""
        return name in vars(self) or getattr(type(self), name) is not getattr(TFTrainer, name)

    def setup_wandb(self) -> None:
        """Report to Weights & Biases; `report_to="wandb"` does so too, and calls an override of this method."""
        self._report_to("wandb")

    def setup_comet(self) -> None:
        """Report to Comet; `report_to="comet_ml"` does so too, and calls an override of this method."""
        self._report_to("comet_ml")

    def _report_to(self, service: str) -> None:
        if service not in (self.args.report_to or []):
            from littrainer.tracking.selection import get_tracker_class

            self.torch_trainer.add_callback(get_tracker_class(service))

    @property
    def global_step(self) -> int:
        """Optimizer steps done."""
        return self.torch_trainer.state.global_step

    @property
    def epoch_logging(self) -> float:
        """Epochs done, with the fraction of the current epoch."""
        return self.torch_trainer.state.epoch or 0

    # ---- Data --------------------------------------------------------------------------------------------------------

    def get_train_tfdataset(self) -> Any:
        """Return shuffled micro-batches (features, labels) to train on; override to return another iterable.

        A tf.data.Dataset of batches is supported. Batches without length need `max_steps`.
        """
        return BatchedPairs(Trainer.get_train_dataloader(self.torch_trainer))

    def get_eval_tfdataset(self, eval_dataset: Any = None) -> tuple[Any, int, int]:
        """Return batches (features, labels) to evaluate on, how many of them to read, and the samples in them.

        Parameters:
            eval_dataset: samples (features, labels); by default the Trainer's.
        """
        dataset = to_pair_dataset(eval_dataset, "eval_dataset")
        return self._add_counts(Trainer.get_eval_dataloader(self.torch_trainer, dataset))

    def get_test_tfdataset(self, test_dataset: Any) -> tuple[Any, int, int]:
        """Return batches (features, labels) to predict, how many of them to read, and the samples in them.

        Parameters:
            test_dataset: samples (features, labels), or features alone that are no tuples.
        """
        dataset = to_pair_dataset(test_dataset, "test_dataset")
        return self._add_counts(Trainer.get_test_dataloader(self.torch_trainer, dataset))

    def _add_counts(self, loader: Any) -> tuple[Any, int, int]:
        number, size = len(loader.dataset), self.args.eval_batch_size
        incomplete = number % size > 0 and not self.args.dataloader_drop_last
        return BatchedPairs(loader), number // size + incomplete, number

    # ---- Training ----------------------------------------------------------------------------------------------------

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Create `optimizer` and `lr_scheduler` from the arguments; override to set others, of torch.

        Parameters:
            num_training_steps: optimizer steps of the whole training.
        """
        Trainer.create_optimizer_and_scheduler(self.torch_trainer, num_training_steps)

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Train the model.

        Parameters:
            resume_from_checkpoint: a checkpoint's folder; by default the newest in `output_dir`, if any, as in the
                first edition. False starts from the beginning.

        Returns:
            optimizer steps done, the mean loss over them, and metrics of the whole training.
        """
        from littrainer.checkpoint.manager import get_last_checkpoint

        # The model may have changed.
        if not self.overrides("run_model"):
            check_trainable(self.model)
        self.torch_trainer.model.register_variables()
        if resume_from_checkpoint is None and os.path.isdir(self.args.output_dir):
            newest = get_last_checkpoint(self.args.output_dir)
            resume_from_checkpoint = newest is not None
            if newest is not None:
                logger.warning(
                    "Training resumes from the newest checkpoint in output_dir (%s), as in the first edition; "
                    "train(resume_from_checkpoint=False) starts from the beginning.",
                    os.path.basename(newest),
                )
        return self.torch_trainer.train(resume_from_checkpoint)

    def run_model(self, features: Any, labels: Any, training: bool) -> tuple[Any, Any]:
        """Return loss and logits of a batch; override for another loss or forward pass.

        Parameters:
            features, labels: tensors of torch, in dicts or tuples as in the samples; labels may be None in `predict`.
            training: whether layers such as dropout behave as in training.

        Returns:
            the mean loss, or the loss of each example, and the logits.
        """
        return run_keras_model(self.model, features, labels, training)

    def _run_on_device(self, features: Any, labels: Any, training: bool) -> tuple[Any, Any]:
        import keras

        with keras.device(str(self.args.device)):
            outputs = self.run_model(features, labels, training)
        if not isinstance(outputs, (tuple, list)) or len(outputs) != 2:
            raise TypeError(f"run_model returned a {type(outputs).__name__}, and has to return a pair (loss, logits).")
        return outputs[0], outputs[1]

    def training_step(self, features: Any, labels: Any, nb_instances_in_global_batch: Any) -> list[Any]:
        """Return gradients of a micro-batch; an override may change the gradients of `super()`.

        Parameters:
            features, labels: as in `run_model`.
            nb_instances_in_global_batch: labels that are not -100, or rows, in all micro-batches of the optimizer step.

        Returns:
            a tensor for each of `trainable_parameters()`, None if the loss does not depend on it.
        """
        outputs = self.torch_trainer.run_step(features, labels, nb_instances_in_global_batch, training=True)
        return list(torch.autograd.grad(outputs["loss"], self.trainable_parameters(), allow_unused=True))

    def trainable_parameters(self) -> list[Any]:
        """Return the torch parameters of `model.trainable_variables`, in order."""
        return [variable.value for variable in self.model.trainable_variables]

    def log(self, logs: dict[str, float]) -> None:
        """Add values to the history and log them to the trackers; override to log elsewhere too.

        Parameters:
            logs: names and values.
        """
        Trainer.log(self.torch_trainer, logs)

    # ---- Evaluation, prediction and saving ---------------------------------------------------------------------------

    def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
        """Evaluate on a dataset and log the metrics.

        Parameters:
            eval_dataset: samples (features, labels); by default the Trainer's.

        Returns:
            loss, metrics and speed, with the prefix `eval_`.
        """
        return Trainer.evaluate(self.torch_trainer, eval_dataset)

    def predict(self, test_dataset: Any) -> PredictionOutput:
        """Predict a dataset; metrics are computed if it has labels.

        Parameters:
            test_dataset: samples (features, labels), or features alone that are no tuples.

        Returns:
            predictions and labels as NumPy arrays of shape `(samples, ...)`, and metrics with the prefix `eval_`.
        """
        return self.torch_trainer.predict(test_dataset, metric_key_prefix="eval")

    def prediction_loop(
        self, dataset: Any, steps: int, num_examples: int, description: str, prediction_loss_only: bool | None = None
    ) -> PredictionOutput:
        """Return predictions, labels and metrics of batches.

        Parameters:
            dataset: batches (features, labels).
            steps: batches to read.
            num_examples: samples in them.
            description: "Evaluation" or "Prediction".
            prediction_loss_only: compute only the loss; by default as the arguments say.

        Returns:
            predictions and labels as NumPy arrays of shape `(samples, ...)`, and metrics.
        """
        loader = make_loader((dataset, steps, num_examples), "prediction_loop", has_counts=True)
        output = Trainer.evaluation_loop(self.torch_trainer, loader, description, prediction_loss_only)
        return PredictionOutput(output.predictions, output.label_ids, output.metrics)

    def prediction_step(self, features: Any, labels: Any, nb_instances_in_global_batch: Any) -> Any:
        """Return logits of a batch to evaluate or predict; override for other predictions.

        Parameters:
            features, labels: as in `run_model`.
            nb_instances_in_global_batch: labels that are not -100, or rows; None if there are no labels.
        """
        return self.torch_trainer.run_step(features, labels, nb_instances_in_global_batch, training=False)["logits"]

    def save_model(self, output_dir: str | None = None) -> None:
        """Save the weights, the arguments, and the whole model as model.keras, for keras.models.load_model.

        Parameters:
            output_dir: the folder; by default `args.output_dir`.
        """
        self.torch_trainer.save_model(output_dir)
