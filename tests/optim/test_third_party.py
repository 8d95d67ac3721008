from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.trainer_utils import check_target_module_exists

from littrainer import Trainer, TrainingArguments
from littrainer.arguments.choices import OptimizerNames, ParallelMode
from littrainer.optim.optimizers import THIRD_PARTY, build_optimizer, get_optimizer_class_and_keywords, is_target
from tests.optim import libraries
from tests.scenarios.trainers import StepwiseTrainer, quiet_arguments, quiet_trainer

NUMBERS: dict[str, Any] = {
    "learning_rate": 0.02,
    "adam_beta1": 0.8,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-5,
    "weight_decay": 0.3,
    "warmup_steps": 7,
    "optim_target_modules": ["query", "dense"],
}

SETTINGS: dict[str, str] = {
    "adamw_anyprecision": "use_kahan_summation=True, momentum_dtype=bfloat16, variance_dtype=float16,"
    "compensation_buffer_dtype=float32",
    "ademamix": "beta1=0.7,beta2=0.8,beta3=0.99,alpha=3.0,eps=1e-4,t_alpha=10,t_beta3=20",
    "paged_ademamix_8bit": "beta3=0.99,t_alpha=10",
    "galore_adamw": "rank=64, update_proj_gap=100, scale=0.10, proj_type=reverse_std",
    "galore_adafactor": "rank=2",
    "apollo_adamw": "rank=64,proj=svd,scale_type=tensor,update_proj_gap=100,scale=2.0,proj_type=left",
    "grokadamw": "alpha_init=0.9,lamb=1.5,gamma=0.2,grokking_signal_decay_rate=0.3,gradient_clipping=0.5",
    "schedule_free_adamw": "r=0.5,weight_lr_power=1.0",
    "schedule_free_radam": "r=0.5",
    "schedule_free_sgd": "weight_lr_power=3",
    "adamw_torch_4bit": "bf16_stochastic_round=True",
    "stable_adamw": "decouple_lr=True,max_lr=0.1,kahan_sum=True",
}
"""Name -> optim_args that transformers reads as they are meant."""


LAYERWISE = [name for name, entry in THIRD_PARTY.items() if entry.is_layerwise]
WHOLE = [name.value for name in THIRD_PARTY if name not in LAYERWISE]


class Projected(nn.Module):
    """Linear layers and others under names that transformers' models have."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.attention = nn.ModuleDict({"query": nn.Linear(4, 4), "key": nn.Linear(4, 4)})
        self.dense = nn.Linear(4, 4)
        self.dense_norm = nn.LayerNorm(4)


def library_of(name: str) -> str:
    return THIRD_PARTY[OptimizerNames(name)].homes[0].split(":")[0].split(".")[0]


def asked_of_both(
    monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, optim_args: str | None
) -> list[tuple[Any, dict[str, Any]]]:
    """What littrainer and transformers answer to the same arguments and model."""
    given = {"optim": name, "optim_args": optim_args, **NUMBERS}
    ours = quiet_arguments(folder, **given)
    theirs = quiet_arguments(folder, transformers.TrainingArguments, **given)
    model: Any = Projected()
    ask_transformers = transformers.Trainer.get_optimizer_cls_and_kwargs
    libraries.install(monkeypatch, library_of(name))
    return [get_optimizer_class_and_keywords(ours, model), ask_transformers(theirs, model)]


def asked(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, **given: Any) -> tuple[Any, dict[str, Any]]:
    """What littrainer answers about a model with linear layers."""
    args = quiet_arguments(folder, optim=name, **{"optim_target_modules": "all-linear", **given})
    libraries.install(monkeypatch, library_of(name))
    return get_optimizer_class_and_keywords(args, Projected())


@pytest.mark.parametrize("name", WHOLE)
def test_a_name_stands_for_the_class_and_keywords_that_it_has_in_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    ours, theirs = asked_of_both(monkeypatch, tmp_path, name, None)
    assert ours == theirs
    assert ours[1]["lr"] == 0.02


@pytest.mark.parametrize("name", SETTINGS)
def test_optim_args_become_the_keywords_that_they_become_in_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    ours, theirs = asked_of_both(monkeypatch, tmp_path, name, SETTINGS[name])
    assert ours == theirs
    assert _settings(ours) != _settings(asked(monkeypatch, tmp_path, name, **NUMBERS))


def _settings(answer: tuple[Any, dict[str, Any]]) -> dict[str, Any]:
    """Keywords, and those of the projected group, without the parameters."""
    keywords = dict(answer[1])
    groups = keywords.pop("params", [{}])
    return {**keywords, **{name: value for name, value in groups[-1].items() if name != "params"}}


@pytest.mark.parametrize(
    ("name", "optim_args", "expected"),
    [
        # transformers hands these on as text, or takes any text for true.
        ("adamw_torch_8bit", "block_size=128", {"block_size": 128}),
        ("stable_adamw", "kahan_sum=False,decouple_lr=no", {"kahan_sum": False, "decouple_lr": False}),
        ("rmsprop_bnb_8bit", "momentum=0.5,centered=true", {"momentum": 0.5, "centered": True, "optim_bits": 8}),
        ("galore_adafactor_layerwise", "rank=2", {"scale_parameter": False, "relative_step": False}),
    ],
)
def test_a_setting_reaches_the_class_in_the_type_that_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, optim_args: str, expected: dict[str, Any]
) -> None:
    keywords = asked(monkeypatch, tmp_path, name, optim_args=optim_args)[1]
    assert {key: keywords[key] for key in expected} == expected


@pytest.mark.parametrize("name", [name.value for name in THIRD_PARTY])
def test_a_missing_library_is_named_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    entry = THIRD_PARTY[OptimizerNames(name)]
    args = quiet_arguments(tmp_path, optim=name, optim_target_modules="all-linear")
    libraries.install(monkeypatch, library_of(name))
    if entry.projects or name.endswith("lomo"):
        with pytest.raises(ValueError, match=f"optim='{name}' needs the model"):
            get_optimizer_class_and_keywords(args)
    # Absent, and too old to have the class.
    for module in (None, ModuleType(library_of(name))):
        for home in entry.homes:
            monkeypatch.setitem(sys.modules, home.split(":")[0], module)
        with pytest.raises(ImportError) as caught:
            get_optimizer_class_and_keywords(args, Projected())
        assert f"optim={name!r}" in str(caught.value) and f"pip install {entry.package!r}" in str(caught.value)


def test_a_schedule_free_optimizer_needs_its_warm_up_in_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"schedule_free_adamw.*warmup_steps as a number of steps.*0\.25"):
        asked(monkeypatch, tmp_path, "schedule_free_adamw", warmup_steps=0.25)
    keywords = asked(monkeypatch, tmp_path, "schedule_free_adamw", warmup_steps=0.25, max_steps=40)[1]
    assert keywords["warmup_steps"] == 10


@pytest.mark.parametrize(("name", "kept"), [("adamw_bnb_8bit", 1), ("paged_adamw_32bit", 0)])
def test_embeddings_keep_their_state_in_32_bits_where_the_rest_has_8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kept: int
) -> None:
    args = quiet_arguments(tmp_path, optim=name)
    overrides = libraries.install(monkeypatch, "bitsandbytes")
    model = Projected()
    groups = [{"params": list(model.parameters())}]
    build_optimizer(model, groups, *get_optimizer_class_and_keywords(args, model))
    assert overrides == [(model.embedding, "weight", {"optim_bits": 32})] * kept


@pytest.mark.parametrize("kind", [Trainer, StepwiseTrainer])
def test_lomo_updates_in_its_own_backward_pass_at_the_schedules_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Trainer]
) -> None:
    rates = []

    def fused_backward(optimizer: Any, loss: torch.Tensor, rate: float) -> None:
        loss.backward()
        rates.append(rate)
        with torch.no_grad():
            for parameter in optimizer.given.parameters():
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-rate)
                    parameter.grad = None

    trainer = quiet_trainer(tmp_path, kind=kind, optim="lomo", max_steps=4, learning_rate=0.4)
    libraries.install(monkeypatch, "lomo_optim")
    lomo = libraries.find("lomo_optim:Lomo")
    monkeypatch.setattr(lomo, "fused_backward", fused_backward, raising=False)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    trainer.train()
    assert rates == pytest.approx([0.4, 0.3, 0.2, 0.1])
    assert trainer.optimizer.given is trainer.model
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


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
    groups = get_optimizer_class_and_keywords(args, model)[1]["params"]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert len(groups[0]["params"]) + len(groups[1]["params"]) == len(names)
    return [names[id(parameter)] for parameter in groups[1]["params"]]


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("all-linear", ["attention.query.weight", "attention.key.weight", "dense.weight"]),
        ("all_linear", ["attention.query.weight", "attention.key.weight", "dense.weight"]),
        (["query", "dense"], ["attention.query.weight", "dense.weight"]),
        (r"attention\..*", ["attention.query.weight", "attention.key.weight"]),
        ("dense", ["dense.weight"]),
    ],
    ids=str,
)
def test_the_weights_of_the_named_linear_layers_are_projected(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    targets: Any,
    expected: list[str],
) -> None:
    assert projected(monkeypatch, tmp_path, targets) == expected
    # A module of another kind that is named is told of.
    assert caplog.text.count("dense_norm, which is no linear layer") == (targets == ["query", "dense"])


@pytest.mark.parametrize(
    ("targets", "named"),
    [
        (None, r"galore_adamw.*optim_target_modules"),
        (["nothing"], r"optim_target_modules=\['nothing'\] names no linear layer of Projected"),
    ],
)
def test_targets_that_name_nothing_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, targets: Any, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        projected(monkeypatch, tmp_path, targets)


def test_a_layerwise_optimizer_refuses_to_accumulate_and_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="gradient_accumulation_steps=1 instead of 2"):
        asked(monkeypatch, tmp_path, "apollo_adamw_layerwise", gradient_accumulation_steps=2)
    monkeypatch.setattr(TrainingArguments, "parallel_mode", ParallelMode.DISTRIBUTED)
    with pytest.raises(NotImplementedError, match=r"galore_adamw_layerwise.*one process"):
        asked(monkeypatch, tmp_path, "galore_adamw_layerwise")
