from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from littrainer.arguments.support import HONOURED_VALUES
from littrainer.optim.optimizers import OPTIMIZERS, optimizer_class_and_keywords
from tests.scenarios.trainers import quiet_arguments

RATES = {"learning_rate": 0.02, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-5}


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_a_name_stands_for_the_class_and_keywords_that_it_has_in_transformers(tmp_path: Path, name: str) -> None:
    ours = optimizer_class_and_keywords(quiet_arguments(tmp_path, optim=name, **RATES))
    theirs = transformers.Trainer.get_optimizer_cls_and_kwargs(
        quiet_arguments(tmp_path, transformers.TrainingArguments, optim=name, **RATES)
    )
    assert ours == theirs
    ours[0]([torch.nn.Parameter(torch.zeros(1))], **ours[1])


def test_the_optimizers_are_those_that_the_arguments_accept() -> None:
    assert set(OPTIMIZERS) == set(HONOURED_VALUES["optim"])


def test_a_known_name_without_an_optimizer_is_refused_with_those_there_are(tmp_path: Path) -> None:
    args = quiet_arguments(tmp_path)
    args.optim = "adafactor"
    with pytest.raises(ValueError, match=r"optim='adafactor'.*adamw_torch.*sgd"):
        optimizer_class_and_keywords(args)


def test_each_call_gives_keywords_of_its_own(tmp_path: Path) -> None:
    args = quiet_arguments(tmp_path)
    optimizer_class_and_keywords(args)[1]["lr"] = 0
    assert optimizer_class_and_keywords(args)[1]["lr"] == args.learning_rate
