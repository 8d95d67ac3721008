"""Parameters of the wrong kind are refused with advice."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch

from littrainer import Trainer, TrainerCallback, TrainingArguments
from littrainer.loop.checks import (
    check_args,
    check_is_dataset,
    check_is_trainable,
    check_model_kind,
    validate_lightning_keywords,
    validate_optimizers,
)
from tests.scenarios.data import Rows, Stream, vector_rows
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import StepwiseTrainer, quiet_trainer


def check_train_dataset(dataset: Any) -> None:
    check_is_dataset(dataset, "train_dataset", "get_train_dataloader")


def quantized(**changes: Any) -> Any:
    model = VectorClassifier()
    for name, value in {"is_quantized": True, **changes}.items():
        setattr(model, name, value)
    return model


QUANTIZER = types.SimpleNamespace(
    is_trainable=False, quantization_config=types.SimpleNamespace(quant_method="gptq"), is_qat_trainable=False
)


@pytest.mark.parametrize(
    ("check", "parameters", "message"),
    [
        (check_args, ("out",), r"is text \('out'\)\. Make TrainingArguments\('out'\)"),
        (check_args, (TrainingArguments,), r"is the class TrainingArguments\. Make an instance"),
        (check_model_kind, (VectorClassifier, None), r"is the class VectorClassifier.*model_init=VectorClassifier"),
        (check_model_kind, (types.SimpleNamespace(model_type="bert"), None), "is a configuration"),
        (check_model_kind, (None, VectorClassifier()), "model_init has to be a function.*pass it as model"),
        (check_model_kind, (None, "bert"), r"a function that makes the model, and is text \('bert'\)"),
        (check_is_trainable, (quantized(hf_quantizer=QUANTIZER),), "is quantized by gptq, and .* Add adapters"),
        (check_is_trainable, (quantized(hf_quantizer=QUANTIZER, peft_config={}),), "through which no gradients pass"),
        (check_train_dataset, ((row for row in vector_rows(2)),), r"is a generator, .*list\(\.\.\.\)"),
        (check_train_dataset, ({"x": [1.0], "labels": [0]},), "is a dict with 'x', 'labels'.*from_dict"),
        (validate_optimizers, (torch.optim.SGD([torch.ones(1)], 0.1),), r"pair \(optimizer, schedule\), and is a SGD"),
        (validate_optimizers, ((torch.optim.SGD, None),), "has the class SGD: make an .*optimizer_cls_and_kwargs"),
        (validate_lightning_keywords, ("simple",), r"lightning has to be a dict .* is text \('simple'\)"),
    ],
)
def test_a_parameter_of_the_wrong_kind_is_refused_with_advice(check: Any, parameters: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        check(*parameters)


def test_valid_parameters_pass_the_checks() -> None:
    check_args(types.SimpleNamespace(per_device_train_batch_size=8))
    check_is_trainable(quantized(_hf_peft_config_loaded=True))
    check_is_trainable(quantized(hf_quantizer=types.SimpleNamespace(is_qat_trainable=True)))
    rows = vector_rows(2)
    for dataset in (rows, Rows(rows), Stream(rows), dict(enumerate(rows))):
        check_train_dataset(dataset)


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


def test_text_for_true_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"checkpoint at True: .*'True' is text: write True without quotes"):
        quiet_trainer(tmp_path).train(resume_from_checkpoint="True")


def test_the_error_of_an_event_with_too_few_parameters_shows_the_signature(tmp_path: Path) -> None:
    class Narrow(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any) -> None:  # type: ignore[override]
            pass

    with pytest.raises(TypeError) as caught:
        quiet_trainer(tmp_path, trainer_kwargs={"callbacks": [Narrow()]}).train()
    assert caught.value.__notes__[-1].endswith("def on_step_end(self, args, state, control, **kwargs).")


def test_the_error_of_preprocess_logits_for_metrics_names_its_arguments(tmp_path: Path) -> None:
    trainer = quiet_trainer(
        tmp_path,
        trainer_kwargs={
            "compute_metrics": lambda prediction: {},
            "preprocess_logits_for_metrics": lambda logits: logits,
        },
    )
    with pytest.raises(TypeError) as caught:
        trainer.evaluate()
    (note,) = caught.value.__notes__
    assert note.startswith("preprocess_logits_for_metrics raised this in an evaluation outside of training.")
    assert "It was given predictions float32 (3, 3), labels int64 (3,)." in note
