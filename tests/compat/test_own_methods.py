"""An override is one whatever it is made with, and what the package has is none."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from littrainer import Seq2SeqTrainer, Trainer
from tests.scenarios.trainers import StepwiseTrainer, quiet_trainer

STEP = Trainer.training_step
METHODS = ("training_step", "evaluate", "predict", "prediction_step", "log", "_wrap_model", "_run_epoch")


def noting(called: list[str]) -> Any:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        called.append("step")
        return STEP(self, *args, **kwargs)

    return step


def in_a_subclass_with_wraps(called: list[str], patch: pytest.MonkeyPatch) -> type[Trainer]:
    return type("Mine", (Trainer,), {"training_step": functools.wraps(STEP)(noting(called))})


def on_the_class_with_wraps(called: list[str], patch: pytest.MonkeyPatch) -> type[Trainer]:
    patch.setattr(Trainer, "training_step", functools.wraps(STEP)(noting(called)))
    return Trainer


def with_a_context_decorator(called: list[str], patch: pytest.MonkeyPatch) -> type[Trainer]:
    class Entered(contextlib.ContextDecorator):
        def __enter__(self) -> None:
            called.append("step")

        def __exit__(self, *error: Any) -> None:
            """Nothing is held."""

    patch.setattr(Trainer, "training_step", Entered()(STEP))
    return Trainer


def with_a_mock(called: list[str], patch: pytest.MonkeyPatch) -> type[Trainer]:
    patch.setattr(Trainer, "training_step", mock.create_autospec(STEP, side_effect=noting(called)))
    return Trainer


def with_a_partial_method(called: list[str], patch: pytest.MonkeyPatch) -> type[Trainer]:
    patch.setattr(Trainer, "training_step", functools.partialmethod(noting(called)))
    return Trainer


def of_no_module(called: list[str], patch: pytest.MonkeyPatch) -> type[Trainer]:
    step = noting(called)
    step.__module__ = None
    return type("Mine", (Trainer,), {"training_step": step})


def executed_without_a_module_name(called: list[str], patch: pytest.MonkeyPatch) -> type[Trainer]:
    names: dict[str, Any] = {"Trainer": Trainer, "note": noting(called)}
    code = "class Mine(Trainer):\n def training_step(self, *args, **kwargs):\n  return note(self, *args, **kwargs)"
    exec(code, names)
    return names["Mine"]


def of_a_mixin(called: list[str], patch: pytest.MonkeyPatch) -> type[Trainer]:
    mixin = type("Mixin", (), {"training_step": functools.wraps(STEP)(noting(called))})
    return type("Mixed", (mixin, Seq2SeqTrainer), {})


@pytest.mark.parametrize(
    "made",
    [
        in_a_subclass_with_wraps,
        on_the_class_with_wraps,
        with_a_context_decorator,
        with_a_mock,
        with_a_partial_method,
        of_no_module,
        executed_without_a_module_name,
        of_a_mixin,
    ],
)
def test_a_training_step_is_called_however_it_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Callable[..., type[Trainer]]
) -> None:
    called: list[str] = []
    trainer = quiet_trainer(tmp_path, kind=made(called, monkeypatch), max_steps=2)
    trainer.train()
    assert called == ["step"] * 2


@pytest.mark.parametrize("kind", [Trainer, Seq2SeqTrainer, type("Plain", (Seq2SeqTrainer,), {"log": Trainer.log})])
def test_what_the_package_has_is_no_override(tmp_path: Path, kind: type[Trainer]) -> None:
    assert quiet_trainer(tmp_path, kind=kind)._own_methods(*METHODS) == []


def test_what_a_subclass_or_an_instance_has_is_named_in_the_order_asked_for(tmp_path: Path) -> None:
    trainer: Any = quiet_trainer(tmp_path, kind=StepwiseTrainer)
    trainer.log = types.MethodType(Trainer.log, trainer)
    assert trainer._own_methods(*METHODS) == ["training_step", "log"]


def test_a_method_put_back_on_the_class_is_ours_again(tmp_path: Path) -> None:
    with mock.patch.object(Trainer, "training_step", noting([])):
        assert quiet_trainer(tmp_path).overrides_training_step()
    assert not quiet_trainer(tmp_path).overrides_training_step()


def test_one_that_is_never_called_is_refused_though_it_wraps_a_method_of_ours(tmp_path: Path) -> None:
    override = functools.wraps(Trainer.train)(noting([]))
    with pytest.raises(NotImplementedError, match="_run_epoch"):
        quiet_trainer(tmp_path, kind=type("Mine", (Trainer,), {"_run_epoch": override}))
