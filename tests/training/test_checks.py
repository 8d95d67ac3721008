"""What is given in the place of something else is refused by name, with what to give."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from littrainer import Trainer, TrainerCallback, TrainingArguments
from littrainer.training.checks import check_args, check_is_dataset, check_is_trainable, check_model_kind
from tests.scenarios.data import Rows, Stream, vector_rows
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import StepwiseTrainer, quiet_trainer


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"output_dir": "out"}, r"is a dict\. Make TrainingArguments\(\*\*args\) of it"),
        ("out", r"is text \('out'\)\. Make TrainingArguments\('out'\)"),
        (TrainingArguments, r"is the class TrainingArguments\. Make an instance"),
        (VectorClassifier(), r"is a VectorClassifier\. Give the Trainer's parameters by their names"),
    ],
)
def test_arguments_of_another_kind(args: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        check_args(args)


def test_any_object_with_the_fields_of_training_arguments_will_do() -> None:
    check_args(types.SimpleNamespace(per_device_train_batch_size=8))


@pytest.mark.parametrize(
    ("model", "model_init", "words"),
    [
        ("bert", None, r"model has to be a torch\.nn\.Module, and is text \('bert'\).*from_pretrained\('bert'\)"),
        (VectorClassifier, None, r"is the class VectorClassifier.*model_init=VectorClassifier"),
        (types.SimpleNamespace(model_type="bert"), None, "is a configuration"),
        ([1], None, "is a list.*by their names"),
        (None, VectorClassifier(), "model_init has to be a function.*pass it as model"),
        (None, "bert", r"model_init has to be a function that makes the model, and is text \('bert'\)"),
    ],
)
def test_models_of_another_kind(model: Any, model_init: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        check_model_kind(model, model_init)


def quantized(**changes: Any) -> Any:
    model = VectorClassifier()
    for name, value in {"is_quantized": True, **changes}.items():
        setattr(model, name, value)
    return model


def test_a_quantized_model_needs_adapters_or_a_quantization_that_can_be_trained() -> None:
    method = types.SimpleNamespace(quant_method="gptq")
    quantizer = types.SimpleNamespace(is_trainable=False, quantization_config=method)
    with pytest.raises(ValueError, match=r"is quantized by gptq, and .* Add adapters"):
        check_is_trainable(quantized(hf_quantizer=quantizer))
    with pytest.raises(ValueError, match=r"through which no gradients pass"):
        check_is_trainable(quantized(hf_quantizer=quantizer, peft_config={}))
    check_is_trainable(quantized(_hf_peft_config_loaded=True))
    check_is_trainable(quantized(hf_quantizer=types.SimpleNamespace(is_qat_trainable=True)))
    check_is_trainable(VectorClassifier())


class DataFrame:
    """A table as pandas has it, by its name and one of its members."""

    iloc = None


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        ("data.csv", r"train_dataset is text \('data\.csv'\)"),
        ((row for row in vector_rows(2)), r"is a generator, which can be gone through only once.*list\(\.\.\.\)"),
        ({"x": [1.0], "labels": [0]}, "is a dict with 'x', 'labels'.*from_dict"),
        (DataFrame(), "is a DataFrame.*from_pandas"),
    ],
)
def test_datasets_of_another_kind(dataset: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        check_is_dataset(dataset, "train_dataset", "get_train_dataloader")


def test_lists_streams_and_dicts_of_numbered_samples_are_datasets() -> None:
    rows = vector_rows(2)
    for dataset in (rows, Rows(rows), Stream(rows), dict(enumerate(rows))):
        check_is_dataset(dataset, "train_dataset", "get_train_dataloader")


def optimizer_alone() -> Any:
    return torch.optim.SGD(VectorClassifier().parameters(), 0.1)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda: {"optimizers": optimizer_alone()}, r"pair \(optimizer, schedule\), and is a SGD"),
        (lambda: {"optimizers": (optimizer_alone(),)}, r"pair \(optimizer, schedule\), and is a tuple"),
        (lambda: {"optimizers": (torch.optim.SGD, None)}, "the class SGD.*optimizer_cls_and_kwargs"),
        (lambda: {"lightning": "simple"}, r"lightning has to be a dict .* is text \('simple'\)"),
        (lambda: {"data_collator": "pad"}, "data_collator has to be callable, and is a str"),
    ],
)
def test_keywords_of_another_kind(tmp_path: Path, given: Callable[[], Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        quiet_trainer(tmp_path, given=given())


class LosesTheLoss(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        super().compute_loss(*args, **kwargs)


class StepWithoutALoss(StepwiseTrainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        super().training_step(model, inputs, num_items_in_batch)


@pytest.mark.parametrize(("kind", "method"), [(LosesTheLoss, "compute_loss"), (StepWithoutALoss, "training_step")])
def test_a_method_that_returns_no_loss_is_named(tmp_path: Path, kind: type[Trainer], method: str) -> None:
    with pytest.raises(TypeError, match=rf"{method}.* returned None, and has to return the loss"):
        quiet_trainer(tmp_path, kind=kind).train()


def test_text_for_true_is_told_from_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"checkpoint at True: .*'True' is text: write True without quotes"):
        quiet_trainer(tmp_path).train(resume_from_checkpoint="True")


def test_an_event_that_takes_too_little_is_shown_how_it_is_called(tmp_path: Path) -> None:
    class Narrow(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any) -> None:  # type: ignore[override]
            pass

    with pytest.raises(TypeError) as caught:
        quiet_trainer(tmp_path, given={"callbacks": [Narrow()]}).train()
    assert caught.value.__notes__[-1].endswith("def on_step_end(self, args, state, control, **kwargs).")


def test_an_error_of_preprocess_logits_for_metrics_says_what_it_was_called_with(tmp_path: Path) -> None:
    trainer = quiet_trainer(
        tmp_path,
        given={
            "compute_metrics": lambda prediction: {},
            "preprocess_logits_for_metrics": lambda logits: logits,
        },
    )
    with pytest.raises(TypeError) as caught:
        trainer.evaluate()
    (note,) = caught.value.__notes__
    assert note.startswith("preprocess_logits_for_metrics raised this in an evaluation outside of training.")
    assert "It was given predictions float32 (3, 3), labels int64 (3,)." in note
