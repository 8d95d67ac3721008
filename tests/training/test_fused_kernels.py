from __future__ import annotations

import functools
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.scenarios.collators import pad_tokens
from tests.scenarios.data import Rows, language_rows
from tests.scenarios.models import tiny_llama
from tests.scenarios.trainers import quiet_trainer


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What a stand-in for liger-kernel was asked to do; the library itself needs a GPU."""
    calls: list[dict[str, Any]] = []
    library, kernels = ModuleType("liger_kernel"), ModuleType("liger_kernel.transformers")
    kernels._apply_liger_kernel_to_instance = lambda **keywords: calls.append(keywords)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel", library)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", kernels)
    return calls


def language_trainer(folder: Path, model: Any, **changes: Any) -> Any:
    rows = Rows(language_rows(4))
    return quiet_trainer(
        folder,
        model,
        given={"train_dataset": rows, "eval_dataset": rows, "data_collator": pad_tokens},
        max_steps=1,
        **changes,
    )


def test_the_kernels_that_the_config_names_are_put_into_the_model(
    tmp_path: Path, applied: list[dict[str, Any]]
) -> None:
    model = tiny_llama()
    language_trainer(tmp_path, model, use_liger_kernel=True, liger_kernel_config={"rope": False}).train()
    assert applied == [{"model": model, "rope": False}]


def test_a_config_alone_switches_nothing_on(tmp_path: Path, applied: list[dict[str, Any]]) -> None:
    language_trainer(tmp_path, tiny_llama(), liger_kernel_config={"rope": True}).train()
    assert applied == []


def test_a_model_that_is_none_of_transformers_is_left_alone_with_a_warning(
    tmp_path: Path, applied: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        quiet_trainer(tmp_path, max_steps=1, use_liger_kernel=True).train()
    assert applied == []
    assert "use_liger_kernel=True changes nothing" in caplog.text and "VectorClassifier" in caplog.text


def test_an_evaluation_of_the_loss_alone_asks_for_no_logits(tmp_path: Path, applied: list[dict[str, Any]]) -> None:
    asked: list[Any] = []
    model = tiny_llama()
    forward = model.forward

    @functools.wraps(forward)
    def noting(**inputs: Any) -> Any:
        asked.append(inputs.pop("skip_logits", None))
        return forward(**inputs)

    trainer = language_trainer(tmp_path, model, use_liger_kernel=True)
    model.forward = noting
    trainer.evaluate()
    trainer.predict(trainer.eval_dataset)
    assert set(asked[:2]) == {True} and set(asked[2:]) == {None}


def test_a_missing_library_is_named_with_the_way_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    trainer = language_trainer(tmp_path, tiny_llama(), use_liger_kernel=True)
    with pytest.raises(ImportError, match=r"use_liger_kernel=True.*pip install liger-kernel"):
        trainer.train()
