from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.trainer_optimizer import _parse_optim_args

from littrainer.arguments.choices import OptimizerNames
from littrainer.optim.optimizers import (
    BUILT_IN,
    OPTIMIZERS,
    Convert,
    build_optimizer,
    optimizer_class_and_keywords,
    parse_optim_args,
    read_optim_args,
    torch_dtype,
    truth,
)
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
    assert ours == theirs
    ours[0]([nn.Parameter(torch.zeros(1))], **ours[1])


def test_every_name_has_an_optimizer() -> None:
    assert set(OPTIMIZERS) == set(OptimizerNames)


@pytest.mark.parametrize("name", [name.value for name in BUILT_IN])
def test_an_unknown_key_in_optim_args_stops_the_training_before_it_begins(tmp_path: Path, name: str) -> None:
    trainer = quiet_trainer(tmp_path, optim=name, optim_args="momentun=0.9", max_steps=1)
    with pytest.raises(ValueError, match=f"optim_args has 'momentun', which optim='{name}' does not take"):
        trainer.train()
    assert trainer.state.global_step == 0


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


ACCEPTED: dict[str, Convert] = {"rank": int, "scale": float, "on": truth, "kind": str}


@pytest.mark.parametrize("text", [None, "", "rank=4", "rank=4,scale=0.5", " rank = 4 , scale=0.5 ", "rank=4,rank=5"])
def test_pairs_are_read_as_transformers_reads_them(text: str | None) -> None:
    assert parse_optim_args(text) == _parse_optim_args(text)


@pytest.mark.parametrize("text", ["rank", "rank=4=5", "rank=4,", "=4", "rank=", "rank:4", "{'rank': 4}"])
def test_text_that_is_no_list_of_pairs_is_refused_with_the_way_to_write_it(text: str) -> None:
    with pytest.raises(ValueError, match=r"optim_args=.*key=value,key=value"):
        parse_optim_args(text)


def test_each_setting_gets_the_type_that_the_optimizer_takes() -> None:
    settings = read_optim_args("galore_adamw", "rank=4,scale=1,on=No,kind=std", ACCEPTED)
    assert settings == {"rank": 4, "scale": 1.0, "on": False, "kind": "std"}
    assert [type(value) for value in settings.values()] == [int, float, bool, str]


def test_an_unknown_key_is_refused_with_the_nearest_one_and_all_there_are() -> None:
    with pytest.raises(ValueError, match=r"'rnak'.*optim='galore_adamw'.*did you mean 'rank'.*rank, scale, on, kind"):
        read_optim_args("galore_adamw", "rnak=4", ACCEPTED)


@pytest.mark.parametrize("text", ["rank=four", "rank=4.5", "scale=high", "on=perhaps"])
def test_a_value_of_the_wrong_kind_is_refused_with_its_key(text: str) -> None:
    with pytest.raises(ValueError, match=f"optim_args has {text}, which optim='galore_adamw' cannot read"):
        read_optim_args("galore_adamw", text, ACCEPTED)


def test_a_dtype_is_named_as_in_torch() -> None:
    assert torch_dtype("bfloat16") is torch.bfloat16
    for text in ("float33", "nn"):
        with pytest.raises(ValueError, match=f"dtype.*{text}"):
            torch_dtype(text)


def test_adafactor_may_be_asked_for_what_it_is_given_anyway() -> None:
    assert read_optim_args("adafactor", "scale_parameter=False,relative_step=False", {}) == {}
    with pytest.raises(ValueError, match="scale_parameter"):
        read_optim_args("adafactor", "scale_parameter=True", {})
