from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from transformers.trainer_utils import check_target_module_exists

from littrainer.arguments.choices import ParallelMode
from littrainer.optim.optimizers import is_target, optimizer_class_and_keywords
from tests.optim import libraries
from tests.optim.test_third_party import Projected
from tests.scenarios.trainers import quiet_arguments

PATHS = ["", "embedding", "attention", "attention.query", "attention.key", "dense", "dense_norm"]
TARGETS: list[Any] = ["dense", ".*dense.*", r".*\.(query|key)", ["query"], ["attention.key", "den"], [r".*\.q.*y"]]


@pytest.mark.parametrize("targets", TARGETS, ids=str)
def test_a_path_is_a_target_where_transformers_says_so(targets: Any) -> None:
    assert [is_target(targets, path) for path in PATHS] == [check_target_module_exists(targets, path) for path in PATHS]


def projected(monkeypatch: pytest.MonkeyPatch, folder: Path, targets: Any, **given: Any) -> list[str]:
    """Names of the parameters in the projected group."""
    args = quiet_arguments(folder, optim="galore_adamw", optim_target_modules=targets, **given)
    libraries.install(monkeypatch, "galore_torch")
    model = Projected()
    groups = optimizer_class_and_keywords(args, model)[1]["params"]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert len(groups[0]["params"]) + len(groups[1]["params"]) == len(names)
    return [names[id(parameter)] for parameter in groups[1]["params"]]


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("all-linear", ["attention.query.weight", "attention.key.weight", "dense.weight"]),
        ("all_linear", ["attention.query.weight", "attention.key.weight", "dense.weight"]),
        (["query"], ["attention.query.weight"]),
        (r"attention\..*", ["attention.query.weight", "attention.key.weight"]),
        ("dense", ["dense.weight"]),
    ],
    ids=str,
)
def test_the_weights_of_the_named_linear_layers_are_projected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, targets: Any, expected: list[str]
) -> None:
    assert projected(monkeypatch, tmp_path, targets) == expected


def test_a_named_module_that_is_no_linear_layer_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "littrainer"):
        projected(monkeypatch, tmp_path, ["dense"])
    assert caplog.text.count("no linear layer") == 1
    assert "dense_norm" in caplog.text


@pytest.mark.parametrize(
    ("targets", "error", "named"),
    [
        (None, ValueError, r"galore_adamw.*optim_target_modules"),
        (["nothing"], ValueError, r"optim_target_modules=\['nothing'\] names no linear layer of Projected"),
        ({"dense": 1}, TypeError, r"optim_target_modules must be a list.*dict"),
    ],
)
def test_targets_that_name_nothing_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, targets: Any, error: type[Exception], named: str
) -> None:
    args = quiet_arguments(tmp_path, optim="galore_adamw")
    args.optim_target_modules = targets
    libraries.install(monkeypatch, "galore_torch")
    with pytest.raises(error, match=named):
        optimizer_class_and_keywords(args, Projected())


def test_a_layerwise_optimizer_refuses_to_accumulate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = quiet_arguments(
        tmp_path, optim="apollo_adamw_layerwise", optim_target_modules="all-linear", gradient_accumulation_steps=2
    )
    libraries.install(monkeypatch, "apollo_torch")
    with pytest.raises(ValueError, match="gradient_accumulation_steps=1 instead of 2"):
        optimizer_class_and_keywords(args, Projected())


def test_a_layerwise_optimizer_refuses_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = quiet_arguments(tmp_path, optim="galore_adamw_layerwise", optim_target_modules="all-linear")
    libraries.install(monkeypatch, "galore_torch")
    monkeypatch.setattr(type(args), "parallel_mode", ParallelMode.DISTRIBUTED)
    with pytest.raises(NotImplementedError, match=r"galore_adamw_layerwise.*one process"):
        optimizer_class_and_keywords(args, Projected())
