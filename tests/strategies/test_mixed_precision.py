from __future__ import annotations

import copy
import inspect
import io
from pathlib import Path
from typing import Any

import pytest
import torch

from littrainer.strategies.mixed_precision import autocast_forward, restore_forward
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import quiet_trainer

BATCH = torch.linspace(-2, 2, 18).view(3, 6)
LABELS = torch.tensor([0, 1, 2])


def in_bf16(model: Any) -> Any:
    autocast_forward(model, "cpu", torch.bfloat16)
    return model


def test_the_forward_computes_in_half_precision_and_returns_float32() -> None:
    model = VectorClassifier()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(BATCH)["logits"]
    logits = in_bf16(model)(BATCH)["logits"]
    assert expected.dtype == torch.bfloat16 and logits.dtype == torch.float32
    assert torch.equal(logits, expected.float())
    assert not torch.is_autocast_enabled("cpu")


def test_restoring_puts_back_a_forward_that_its_user_had_set_on_the_model() -> None:
    model = VectorClassifier()
    of_class = model.forward
    model.forward = lambda x: of_class(x)["logits"] * 0  # type: ignore[method-assign, assignment]
    restore_forward(in_bf16(model))
    assert torch.equal(model(BATCH), torch.zeros_like(of_class(BATCH)["logits"]))


def test_a_copy_runs_its_own_weights() -> None:
    model = in_bf16(VectorClassifier())
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.head.weight.zero_()
        copied.head.bias.zero_()
    assert copied(BATCH)["logits"].abs().sum() == 0
    assert model(BATCH)["logits"].abs().sum() > 0


def test_a_model_can_still_be_saved_whole() -> None:
    file = io.BytesIO()
    model = in_bf16(VectorClassifier())
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    torch.testing.assert_close(loaded(BATCH)["logits"], VectorClassifier.forward(model, BATCH)["logits"])


def test_fp16_on_a_cpu_says_that_it_changes_nothing(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="fp16 has no effect on a CPU"):
        trainer = quiet_trainer(tmp_path, fp16=True, max_steps=1)
    trainer.train()
    assert "forward" not in vars(trainer.model)
    assert trainer.accelerator.scaler is None


def test_a_second_model_that_a_script_prepares_runs_in_the_same_precision(tmp_path: Path) -> None:
    reference, plain = VectorClassifier(), VectorClassifier()
    trainer = quiet_trainer(tmp_path, bf16=True)
    assert trainer.accelerator.prepare_model(reference, evaluation_mode=True) is reference
    assert trainer.accelerator.prepare(plain) is plain
    for model in (reference, plain):
        assert not torch.equal(model(BATCH)["logits"], VectorClassifier.forward(model, BATCH)["logits"])
    with trainer.accelerator.autocast():
        assert plain.head(torch.ones(1, 8)).dtype == torch.bfloat16


def test_the_forward_has_the_signature_and_the_code_of_a_method_and_can_be_compiled() -> None:
    model = in_bf16(VectorClassifier())
    assert inspect.signature(model.forward) == inspect.signature(VectorClassifier().forward)
    assert model.forward.__code__ and model.forward.__self__ is model
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(BATCH)["logits"], model(BATCH)["logits"])


def test_accelerate_takes_its_wrapper_off() -> None:
    other = pytest.importorskip("accelerate.utils.other")
    model = other.extract_model_from_parallel(in_bf16(VectorClassifier()), keep_fp32_wrapper=False)
    assert torch.equal(model(BATCH)["logits"], VectorClassifier.forward(model, BATCH)["logits"])
