"""The same short training with transformers' Trainer and ours, reporting to a tracker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import littrainer
from tests.scenarios.data import Rows, token_rows
from tests.scenarios.metrics import accuracy
from tests.scenarios.models import tiny_bert_classifier
from tests.scenarios.trainers import quiet_arguments

SIDES = ("transformers", "littrainer")
# An argument of each run that trackers must mask.
HUB_TOKEN = "hf_" + "Tr4ck" * 6

# Suffixes of metrics that depend on the machine's speed.
TIME_SUFFIXES = ("runtime", "per_second")


def get_library(side: str) -> Any:
    """Return the library of a side."""
    if side == "littrainer":
        return littrainer
    import transformers

    return transformers


def make_trainer(side: str, folder: Path, **changes: Any) -> Any:
    """Return a Trainer of six optimizer steps, with two evaluations, that logs every second step."""
    library = get_library(side)
    settings = {
        "max_steps": 6,
        "logging_strategy": "steps",
        "logging_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "run_name": "one short run",
        "hub_token": HUB_TOKEN,
        **changes,
    }
    torch.manual_seed(0)
    keywords = {name: settings.pop(name) for name in ("callbacks", "model", "model_init") if name in settings}
    if "model_init" not in keywords:
        keywords.setdefault("model", tiny_bert_classifier())
    return library.Trainer(
        args=quiet_arguments(folder, library.TrainingArguments, **settings),
        train_dataset=Rows(token_rows(18, shortest=6, longest=6)),
        eval_dataset=Rows(token_rows(7, shortest=6, longest=6)),
        compute_metrics=accuracy,
        **keywords,
    )


def drop_times(values: dict[str, Any]) -> dict[str, Any]:
    """Return values without metrics that depend on the machine's speed."""
    return {name: value for name, value in values.items() if not name.endswith(TIME_SUFFIXES)}


def assert_token_is_masked(root: Path) -> None:
    """Assert that a tracker's file or folder has the arguments of a run, without the token."""
    contents = [path.read_bytes() for path in (root, *root.rglob("*")) if path.is_file()]
    assert any(b"HUB_TOKEN" in content for content in contents)
    assert not any(HUB_TOKEN.encode() in content for content in contents)
