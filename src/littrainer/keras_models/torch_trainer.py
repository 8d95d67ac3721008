"""The Trainer that does the work of a `TFTrainer`, and asks that for whatever its subclasses may override."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from littrainer.distributed.collectives import process_count, reduced
from littrainer.evaluation.results import EvalLoopOutput, PredictionOutput
from littrainer.keras_models.module import KerasModule, count_instances
from littrainer.keras_models.pairs import (
    FEATURES,
    LABELS,
    BatchedPairs,
    LoaderOfBatches,
    collate_pairs,
    dataset_of_pairs,
    loader_of,
)
from littrainer.trainer import Trainer
from littrainer.training.loss import averages_over_processes

if TYPE_CHECKING:
    from littrainer.keras_models.tf_trainer import TFTrainer

logger = logging.getLogger(__name__)

PREFIX = "eval"


class KerasTrainer(Trainer):
    """Trains a Keras model for a `TFTrainer`.

    Methods that the first edition documents go to the `TFTrainer`, whose own versions come back to the methods here
    that are named after them with `own_`.

    Parameters:
        owner: the `TFTrainer`.
        module: its model.
        keywords: further ones of `Trainer`.
    """

    def __init__(self, owner: TFTrainer, module: KerasModule, **keywords: Any):
        self.owner = owner
        # What `training_step` and `prediction_step` of the first edition leave behind besides what they return, and the
        # model as it is prepared for them, with autocast for instance.
        self.loss_of_step: torch.Tensor | None = None
        self.model_of_step: Any = None
        self._is_told_of_missing_loss = False
        # The hook on the optimizer.
        self._constraints: Any = None
        super().__init__(model=module, data_collator=collate_pairs, **keywords)
        if owner.overrides("training_step"):
            self.training_step = self._training_step_of_owner  # type: ignore[method-assign]
        if owner.overrides("prediction_step"):
            self.prediction_step = self._prediction_step_of_owner  # type: ignore[method-assign]

    def take_model(self, module: KerasModule) -> None:
        """Go on with another model, and an optimizer and a schedule of its own."""
        self.model = self.model_wrapped = module
        self.optimizer = self.lr_scheduler = None
        self._model_is_prepared = False

    # ---- Data --------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """The loader of what the owner's `get_train_tfdataset` returns."""
        return loader_of(self.owner.get_train_tfdataset(), "get_train_tfdataset")

    def own_train_batches(self) -> BatchedPairs:
        """Batches of the train_dataset."""
        return BatchedPairs(super().get_train_dataloader())

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The loader of what the owner's `get_eval_tfdataset` returns."""
        return _loader_of_three(self.owner.get_eval_tfdataset(eval_dataset), "get_eval_tfdataset")

    def own_eval_batches(self, eval_dataset: Any) -> BatchedPairs:
        """Batches of a dataset of pairs, by default the eval_dataset."""
        if eval_dataset is not None:
            eval_dataset = dataset_of_pairs(eval_dataset, self.owner.read_sample, "eval_dataset")
        return BatchedPairs(super().get_eval_dataloader(eval_dataset))

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The loader of what the owner's `get_test_tfdataset` returns."""
        return _loader_of_three(self.owner.get_test_tfdataset(test_dataset), "get_test_tfdataset")

    def own_test_batches(self, test_dataset: Any) -> BatchedPairs:
        """Batches of a dataset of pairs, or of features alone."""
        dataset = dataset_of_pairs(test_dataset, self.owner.read_sample, "test_dataset")
        return BatchedPairs(super().get_test_dataloader(dataset))

    def num_examples(self, dataloader: Any) -> int:
        """Samples in a loader, as the owner has counted them where it made the batches itself."""
        known = dataloader.num_examples if isinstance(dataloader, LoaderOfBatches) else None
        return super().num_examples(dataloader) if known is None else known

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = [FEATURES, LABELS]

    # ---- Optimizer ---------------------------------------------------------------------------------------------------

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """The owner's, followed by the model's constraints after each of its steps."""
        self.owner.create_optimizer_and_scheduler(num_training_steps)
        if self._constraints is not None:
            self._constraints.remove()
        self._constraints = self._existing_optimizer().register_step_post_hook(self.model.apply_constraints)

    def own_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Those that the arguments name."""
        super().create_optimizer_and_scheduler(num_training_steps)

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """Names of the parameters that weight decay applies to."""
        return self.model.parameter_names_with_decay()

    # ---- Steps -------------------------------------------------------------------------------------------------------

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        if not batch_samples or LABELS not in batch_samples[0]:
            return None
        number = torch.stack([count_instances(batch[LABELS]) for batch in batch_samples]).sum().to(device)
        return (reduced(number) if averages_over_processes(self) else number) / 1

    def _training_step_of_owner(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Let the owner's `training_step` compute gradients, and add them to those of the window."""
        inputs = self._prepare_inputs(inputs)
        self.loss_of_step, self.model_of_step = None, model
        with self.compute_loss_context_manager():
            gradients = self.owner.training_step(inputs[FEATURES], inputs.get(LABELS), num_items_in_batch)
        add_gradients(self.owner.trainable_parameters(), gradients, f"{type(self.owner).__name__}.training_step")
        if self.loss_of_step is not None:
            return self.loss_of_step
        if not self._is_told_of_missing_loss:
            self._is_told_of_missing_loss = True
            logger.warning("training_step does not call TFTrainer's, so no loss is known: 0 is logged.")
        return torch.zeros((), device=self.args.device)

    def _prediction_step_of_owner(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Sequence[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Let the owner's `prediction_step` compute logits; the loss is what ours has noted, where it was called."""
        inputs = self._prepare_inputs(inputs)
        labels = inputs.get(LABELS)
        number = self._get_num_items_in_batch([inputs], self.args.device)
        self.loss_of_step, self.model_of_step = None, model
        with torch.no_grad(), self.compute_loss_context_manager():
            logits = self.owner.prediction_step(inputs[FEATURES], labels, number)
        return (self.loss_of_step, None, None) if prediction_loss_only else (self.loss_of_step, logits, labels)

    def run_step(self, features: Any, labels: Any, number_of_instances: Any, training: bool) -> dict[str, Any]:
        """Loss, where there are labels, and logits of a batch, by the model of the step at hand."""
        model = self.model if self.model_of_step is None else self.model_of_step
        model.train(training)
        outputs: dict[str, Any] = model(features, labels, number_of_instances)
        if labels is not None:
            self.loss_of_step = outputs["loss"].detach()
        return outputs

    # ---- Evaluation --------------------------------------------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Sequence[str] | None = None, metric_key_prefix: str = PREFIX
    ) -> dict[str, float]:
        """The owner's, which knows nothing of the other parameters."""
        return self.owner.evaluate(eval_dataset)

    def own_evaluate(self, eval_dataset: Any) -> dict[str, float]:
        """Evaluate on a dataset of pairs, by default the eval_dataset, and log the metrics."""
        return super().evaluate(eval_dataset, metric_key_prefix=PREFIX)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: Sequence[str] | None = None,
        metric_key_prefix: str = PREFIX,
    ) -> EvalLoopOutput:
        """One pass over a loader, by the owner's `prediction_loop`."""
        self._share_statistics()
        steps, number = len(dataloader), self.num_examples(dataloader)
        found = self.owner.prediction_loop(BatchedPairs(dataloader), steps, number, description, prediction_loss_only)
        if not isinstance(found, tuple) or len(found) != 3:
            raise TypeError(f"prediction_loop returned a {type(found).__name__}, and has to return a PredictionOutput.")
        return EvalLoopOutput(*found, num_samples=number)

    def _share_statistics(self) -> None:
        """Give each process the first one's moving statistics, which are those that are saved.

        Processes share them before a forward pass in training, and that pass leaves each with its own.
        """
        if process_count() > 1 and self.args.ddp_broadcast_buffers is not False:
            for buffer in self.model.buffers():
                dist.broadcast(buffer, src=0)

    def own_prediction_loop(
        self, batches: Any, steps: int, num_examples: int, description: str, prediction_loss_only: bool | None
    ) -> PredictionOutput:
        """One pass over batches."""
        loader = loader_of(batches, "the dataset of prediction_loop", steps, num_examples)
        output = super().evaluation_loop(loader, description, prediction_loss_only, metric_key_prefix=PREFIX)
        return PredictionOutput(output.predictions, output.label_ids, output.metrics)

    # ---- Logging and saving ------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """The owner's."""
        self.owner.log(logs)

    def own_log(self, logs: dict[str, float]) -> None:
        """Add values to the history and hand them to the callbacks."""
        super().log(logs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, of a call from outside also as model.keras."""
        if not _internal_call and self.args.should_save:
            self.owner.write_keras_file(self.args.output_dir if output_dir is None else output_dir)
        super().save_model(output_dir, _internal_call)


def add_gradients(parameters: list[Any], gradients: Any, name: str) -> None:
    """Add gradients to those that parameters have.

    Parameters:
        gradients: one for each parameter; None leaves its own as it is.
        name: the method that made them, for the error.

    Raises:
        TypeError, ValueError: they are no list of one tensor for each parameter.
    """
    if not isinstance(gradients, (list, tuple)):
        raise TypeError(f"{name} returned a {type(gradients).__name__}, and has to return a list of gradients.")
    if len(gradients) != len(parameters):
        raise ValueError(
            f"{name} returned {len(gradients)} gradients, and the model has {len(parameters)} trainable variables: "
            "return one for each of model.trainable_variables."
        )
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            parameter.grad = gradient.detach() if parameter.grad is None else parameter.grad + gradient.detach()


def _loader_of_three(returned: Any, name: str) -> Any:
    if not isinstance(returned, tuple) or len(returned) != 3:
        raise TypeError(
            f"{name} returned a {type(returned).__name__}, and has to return a tuple: batches (features, labels), how "
            "many of them to read, and the number of samples in them."
        )
    batches, steps, num_examples = returned
    return loader_of(batches, name, int(steps), int(num_examples))
