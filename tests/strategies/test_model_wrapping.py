from __future__ import annotations

import copy
import inspect
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from littrainer.strategies.model_wrapping import autocast_forward, get_compile_keywords, is_compiled, restore_forward
from tests.scenarios.models import VectorClassifier
from tests.scenarios.trainers import quiet_arguments, quiet_trainer

COMPILED: dict[str, Any] = {"torch_compile_backend": "eager", "max_steps": 1}


def test_naming_a_backend_or_a_mode_compiles_with_them(tmp_path: Path) -> None:
    assert get_compile_keywords(quiet_arguments(tmp_path)) is None
    assert get_compile_keywords(quiet_arguments(tmp_path, torch_compile_backend="no")) is None
    assert get_compile_keywords(quiet_arguments(tmp_path, torch_compile=True)) == {"backend": "inductor"}
    both = quiet_arguments(tmp_path, torch_compile_backend="AOT_EAGER", torch_compile_mode="reduce-overhead")
    assert get_compile_keywords(both) == {"backend": "aot_eager", "mode": "reduce-overhead"}


def test_steps_run_the_compiled_model_and_the_users_module_is_what_is_saved(tmp_path: Path) -> None:
    model = VectorClassifier()
    calls: list[Any] = []

    def compute_loss(trainer: Any, model: Any, inputs: Any, **_: Any) -> Any:
        calls.append(model)
        return model(**inputs)["loss"]

    trainer = quiet_trainer(tmp_path, model, save_strategy="steps", save_steps=1, **COMPILED)
    trainer.compute_loss = compute_loss.__get__(trainer)  # type: ignore[method-assign]
    trainer.train()
    assert [is_compiled(module) for module in calls] == [True]
    assert trainer.model is model and trainer.model_wrapped is calls[0]
    assert set(load_file(tmp_path / "checkpoint-1" / "model.safetensors")) == set(model.state_dict())


def test_a_second_training_does_not_compile_again(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, **COMPILED)
    trainer.train()
    first = trainer.model_wrapped
    trainer.train()
    assert trainer.model_wrapped is first and is_compiled(first)


def test_a_model_that_is_compiled_already_is_not_compiled_again(tmp_path: Path) -> None:
    model: Any = torch.compile(VectorClassifier(), backend="eager")
    trainer = quiet_trainer(tmp_path, model, **COMPILED)
    trainer.train()
    assert trainer.model_wrapped is model


def test_an_evaluation_before_training_runs_the_compiled_model(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, **COMPILED)
    trainer.evaluate()
    assert is_compiled(trainer.model_wrapped)


# ---- Mixed precision -------------------------------------------------------------------------------------------------

BATCH = torch.linspace(-2, 2, 18).view(3, 6)


def run_in_bf16(model: Any) -> Any:
    autocast_forward(model, "cpu", torch.bfloat16)
    return model


def test_the_forward_computes_in_half_precision_and_returns_float32() -> None:
    model = VectorClassifier()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(BATCH)["logits"]
    logits = run_in_bf16(model)(BATCH)["logits"]
    assert expected.dtype == torch.bfloat16 and logits.dtype == torch.float32
    assert torch.equal(logits, expected.float())
    assert not torch.is_autocast_enabled("cpu")


def test_restoring_the_forward_keeps_a_forward_of_the_user() -> None:
    model = VectorClassifier()
    of_class = model.forward
    model.forward = lambda x: of_class(x)["logits"] * 0  # type: ignore[method-assign, assignment]
    restore_forward(run_in_bf16(model))
    assert torch.equal(model(BATCH), torch.zeros_like(of_class(BATCH)["logits"]))


def test_a_copy_runs_its_own_weights() -> None:
    model = run_in_bf16(VectorClassifier())
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.head.weight.zero_()
        copied.head.bias.zero_()
    assert copied(BATCH)["logits"].abs().sum() == 0
    assert model(BATCH)["logits"].abs().sum() > 0


def test_the_model_can_be_pickled() -> None:
    file = io.BytesIO()
    model = run_in_bf16(VectorClassifier())
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    torch.testing.assert_close(loaded(BATCH)["logits"], VectorClassifier.forward(model, BATCH)["logits"])


def test_fp16_on_a_cpu_warns_that_it_has_no_effect(tmp_path: Path) -> None:
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
    model = run_in_bf16(VectorClassifier())
    assert inspect.signature(model.forward) == inspect.signature(VectorClassifier().forward)
    assert model.forward.__code__ and model.forward.__self__ is model
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(BATCH)["logits"], model(BATCH)["logits"])


def test_accelerate_unwraps_the_forward() -> None:
    other = pytest.importorskip("accelerate.utils.other")
    model = other.extract_model_from_parallel(run_in_bf16(VectorClassifier()), keep_fp32_wrapper=False)
    assert torch.equal(model(BATCH)["logits"], VectorClassifier.forward(model, BATCH)["logits"])
