"""The same short training under transformers' Trainer and under ours, reporting to a tracker."""

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
# Of each run, which pushes nothing; in no tracker's record of it.
HUB_TOKEN = "hf_" + "Tr4ck" * 6

# Metrics that tell how fast the machine was.
TIMED = ("runtime", "per_second")


def names_of(side: str) -> Any:
    """The module whose Trainer a side has."""
    if side == "littrainer":
        return littrainer
    import transformers

    return transformers


def trainer_of(side: str, folder: Path, **changes: Any) -> Any:
    """A Trainer of eight optimizer steps with three evaluations, logging every second step."""
    names = names_of(side)
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
    # The weights of a model are drawn when it is made.
    torch.manual_seed(0)
    given = {name: settings.pop(name) for name in ("callbacks", "model", "model_init") if name in settings}
    if "model_init" not in given:
        given.setdefault("model", tiny_bert_classifier())
    return names.Trainer(
        args=quiet_arguments(folder, names.TrainingArguments, **settings),
        train_dataset=Rows(token_rows(18, shortest=6, longest=6)),
        eval_dataset=Rows(token_rows(7, shortest=6, longest=6)),
        compute_metrics=accuracy,
        **given,
    )


def same_on_both_machines(values: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on how fast the machine was."""
    return {name: value for name, value in values.items() if not name.endswith(TIMED)}


def assert_token_is_masked(place: Path) -> None:
    """A tracker's file, or the files below its folder, have the arguments of a run, and not the token among them."""
    contents = [path.read_bytes() for path in (place, *place.rglob("*")) if path.is_file()]
    assert any(b"HUB_TOKEN" in content for content in contents)
    assert not any(HUB_TOKEN.encode() in content for content in contents)
