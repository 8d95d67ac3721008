from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from littrainer.arguments.choices import OptimizerNames
from littrainer.optim.adafactor import Adafactor
from littrainer.optim.optimizers import BUILT_IN, OPTIMIZERS, build_optimizer, optimizer_class_and_keywords
from tests.scenarios.trainers import quiet_arguments, quiet_trainer

RATES = {"learning_rate": 0.02, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-5}

SETTINGS = {
    "sgd": "momentum=0.9, dampening=0.1, weight_decay=0.2, nesterov=False",
    "adagrad": "lr_decay=0.1,weight_decay=0.2,eps=1e-6",
    "rmsprop": "momentum=0.9,alpha=0.8,eps=1e-6,weight_decay=0.2,centered=True",
}

ASKED: list[tuple[str, str | None]] = [*((name.value, None) for name in BUILT_IN), *SETTINGS.items()]


@pytest.mark.parametrize(("name", "optim_args"), ASKED)
def test_a_name_stands_for_the_class_and_keywords_that_it_has_in_transformers(
    tmp_path: Path, name: str, optim_args: str | None
) -> None:
    given: dict[str, Any] = {"optim": name, "optim_args": optim_args, **RATES}
    ours = optimizer_class_and_keywords(quiet_arguments(tmp_path, **given))
    theirs = transformers.Trainer.get_optimizer_cls_and_kwargs(
        quiet_arguments(tmp_path, transformers.TrainingArguments, **given)
    )
    assert ours[1] == theirs[1]
    assert ours[0] is (Adafactor if name == "adafactor" else theirs[0])
    ours[0]([nn.Parameter(torch.zeros(1))], **ours[1])


def test_every_name_has_an_optimizer() -> None:
    assert set(OPTIMIZERS) == set(OptimizerNames)


@pytest.mark.parametrize("name", [name.value for name in BUILT_IN])
def test_an_unknown_key_in_optim_args_stops_the_training_before_it_begins(tmp_path: Path, name: str) -> None:
    trainer = quiet_trainer(tmp_path, optim=name, optim_args="momentun=0.9", max_steps=1)
    with pytest.raises(ValueError, match=f"optim_args has 'momentun', which optim='{name}' does not take"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize(("name", "optim_args"), SETTINGS.items())
def test_optim_args_reach_the_optimizer_of_a_training(tmp_path: Path, name: str, optim_args: str) -> None:
    trainer = quiet_trainer(tmp_path, optim=name, optim_args=optim_args, weight_decay=0.5)
    created = trainer.create_optimizer()
    assert created.defaults["weight_decay"] == 0.2
    assert [group["weight_decay"] for group in created.param_groups] == [0.5, 0.0]


@pytest.mark.parametrize("key", ["params", "model"])
def test_keywords_may_bring_what_takes_the_place_of_the_groups(key: str) -> None:
    model = nn.Linear(2, 2)
    given: list[Any] = []

    class Noting(torch.optim.SGD):
        def __init__(self, first: Any, lr: float) -> None:
            given.append(first)
            super().__init__(model.parameters(), lr=lr)

    keywords = {key: "instead", "lr": 0.1}
    build_optimizer(model, [{"params": []}], Noting, keywords)
    assert given == ["instead"]
    assert keywords == {key: "instead", "lr": 0.1}


def test_a_factory_is_made_first_and_then_called_with_the_model() -> None:
    model = nn.Linear(2, 2)

    class Factory:
        def __call__(self, given: nn.Module, lr: float) -> Any:
            return given, lr

    assert build_optimizer(model, [], Factory, {"lr": 0.1}) == (model, 0.1)
