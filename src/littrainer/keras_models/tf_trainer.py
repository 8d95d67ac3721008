"""`TFTrainer`: the methods that the first edition of the interface documents, for a Keras 3 model on torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from littrainer.evaluation.results import PredictionOutput, TrainOutput
from littrainer.keras_models import model_checks
from littrainer.keras_models.module import KerasModule, run_keras_model
from littrainer.keras_models.pairs import (
    FEATURES,
    LABELS,
    collate_pairs,
    count_samples,
    dataset_of_pairs,
    reader_of_samples,
    steps_of,
)
from littrainer.keras_models.torch_trainer import KerasTrainer, add_gradients

logger = logging.getLogger(__name__)

KERAS_FILE = "model.keras"
# Methods that nothing calls on a TFTrainer, and have something in their place.
INSTEAD = {
    "compute_loss": "run_model, which returns loss and logits",
    "get_train_dataloader": "get_train_tfdataset",
    "get_eval_dataloader": "get_eval_tfdataset",
    "get_test_dataloader": "get_test_tfdataset",
    "create_optimizer": "create_optimizer_and_scheduler",
    "create_scheduler": "create_optimizer_and_scheduler",
    "evaluation_loop": "prediction_loop",
    "apply_gradients": "training_step, which returns the gradients of a micro-batch; the optimizer steps by itself",
}
# Methods of a Trainer that scripts alone call, so that an override of theirs takes effect.
CALLED_BY_SCRIPTS = {
    *("add_callback", "pop_callback", "remove_callback", "hyperparameter_search", "save_state"),
    *("log_metrics", "metrics_format", "save_metrics"),
}


class TFTrainer:
    """Trains and evaluates a Keras 3 model on its torch backend, with the methods of the first edition's TFTrainer.

    A `KerasTrainer` does the work; what this class does not have (`add_callback`, `state`, `push_to_hub` and so on) is
    looked up there.

    Parameters:
        model: a Keras model. Its loss is the one it was compiled with, or what its `call` returns for labels.
        args: TFTrainingArguments, or TrainingArguments.
        train_dataset, eval_dataset: samples (features, labels): a sequence, a torch dataset, a `datasets.Dataset`, an
            iterable, or a tf.data.Dataset.
        compute_metrics: takes an `EvalPrediction` of NumPy arrays, returns a dict of metrics.
        tb_writer: a SummaryWriter of torch to log to.
        optimizers: optimizer and schedule of torch to use instead of those that the arguments name.

    Raises:
        NotImplementedError: the model is one of TensorFlow or JAX, or an argument asks for what is not supported.
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
        self._refuse_model(model)
        model_checks.check_arguments(args)
        model_checks.check_optimizers(optimizers)
        self._refuse_overrides_that_nothing_calls()
        if self.overrides("training_step") and (args.world_size > 1 or args.fp16):
            raise NotImplementedError(
                f"{type(self).__name__}.training_step returns gradients, which several processes would not share, and "
                f"which fp16 would have to scale (world_size={args.world_size}, fp16={args.fp16}): override run_model "
                "instead, or train in one process with bf16 or neither."
            )
        self._model = model
        self.read_sample = reader_of_samples(model, args)
        datasets = {
            "train_dataset": dataset_of_pairs(train_dataset, self.read_sample, "train_dataset"),
            "eval_dataset": dataset_of_pairs(eval_dataset, self.read_sample, "eval_dataset"),
        }
        if not model.built:
            self._build_model(next((one for one in datasets.values() if one is not None), None))
        self.torch_trainer = KerasTrainer(
            self,
            KerasModule(model, self.run_on_device),
            args=args,
            compute_metrics=compute_metrics,
            optimizers=tuple(optimizers),
            **datasets,
        )
        self._set_up_trackers(tb_writer)

    def __getattr__(self, name: str) -> Any:
        if "torch_trainer" in vars(self):
            return getattr(self.torch_trainer, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        inner = vars(self).get("torch_trainer")
        is_own = inner is None or name in vars(self) or hasattr(type(self), name) or not hasattr(inner, name)
        object.__setattr__(self if is_own else inner, name, value)

    def _refuse_model(self, model: Any) -> None:
        model_checks.check_model(model)
        if not self.overrides("run_model"):
            model_checks.check_training_of(model)

    def overrides(self, name: str) -> bool:
        """Whether a subclass, or this instance, has its own version of a method of this class."""
        return name in vars(self) or getattr(type(self), name) is not getattr(TFTrainer, name)

    def _refuse_overrides_that_nothing_calls(self) -> None:
        kinds = type(self).__mro__[: type(self).__mro__.index(TFTrainer)]
        # What this class has itself is called.
        called = (vars(TFTrainer).keys() | CALLED_BY_SCRIPTS) - INSTEAD.keys()
        own = {name for kind in kinds for name in vars(kind) if not name.startswith("__")} - called
        known = sorted(name for name in own if hasattr(KerasTrainer, name) or name in INSTEAD)
        ignored = [f"{name} (override {INSTEAD[name]})" if name in INSTEAD else name for name in known]
        if ignored:
            raise NotImplementedError(
                f"{type(self).__name__} overrides what nothing calls in a TFTrainer: {'; '.join(ignored)}. Rename what "
                "is no override."
            )

    def _build_model(self, dataset: Any) -> None:
        sample = None if dataset is None else next(iter(dataset), None)
        if sample is None:
            raise ValueError(
                f"{type(self.model).__name__} has no variables yet, and there is no sample to build it with: call "
                "model.build(input_shape), or the model on a batch, before TFTrainer."
            )
        features = collate_pairs([sample])[FEATURES]
        with torch.no_grad():
            self.model(features, training=False)

    def _set_up_trackers(self, tb_writer: Any) -> None:
        if tb_writer is not None:
            from littrainer.tracking.tensorboard import TensorBoardCallback

            model_checks.check_writer(tb_writer)
            self.torch_trainer.remove_callback(TensorBoardCallback)
            self.torch_trainer.add_callback(TensorBoardCallback(tb_writer))
        for service, name in (("wandb", "setup_wandb"), ("comet_ml", "setup_comet")):
            if service in (self.args.report_to or []) and self.overrides(name):
                getattr(self, name)()

    def setup_wandb(self) -> None:
        """Report to Weights & Biases; `report_to="wandb"` does so by itself, and calls an override of this method."""
        self._report_to("wandb")

    def setup_comet(self) -> None:
        """Report to Comet; `report_to="comet_ml"` does so by itself, and calls an override of this method."""
        self._report_to("comet_ml")

    def _report_to(self, service: str) -> None:
        from littrainer.tracking.selection import tracker_class, trackers_for

        kind = tracker_class(service)
        if not any(isinstance(one, kind) for one in self.torch_trainer.callback_handler.callbacks):
            for callback in trackers_for([service]):
                self.torch_trainer.add_callback(callback)

    # ---- What scripts read and set -----------------------------------------------------------------------------------

    @property
    def model(self) -> Any:
        """The Keras model; another one that is set has to be built, and an optimizer goes with the one before."""
        return self._model

    @model.setter
    def model(self, model: Any) -> None:
        self._refuse_model(model)
        if not model.built:
            raise ValueError(f"{type(model).__name__} has no variables yet: call model.build(input_shape) first.")
        self._model = model
        self.read_sample = reader_of_samples(model, self.args)
        for dataset in (self.train_dataset, self.eval_dataset):
            if dataset is not None:
                dataset.read = self.read_sample
        self.torch_trainer.take_model(KerasModule(model, self.run_on_device))

    @property
    def train_dataset(self) -> Any:
        """The samples to train on."""
        return self.torch_trainer.train_dataset

    @train_dataset.setter
    def train_dataset(self, dataset: Any) -> None:
        self.torch_trainer.train_dataset = dataset_of_pairs(dataset, self.read_sample, "train_dataset")

    @property
    def eval_dataset(self) -> Any:
        """The samples to evaluate on."""
        return self.torch_trainer.eval_dataset

    @eval_dataset.setter
    def eval_dataset(self, dataset: Any) -> None:
        self.torch_trainer.eval_dataset = dataset_of_pairs(dataset, self.read_sample, "eval_dataset")

    @property
    def optimizer(self) -> Any:
        """The optimizer of torch; None before training where the arguments name it."""
        return self.torch_trainer.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:
        model_checks.check_optimizers((optimizer, None))
        self.torch_trainer.optimizer = optimizer

    @property
    def lr_scheduler(self) -> Any:
        """The schedule of torch; None before training where the arguments name it."""
        return self.torch_trainer.lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, schedule: Any) -> None:
        model_checks.check_optimizers((None, schedule))
        self.torch_trainer.lr_scheduler = schedule

    @property
    def global_step(self) -> int:
        """Optimizer steps done."""
        return self.torch_trainer.state.global_step

    @property
    def epoch_logging(self) -> float:
        """Epochs done, with the share of the one at hand."""
        return self.torch_trainer.state.epoch or 0

    # ---- Data --------------------------------------------------------------------------------------------------------

    def get_train_tfdataset(self) -> Any:
        """Micro-batches (features, labels) to train on, shuffled; override to bring your own iterable of them.

        A tf.data.Dataset of batches may be returned too. What has no length needs `max_steps`.

        Raises:
            ValueError: there is no train_dataset.
        """
        return self.torch_trainer.own_train_batches()

    def get_eval_tfdataset(self, eval_dataset: Any = None) -> tuple[Any, int, int]:
        """Batches (features, labels) to evaluate on, how many of them to read, and the samples in them.

        Parameters:
            eval_dataset: samples (features, labels); by default the Trainer's.

        Raises:
            ValueError: there is no eval_dataset, or it has no end.
        """
        return self._counted(self.torch_trainer.own_eval_batches(eval_dataset), "eval_dataset")

    def get_test_tfdataset(self, test_dataset: Any) -> tuple[Any, int, int]:
        """Batches (features, labels) to predict, how many of them to read, and the samples in them.

        Parameters:
            test_dataset: samples (features, labels), or features alone that are no tuples.

        Raises:
            ValueError: it is None, empty, or has no end.
        """
        return self._counted(self.torch_trainer.own_test_batches(test_dataset), "test_dataset")

    def _counted(self, batches: Any, name: str) -> tuple[Any, int, int]:
        number = count_samples(batches.loader.dataset, name)
        steps = steps_of(number, self.args.eval_batch_size, self.args.dataloader_drop_last)
        return batches, steps, number

    # ---- Training ----------------------------------------------------------------------------------------------------

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Make `optimizer` and `lr_scheduler` as the arguments name them; override to set your own, of torch.

        Parameters:
            num_training_steps: optimizer steps of the whole training.
        """
        self.torch_trainer.own_optimizer_and_scheduler(num_training_steps)

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Train the model.

        Parameters:
            resume_from_checkpoint: a checkpoint's folder; by default the newest one in `output_dir` where there is one,
                as in the first edition. False begins anew.

        Returns:
            optimizer steps done, the mean loss over them, and metrics of the whole training.

        Raises:
            ValueError: the data is missing, empty or of unknown length, or there is no such checkpoint.
        """
        from littrainer.checkpoint.verification import get_last_checkpoint

        # It may have been compiled, frozen or given adapters since.
        self._refuse_model(self.model)
        self.torch_trainer.model.take_variables()
        if resume_from_checkpoint is None and os.path.isdir(self.args.output_dir):
            newest = get_last_checkpoint(self.args.output_dir)
            resume_from_checkpoint = newest is not None
            if newest is not None:
                logger.warning(
                    "Training goes on from the newest checkpoint in output_dir (%s), as TFTrainer has it; "
                    "train(resume_from_checkpoint=False) begins anew.",
                    os.path.basename(newest),
                )
        return self.torch_trainer.train(resume_from_checkpoint)

    def run_model(self, features: Any, labels: Any, training: bool) -> tuple[Any, Any]:
        """Loss and logits of a batch; override for a loss or a forward pass of your own.

        Parameters:
            features, labels: tensors of torch, in dicts or tuples as in the samples; labels may be None in `predict`.
            training: whether layers such as dropout are to behave as in training.

        Returns:
            the mean loss, or one loss for each example, and the logits.
        """
        return run_keras_model(self.model, features, labels, training)

    def run_on_device(self, features: Any, labels: Any, training: bool) -> tuple[Any, Any]:
        """`run_model`, with what Keras makes meanwhile on the device of the arguments."""
        import keras

        with keras.device(str(self.args.device)):
            found = self.run_model(features, labels, training)
        if not isinstance(found, (tuple, list)) or len(found) != 2:
            raise TypeError(f"run_model returned a {type(found).__name__}, and has to return a pair (loss, logits).")
        loss, logits = found
        if labels is not None and not isinstance(loss, torch.Tensor):
            raise TypeError(f"run_model returned a {type(loss).__name__} as loss, which has to be a tensor of torch.")
        return loss, logits

    def training_step(self, features: Any, labels: Any, nb_instances_in_global_batch: Any) -> list[Any]:
        """Gradients of a micro-batch; an override may change those that this one returns.

        Parameters:
            features, labels: as in `run_model`.
            nb_instances_in_global_batch: labels that are not -100, or rows, in all micro-batches of the optimizer step.

        Returns:
            a tensor for each of `trainable_parameters()`, None where the loss does not depend on it.
        """
        outputs = self.torch_trainer.run_step(features, labels, nb_instances_in_global_batch, training=True)
        return list(torch.autograd.grad(outputs["loss"], self.trainable_parameters(), allow_unused=True))

    def trainable_parameters(self) -> list[Any]:
        """The parameters of torch behind `model.trainable_variables`, in that order."""
        return [variable.value for variable in self.model.trainable_variables]

    def apply_gradients(self, features: Any, labels: Any, nb_instances_in_global_batch: Any = None) -> None:
        """One optimizer step on a batch, by hand; `train` does this by itself.

        Parameters:
            features, labels: as in `run_model`.
            nb_instances_in_global_batch: what the losses are divided by; by default what the batch has.

        Raises:
            ValueError: there is no optimizer yet: call `create_optimizer_and_scheduler` first.
        """
        optimizer, schedule = self.torch_trainer._existing_optimizer(), self.lr_scheduler
        batch = self.torch_trainer._prepare_inputs({FEATURES: features, LABELS: labels})
        optimizer.zero_grad()
        gradients = self.training_step(batch[FEATURES], batch[LABELS], nb_instances_in_global_batch)
        add_gradients(self.trainable_parameters(), gradients, "training_step")
        if self.args.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(self.trainable_parameters(), self.args.max_grad_norm)
        optimizer.step()
        self.torch_trainer.model.apply_constraints()
        if schedule is not None:
            schedule.step()

    def log(self, logs: dict[str, float]) -> None:
        """Add values to the history and hand them to the trackers; override to log elsewhere too.

        Parameters:
            logs: names and values.
        """
        self.torch_trainer.own_log(logs)

    # ---- Evaluation and prediction -----------------------------------------------------------------------------------

    def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
        """Evaluate on a dataset and log the metrics.

        Parameters:
            eval_dataset: samples (features, labels); by default the Trainer's.

        Returns:
            loss, metrics and speed, each name with `eval_` in front.
        """
        return self.torch_trainer.own_evaluate(eval_dataset)

    def predict(self, test_dataset: Any) -> PredictionOutput:
        """Predict a dataset; metrics are computed where it has labels.

        Parameters:
            test_dataset: samples (features, labels), or features alone that are no tuples.

        Returns:
            predictions and labels as NumPy arrays of shape `(samples, ...)`, and metrics, each name with `eval_` in
            front.
        """
        return self.torch_trainer.predict(test_dataset, metric_key_prefix="eval")

    def prediction_loop(
        self,
        dataset: Any,
        steps: int,
        num_examples: int,
        description: str,
        prediction_loss_only: bool | None = None,
    ) -> PredictionOutput:
        """One pass over batches, shared by `evaluate` and `predict`.

        Parameters:
            dataset: batches (features, labels).
            steps: batches to read.
            num_examples: samples in them.
            description: "Evaluation" or "Prediction".
            prediction_loss_only: compute nothing but the loss; by default as the arguments say.

        Returns:
            predictions and labels as NumPy arrays of shape `(samples, ...)`, and metrics.
        """
        return self.torch_trainer.own_prediction_loop(dataset, steps, num_examples, description, prediction_loss_only)

    def prediction_step(self, features: Any, labels: Any, nb_instances_in_global_batch: Any) -> Any:
        """Logits of a batch to evaluate or predict; override to change what a prediction is.

        Parameters:
            features, labels: as in `run_model`.
            nb_instances_in_global_batch: labels that are not -100, or rows; None where there are no labels.
        """
        return self.torch_trainer.run_step(features, labels, nb_instances_in_global_batch, training=False)["logits"]

    # ---- Saving ------------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None) -> None:
        """Save the weights, the arguments, and the whole model as model.keras, which keras.models.load_model reads.

        Parameters:
            output_dir: the folder; by default `args.output_dir`.
        """
        self.torch_trainer.save_model(output_dir)

    def write_keras_file(self, output_dir: str) -> None:
        """Write model.keras; a warning tells of a model that Keras cannot write, for want of a configuration."""
        os.makedirs(output_dir, exist_ok=True)
        path = os.path.join(output_dir, KERAS_FILE)
        part = os.path.join(output_dir, f".unfinished-{KERAS_FILE}")
        try:
            self.model.save(part)
            os.replace(part, path)
        except (NotImplementedError, TypeError, ValueError) as error:
            logger.warning("No %s is written; the weights are in model.safetensors. Keras says: %s", KERAS_FILE, error)
        finally:
            if os.path.exists(part):
                os.remove(part)
