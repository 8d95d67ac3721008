"""From the ddp_ arguments to the keywords of Lightning's DDPStrategy. What they change in two processes is tested in
tests/distributed/test_data_parallel.py."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from littrainer.arguments.fields import DistributedFields
from littrainer.strategies.data_parallel import DDP_KEYWORDS, get_ddp_keywords
from tests.scenarios.models import VectorClassifier, tiny_gpt2
from tests.scenarios.trainers import quiet_arguments


@pytest.mark.parametrize(
    ("argument", "value", "keyword", "expected"),
    [
        ("ddp_find_unused_parameters", False, "find_unused_parameters", False),
        ("ddp_bucket_cap_mb", 7, "bucket_cap_mb", 7),
        ("ddp_broadcast_buffers", False, "broadcast_buffers", False),
        ("ddp_static_graph", True, "static_graph", True),
        ("ddp_backend", "gloo", "process_group_backend", "gloo"),
        ("ddp_timeout", 90, "timeout", timedelta(seconds=90)),
    ],
)
def test_an_argument_is_a_keyword_of_the_strategy(
    tmp_path: Path, argument: str, value: Any, keyword: str, expected: Any
) -> None:
    assert get_ddp_keywords(quiet_arguments(tmp_path, **{argument: value}), VectorClassifier())[keyword] == expected


def test_every_ddp_argument_has_a_keyword() -> None:
    names = {field.name for field in dataclasses.fields(DistributedFields) if field.name.startswith("ddp_")}
    assert names == set(DDP_KEYWORDS)


def test_arguments_that_are_not_set_leave_torchs_defaults(tmp_path: Path) -> None:
    assert set(get_ddp_keywords(quiet_arguments(tmp_path), VectorClassifier())) == {"find_unused_parameters", "timeout"}


def test_unused_parameters_are_looked_for_unless_a_transformers_model_recomputes_activations(tmp_path: Path) -> None:
    def looks(model: Any, **changes: Any) -> bool:
        return get_ddp_keywords(quiet_arguments(tmp_path, **changes), model)["find_unused_parameters"]

    assert looks(VectorClassifier())
    assert looks(tiny_gpt2())
    assert not looks(tiny_gpt2(), activation_checkpointing=True)
    recomputing = tiny_gpt2()
    recomputing.gradient_checkpointing_enable()
    assert not looks(recomputing)
    assert looks(recomputing, ddp_find_unused_parameters=True)
