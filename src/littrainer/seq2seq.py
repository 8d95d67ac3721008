"""`Seq2SeqTrainer`: a Trainer whose predictions are generated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from littrainer.arguments.training_arguments import TrainingArguments
from littrainer.compat.v4_trainer import accept_earlier_keywords
from littrainer.evaluation import generation
from littrainer.evaluation.results import PredictionOutput
from littrainer.loop.overrides import register_package_class
from littrainer.trainer import Trainer


@register_package_class
class Seq2SeqTrainer(Trainer):
    """A Trainer that evaluates and predicts with the model's `generate`, if `predict_with_generate` is set.

    Parameters:
        args: `Seq2SeqTrainingArguments`; with plain `TrainingArguments` it predicts like a Trainer.

    The other parameters are the Trainer's.

    Raises:
        OSError, ValueError, TypeError: the generation config is invalid, or the model cannot generate.

    Examples:
        >>> from littrainer import Seq2SeqTrainer, Seq2SeqTrainingArguments
        >>> from transformers import DataCollatorForSeq2Seq
        >>> args = Seq2SeqTrainingArguments("runs/first", predict_with_generate=True, generation_max_length=8)
        >>> trainer = Seq2SeqTrainer(t5, args, DataCollatorForSeq2Seq(tokenizer))
        >>> len(trainer.predict(translations).predictions)
        4
    """

    # Keywords of the current `evaluate` or `predict`.
    _gen_kwargs: dict[str, Any] = {}  # noqa: RUF012

    @accept_earlier_keywords(tokenizer="processing_class")
    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Any = None,
        compute_loss_func: Any = None,
        compute_metrics: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        # Transformers' Seq2SeqTrainer does not have the Trainer's parameter between these two.
        preprocess_logits_for_metrics: Any = None,
        optimizer_cls_and_kwargs: Any = None,
        lightning: dict[str, Any] | None = None,
    ):
        super().__init__(
            model, args, data_collator, train_dataset, eval_dataset, processing_class, model_init, compute_loss_func,
            compute_metrics, callbacks, optimizers, optimizer_cls_and_kwargs, preprocess_logits_for_metrics, lightning,
        )  # fmt: skip

    def _validate_args(self) -> None:
        super()._validate_args()
        self._prepare_to_generate(self.model)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Return a new model from `model_init`, with the generation config of the arguments.

        Parameters:
            trial: the trial of a search.
        """
        model = super().call_model_init(trial)
        self._prepare_to_generate(model)
        return model

    def _prepare_to_generate(self, model: Any) -> None:
        generation.prepare(self.args, model, generates=not self._find_overrides("prediction_step"))

    @contextmanager
    def _use_generation_keywords(self, keywords: dict[str, Any]) -> Iterator[None]:
        """Generate with these keywords in the block; as in transformers, a short last batch counts as full."""
        unused = ", ".join(f"{name}={value!r}" for name, value in keywords.items() if value is not None)
        if unused and not getattr(self.args, "predict_with_generate", False):
            generation.log_unused_keywords(unused)
        before = self._gen_kwargs, self.gather_function
        self._gen_kwargs = generation.merge_generation_keywords(self.args, keywords)
        self.gather_function = self.accelerator.gather_each_sample
        try:
            yield
        finally:
            self._gen_kwargs, self.gather_function = before

    @staticmethod
    def load_generation_config(gen_config_arg: Any) -> Any:
        """Return the generation config for the argument `generation_config`.

        Parameters:
            gen_config_arg: a folder or file, a model's name, or a generation config.

        Raises:
            OSError, ValueError, TypeError: it cannot be read, has contradicting settings, or has another type.
        """
        return generation.load_config(gen_config_arg)

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: Sequence[str] | None = None,
        metric_key_prefix: str = "eval",
        **gen_kwargs: Any,
    ) -> dict[str, float]:
        """Evaluate on a dataset, log the metrics and return them.

        Parameters:
            eval_dataset, ignore_keys, metric_key_prefix: as in `Trainer.evaluate`.
            gen_kwargs: keywords of the model's `generate`, such as `max_length` and `num_beams`. They override the
                arguments, which override the model's generation config.
        """
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(chosen, dict):
            return self._evaluate_datasets(chosen, eval_dataset is None, ignore_keys, metric_key_prefix, **gen_kwargs)
        with self._use_generation_keywords(gen_kwargs):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: Sequence[str] | None = None,
        metric_key_prefix: str = "test",
        **gen_kwargs: Any,
    ) -> PredictionOutput:
        """Return generated token ids and labels as arrays `(samples, tokens)`, and metrics if there are labels.

        The arrays are padded to the generation config's `max_length`.

        Parameters:
            test_dataset, ignore_keys, metric_key_prefix: as in `Trainer.predict`.
            gen_kwargs: as in `evaluate`.
        """
        with self._use_generation_keywords(gen_kwargs):
            return super().predict(test_dataset, ignore_keys, metric_key_prefix)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: Sequence[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[Any, Any, Any]:
        """Return the loss of a batch, and token ids and labels of shape `(samples, tokens)`.

        Parameters:
            model, inputs, prediction_loss_only, ignore_keys: as in `Trainer.prediction_step`.
            gen_kwargs: keywords of the model's `generate`, instead of those of the call and the arguments.
        """
        if prediction_loss_only or not generation.is_generation_requested(self.args):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        generation.check_can_generate(self.model)
        inputs = self._prepare_inputs(inputs)
        labels = inputs.get("labels")
        keywords = gen_kwargs or self._gen_kwargs
        tokens = generation.generate_tokens(self.model, inputs, keywords, self.args.world_size, self.processing_class)
        tokens, padded_labels = generation.pad_tokens_and_labels(
            self.model, tokens, labels, self._pad_tensors_to_max_len
        )
        if labels is None:
            return None, tokens, None
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs = model(**inputs)
            if self.label_smoother is not None:
                loss = self.label_smoother(outputs, labels)
            else:
                loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        if self.args.log_loss_terms:
            self.session.eval_loss_terms.add_loss_terms((loss, outputs), len(labels))
        return loss.detach().mean(), tokens, padded_labels

    def _pad_tensors_to_max_len(self, tensor: torch.Tensor, max_length: int) -> torch.Tensor:
        return generation.pad_to_length(
            tensor, max_length, generation.find_padding_token(self.model, self.processing_class)
        )
