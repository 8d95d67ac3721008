from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import torch

from littrainer import EarlyStoppingCallback, Trainer, TrainingArguments
from littrainer.explain.heading import Source
from littrainer.explain.printed_values import code, is_plain
from littrainer.explain.program import program
from tests.scenarios.data import vector_rows
from tests.scenarios.models import VectorClassifier


def context() -> Any:
    return None, None


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": 1.0}


class OwnLoss(Trainer):
    def compute_loss(self, *values: Any, **keywords: Any) -> Any:
        return super().compute_loss(*values, **keywords)


def head_of(text: str) -> str:
    told = ast.get_docstring(ast.parse(text))
    assert told is not None
    return told


def test_an_object_among_settings_is_named_and_the_rest_of_them_is_printed(tmp_path: Path) -> None:
    settings = {"context_fn": context, "use_reentrant": False}
    args = TrainingArguments(
        str(tmp_path), use_cpu=True, gradient_checkpointing=True, gradient_checkpointing_kwargs=settings
    )
    text = program(args)
    assert "- gradient_checkpointing_kwargs: context_fn: function context, which a text cannot hold" in head_of(text)
    assert 'gradient_checkpointing_enable({"use_reentrant": False})' in text


def test_the_objects_of_a_scripts_trainer_are_named_with_the_place_they_belong_to(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    trainer = OwnLoss(
        model=VectorClassifier(),
        args=args,
        train_dataset=vector_rows(12),
        compute_metrics=accuracy,
        data_collator=torch.utils.data.default_collate,
        callbacks=[EarlyStoppingCallback()],
    )
    told = head_of(program(args, trainer=trainer)).splitlines()
    objects = told[told.index("Objects of the script's Trainer, which a text cannot hold:") + 1 :]
    assert objects == [
        "- model (VectorClassifier): return it in `make_model`, or name it with --model",
        "- train_dataset (list of 12 entries): return its rows in `make_rows`, or name it with --data",
        "- data_collator (function default_collate): hand it to the DataLoaders as `collate_fn`",
        "- compute_metrics (function accuracy): log its metrics in `validation_step`",
        "- callback EarlyStoppingCallback: rewrite it as a callback of Lightning, unless it is one",
        "- OwnLoss, which overrides compute_loss: write it into `Training`",
    ]
    named = head_of(program(args, Source("mine:model", "mine:rows"), trainer=trainer))
    assert "- model " not in named and "- train_dataset" not in named and "- compute_metrics" in named


def test_what_stands_in_is_said_by_what_was_named(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    both = head_of(program(args))
    assert "`StandIn` takes the place of your model and random rows that of your data" in both
    no_data = head_of(program(args, Source(model="mine:model")))
    assert "Random rows take the place of your data, which need not fit your model" in no_data
    assert "StandIn" not in no_data
    no_model = head_of(program(args, Source(data="mine:rows")))
    assert "`StandIn` takes the place of your model, and reads rows of its own form alone" in no_model
    assert "place of" not in head_of(program(args, Source("mine:model", "mine:rows")))


def test_values_are_printed_as_code_that_gives_them_back() -> None:
    for value in ({"a": [1, 2.5, None, "ü"], "b": (True, {})}, float("inf"), -1e-8, 'two "words"'):
        assert is_plain(value) and eval(code(value)) == value
    assert not is_plain({"a": [print]}) and not is_plain({print: 1})
