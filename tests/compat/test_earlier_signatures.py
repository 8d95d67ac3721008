"""Overrides that take less than today's calls give."""

from __future__ import annotations

import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from littrainer import Trainer
from tests.scenarios.trainers import quiet_trainer


def losses_of(trainer: Trainer) -> list[Any]:
    trainer.train()
    return [entry.get("loss") for entry in trainer.state.log_history]


LOGGING: dict[str, Any] = {"logging_strategy": "steps", "logging_steps": 1, "max_steps": 2}


def test_the_first_form_of_compute_loss_trains_and_evaluates_with_what_the_model_returned(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match="First.compute_loss without return_outputs and num_items_in_batch"):

        class First(Trainer):
            def compute_loss(self, model: Any, inputs: Any) -> Any:  # type: ignore[override]
                return model(**inputs)["loss"] * 2

    class Today(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            outputs = model(**inputs)
            return (outputs["loss"] * 2, outputs) if return_outputs else outputs["loss"] * 2

    first, today = (quiet_trainer(tmp_path / kind.__name__, kind=kind, **LOGGING) for kind in (First, Today))
    assert losses_of(first) == losses_of(today)
    ours, expected = (trainer.predict(trainer.eval_dataset) for trainer in (first, today))
    assert (ours.predictions == expected.predictions).all()
    assert ours.metrics is not None and expected.metrics is not None
    assert ours.metrics["test_loss"] == expected.metrics["test_loss"]


def test_a_first_form_that_calls_no_model_has_no_outputs(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning):

        class Constant(Trainer):
            def compute_loss(self, model: Any, inputs: Any) -> Any:  # type: ignore[override]
                return sum(weight.sum() for weight in model.parameters())

    trainer = quiet_trainer(tmp_path, kind=Constant)
    assert trainer.compute_loss(trainer.model, {}, return_outputs=True)[1] == {}
    assert not trainer.model._forward_hooks


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


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_subclass_that_says_how_its_loss_is_scaled_is_believed() -> None:
    class Scaled(Trainer):
        loss_is_scaled_for_ga = True

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:  # type: ignore[override]
            return torch.zeros(())

    assert Scaled.loss_is_scaled_for_ga is True


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
