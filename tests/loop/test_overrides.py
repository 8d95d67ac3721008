"""Overrides that take less than today's calls give."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from littrainer import Seq2SeqTrainer, Trainer
from littrainer.loop.overrides import NEVER_CALLED
from tests.scenarios.trainers import quiet_trainer


def losses_of(trainer: Trainer) -> list[Any]:
    trainer.train()
    return [entry.get("loss") for entry in trainer.state.log_history]


LOGGING: dict[str, Any] = {"logging_strategy": "steps", "logging_steps": 1, "max_steps": 2}


def test_a_method_that_is_set_on_the_instance_is_called_with_what_it_takes(tmp_path: Path) -> None:
    def plain(self: Any, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    expected = losses_of(quiet_trainer(tmp_path / "expected", **LOGGING))
    trainer: Any = quiet_trainer(tmp_path / "run", **LOGGING)
    trainer.compute_loss = types.MethodType(plain, trainer)
    with pytest.warns(FutureWarning, match="Trainer.compute_loss without num_items_in_batch"):
        assert losses_of(trainer) == expected
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.evaluate()


def test_an_override_that_clips_a_part_of_the_model_leaves_no_gradient_in_the_rest(tmp_path: Path) -> None:
    class OfAPart(Trainer):
        def _clip_grad_norm(self, model: Any) -> Any:
            return super()._clip_grad_norm(next(model.children()))

    trainer = quiet_trainer(tmp_path, kind=OfAPart, max_steps=1)
    trainer.train()
    assert len(list(trainer.model.children())) > 1
    assert [one for one in trainer.model.parameters() if one.grad is not None] == []


def test_parameters_that_are_given_by_place_may_have_other_names() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        class Renamed(Trainer):
            def _get_train_sampler(self, dataset: Any = None) -> Any:
                return None

            def training_step(self, model: Any, inputs: Any, items: Any) -> Any:
                return None

            def log(self, *values: Any) -> None:
                return None

    with pytest.warns(FutureWarning, match="Older._get_train_sampler without train_dataset"):

        class Older(Trainer):
            def _get_train_sampler(self) -> Any:  # type: ignore[override]
                return "sampler"

    assert Older._get_train_sampler(object(), "data") == "sampler"
    assert Renamed.log is not Trainer.log


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


def with_a_partial_method(called: list[str], patch: pytest.MonkeyPatch) -> type[Trainer]:
    patch.setattr(Trainer, "training_step", functools.partialmethod(noting(called)))
    return Trainer


def of_a_mixin(called: list[str], patch: pytest.MonkeyPatch) -> type[Trainer]:
    mixin = type("Mixin", (), {"training_step": functools.wraps(STEP)(noting(called))})
    return type("Mixed", (mixin, Seq2SeqTrainer), {})


@pytest.mark.parametrize(
    "made",
    [
        in_a_subclass_with_wraps,
        on_the_class_with_wraps,
        with_a_partial_method,
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
    assert quiet_trainer(tmp_path, kind=kind)._find_overrides(*METHODS) == []


def test_a_method_put_back_on_the_class_is_ours_again(tmp_path: Path) -> None:
    with mock.patch.object(Trainer, "training_step", noting([])):
        assert quiet_trainer(tmp_path).overrides_training_step()
    assert not quiet_trainer(tmp_path).overrides_training_step()


def nothing(self: Any, *args: Any, **kwargs: Any) -> None:
    """An override that does nothing."""


def test_overrides_that_are_never_called_are_one_error_at_construction_that_names_them_all(tmp_path: Path) -> None:
    override = functools.wraps(Trainer.train)(nothing)
    mixin = type("Mixin", (), {"_build_accelerator_args": nothing})
    subclass = type("Mine", (mixin, Trainer), dict.fromkeys(("_run_epoch", "_prepare_for_training"), override))
    with pytest.raises(NotImplementedError, match="Mine overrides what littrainer never calls") as caught:
        quiet_trainer(tmp_path, kind=subclass)
    for name in ("_run_epoch", "_prepare_for_training", "_build_accelerator_args"):
        assert f"{name} ({NEVER_CALLED[name]})" in str(caught.value)


def test_one_that_is_set_on_a_trainer_is_refused_when_it_trains(tmp_path: Path) -> None:
    trainer: Any = quiet_trainer(tmp_path)
    trainer._run_epoch = types.MethodType(nothing, trainer)
    with pytest.raises(NotImplementedError, match="_run_epoch"):
        trainer.train()


def test_no_method_that_is_refused_is_there_to_be_called() -> None:
    assert [name for name in NEVER_CALLED if hasattr(Trainer, name)] == []
