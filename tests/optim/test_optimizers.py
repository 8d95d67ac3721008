from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.trainer_optimizer import _parse_optim_args

from littrainer.arguments.choices import OptimizerNames
from littrainer.arguments.json_values import truth
from littrainer.optim.optimizers import (
    BUILT_IN,
    OPTIMIZERS,
    Convert,
    get_optimizer_class_and_keywords,
    parse_dtype,
    parse_optim_args,
)
from tests.scenarios.trainers import quiet_arguments

RATES = {"learning_rate": 0.02, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-5}

SETTINGS = {
    "sgd": "momentum=0.9, dampening=0.1, nesterov=False",
    "adagrad": "lr_decay=0.1,eps=1e-6",
    "rmsprop": "momentum=0.9,alpha=0.8,eps=1e-6,centered=True",
}

ASKED: list[tuple[str, str | None]] = [*((name.value, None) for name in BUILT_IN), *SETTINGS.items()]


@pytest.mark.parametrize(("name", "optim_args"), ASKED)
def test_a_name_stands_for_the_class_and_keywords_that_it_has_in_transformers(
    tmp_path: Path, name: str, optim_args: str | None
) -> None:
    given: dict[str, Any] = {"optim": name, "optim_args": optim_args, **RATES}
    ours = get_optimizer_class_and_keywords(quiet_arguments(tmp_path, **given))
    theirs = transformers.Trainer.get_optimizer_cls_and_kwargs(
        quiet_arguments(tmp_path, transformers.TrainingArguments, **given)
    )
    assert ours == theirs and set(OPTIMIZERS) == set(OptimizerNames)
    ours[0]([nn.Parameter(torch.zeros(1))], **ours[1])


ACCEPTED: dict[str, Convert] = {"rank": int, "scale": float, "on": truth, "kind": str, "type": parse_dtype}


@pytest.mark.parametrize("text", [None, "", "rank=4", "rank=4,kind=0.5", " rank = 4 , kind=0.5 ", "rank=4,rank=5"])
def test_pairs_are_read_as_transformers_reads_them(text: str | None) -> None:
    assert parse_optim_args("galore_adamw", text, {"rank": str, "kind": str}) == _parse_optim_args(text)


def test_each_setting_gets_the_type_that_the_optimizer_takes() -> None:
    settings = parse_optim_args("galore_adamw", "rank=4,scale=1,on=No,kind=std,type=bfloat16", ACCEPTED)
    assert settings == {"rank": 4, "scale": 1.0, "on": False, "kind": "std", "type": torch.bfloat16}
    assert [type(value) for value in settings.values()] == [int, float, bool, str, torch.dtype]
    # What a Trainer always gives it.
    assert parse_optim_args("adafactor", "scale_parameter=False,relative_step=False", {}) == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *(
            (text, "optim_args=.*key=value,key=value")
            for text in ("rank", "rank=4=5", "rank=4,", "=4", "rank=", "rank:4")
        ),
        *((text, f"has {text}, which .* cannot read") for text in ("rank=4.5", "scale=high", "on=perhaps", "type=nn")),
        ("rnak=4", "'rnak'.*optim='adafactor' does not take .*did you mean 'rank'.*takes rank, scale, on, kind, type"),
        ("scale_parameter=True", "scale_parameter"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_optim_args("adafactor", text, ACCEPTED)


@pytest.mark.parametrize(
    ("optim", "text", "words"),
    [
        ("sgd", "weight_decay=0.1", "'weight_decay', which an argument decides: set weight_decay"),
        ("adamw_torch", "eps=1e-6", "'eps', which an argument decides: set adam_epsilon"),
        ("sgd", "eps=1e-6", "'eps', which optim='sgd' does not take; it takes momentum, dampening, nesterov"),
        ("adamw_torch", "rank=4", "'rank', which optim='adamw_torch' does not take; it takes none"),
    ],
)
def test_a_setting_that_an_argument_decides_is_refused_with_that_argument(
    tmp_path: Path, optim: str, text: str, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        get_optimizer_class_and_keywords(quiet_arguments(tmp_path, optim=optim, optim_args=text))
