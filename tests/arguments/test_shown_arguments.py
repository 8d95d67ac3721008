from __future__ import annotations

from typing import Any

import pytest

from littrainer import TrainingArguments
from littrainer.arguments.shown_arguments import (
    MAX_TEXT_LETTERS,
    format_defaults,
    format_value,
    is_same,
    select_non_defaults,
)

# What follows from use_cpu, or from the machine.
DERIVED = {"dataloader_pin_memory", "disable_tqdm", "optim", "bf16", "logging_dir"}


def test_arguments_are_compared_with_their_defaults_and_those_of_a_subclass_come_last() -> None:
    args = TrainingArguments(
        "out", learning_rate=0.25, lr_scheduler_type="cosine", lr_scheduler_kwargs={"num_cycles": 2}, use_cpu=True
    )
    texts = {
        name: format_value(value)
        for name, value in {"temperature": 0.5, **args.to_dict()}.items()
        if name[-6:] != "_token"
    }
    changed = select_non_defaults(texts, format_defaults())
    assert {name: value for name, value in changed.items() if name not in DERIVED} == {
        "output_dir": "out",
        "learning_rate": "0.25",
        "lr_scheduler_type": "cosine",
        "lr_scheduler_kwargs": "{num_cycles: 2}",
        "use_cpu": "True",
        "temperature": "0.5",
    }
    assert list(changed)[-1] == "temperature"
    assert is_same("3", "3.0") and is_same("None", "[]") and not is_same("3", "4") and not is_same("None", "0")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (["a", "b"], "['a', 'b']"),
        ({"a": None, "b": False, "c": [1]}, "{c: [1]}"),
        ({"api_key": "sk_secret"}, "{api_key: '<API_KEY>'}"),
        ("https://me:secret@host/x", "https://host/x"),
        ("two\nlines", "two lines"),
        ("x" * 999, "x" * (MAX_TEXT_LETTERS - 3) + "..."),
    ],
)
def test_a_value_is_one_line_without_secrets(value: Any, text: str) -> None:
    assert format_value(value) == text
