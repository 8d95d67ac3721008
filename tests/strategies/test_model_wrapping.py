from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from littrainer.strategies.model_wrapping import get_compile_keywords, is_compiled
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
    called: list[Any] = []

    def compute_loss(trainer: Any, called_model: Any, inputs: Any, **_: Any) -> Any:
        called.append(called_model)
        return called_model(**inputs)["loss"]

    trainer = quiet_trainer(tmp_path, model, save_strategy="steps", save_steps=1, **COMPILED)
    trainer.compute_loss = compute_loss.__get__(trainer)  # type: ignore[method-assign]
    trainer.train()
    assert [is_compiled(one) for one in called] == [True]
    assert trainer.model is model and trainer.model_wrapped is called[0]
    assert set(load_file(tmp_path / "checkpoint-1" / "model.safetensors")) == set(model.state_dict())


def test_a_second_training_compiles_nothing_anew(tmp_path: Path) -> None:
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
