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
"""Name -> optim_args that transformers parses correctly."""


NOT_LAYERWISE = [name.value for name, entry in THIRD_PARTY.items() if not entry.is_layerwise]


class Projected(nn.Module):
    """Linear and other layers with names as in transformers' models."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.attention = nn.ModuleDict({"query": nn.Linear(4, 4), "key": nn.Linear(4, 4)})
        self.dense = nn.Linear(4, 4)
        self.dense_norm = nn.LayerNorm(4)


def get_library(name: str) -> str:
    return THIRD_PARTY[OptimizerNames(name)].paths[0].split(":")[0].split(".")[0]


def resolve_both(
    monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, optim_args: str | None
) -> list[tuple[Any, dict[str, Any]]]:
    """Return class and keywords from littrainer and transformers for the same arguments and model."""
    overrides = {"optim": name, "optim_args": optim_args, **NUMBERS}
    ours = quiet_arguments(folder, **overrides)
    theirs = quiet_arguments(folder, transformers.TrainingArguments, **overrides)
    model: Any = Projected()
    libraries.install(monkeypatch, get_library(name))
    expected = transformers.Trainer.get_optimizer_cls_and_kwargs(theirs, model)
    return [get_optimizer_class_and_keywords(ours, model), expected]


def resolve(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, **overrides: Any) -> tuple[Any, dict[str, Any]]:
    """Return class and keywords for a model with linear layers."""
    args = quiet_arguments(folder, optim=name, **{"optim_target_modules": "all-linear", **overrides})
    libraries.install(monkeypatch, get_library(name))
    return get_optimizer_class_and_keywords(args, Projected())


@pytest.mark.parametrize("name", NOT_LAYERWISE)
def test_class_and_keywords_of_a_name_equal_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    ours, theirs = resolve_both(monkeypatch, tmp_path, name, None)
    assert ours == theirs
    assert ours[1]["lr"] == 0.02


@pytest.mark.parametrize("name", SETTINGS)
def test_keywords_from_optim_args_equal_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    ours, theirs = resolve_both(monkeypatch, tmp_path, name, SETTINGS[name])
    assert ours == theirs
    assert get_settings(ours) != get_settings(resolve(monkeypatch, tmp_path, name, **NUMBERS))


def get_settings(result: tuple[Any, dict[str, Any]]) -> dict[str, Any]:
    """Return the keywords and the settings of the get_projected_names group, without the parameters."""
    keywords = dict(result[1])
    groups = keywords.pop("params", [{}])
    return {**keywords, **{name: value for name, value in groups[-1].items() if name != "params"}}


@pytest.mark.parametrize(
    ("name", "optim_args", "expected"),
    [
        # transformers passes these on as text, or takes any text for true.
        ("adamw_torch_8bit", "block_size=128", {"block_size": 128}),
        ("stable_adamw", "kahan_sum=False,decouple_lr=no", {"kahan_sum": False, "decouple_lr": False}),
        ("rmsprop_bnb_8bit", "momentum=0.5,centered=true", {"momentum": 0.5, "centered": True, "optim_bits": 8}),
        ("galore_adafactor_layerwise", "rank=2", {"scale_parameter": False, "relative_step": False}),
    ],
)
def test_a_setting_is_converted_to_the_type_of_the_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, optim_args: str, expected: dict[str, Any]
) -> None:
    keywords = resolve(monkeypatch, tmp_path, name, optim_args=optim_args)[1]
    assert {key: keywords[key] for key in expected} == expected


@pytest.mark.parametrize("name", [name.value for name in THIRD_PARTY])
def test_a_missing_library_is_named_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    entry = THIRD_PARTY[OptimizerNames(name)]
    args = quiet_arguments(tmp_path, optim=name, optim_target_modules="all-linear")
    libraries.install(monkeypatch, get_library(name))
    if entry.projects or name.endswith("lomo"):
        with pytest.raises(ValueError, match=f"optim='{name}' needs the model"):
            get_optimizer_class_and_keywords(args)
    # Absent, and too old to have the class.
    for module in (None, ModuleType(get_library(name))):
        for path in entry.paths:
            monkeypatch.setitem(sys.modules, path.split(":")[0], module)
        with pytest.raises(ImportError) as caught:
            get_optimizer_class_and_keywords(args, Projected())
        assert f"optim={name!r}" in str(caught.value) and f"pip install {entry.package!r}" in str(caught.value)


def test_a_schedule_free_optimizer_requires_warmup_in_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"schedule_free_adamw.*warmup_steps as a number of steps.*0\.25"):
        resolve(monkeypatch, tmp_path, "schedule_free_adamw", warmup_steps=0.25)
    keywords = resolve(monkeypatch, tmp_path, "schedule_free_adamw", warmup_steps=0.25, max_steps=40)[1]
    assert keywords["warmup_steps"] == 10


@pytest.mark.parametrize(("name", "count"), [("adamw_bnb_8bit", 1), ("paged_adamw_32bit", 0)])
def test_embeddings_have_32_bit_state_if_other_state_has_8_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, count: int
) -> None:
    args = quiet_arguments(tmp_path, optim=name)
    overrides = libraries.install(monkeypatch, "bitsandbytes")
    model = Projected()
    groups = [{"params": list(model.parameters())}]
    build_optimizer(model, groups, *get_optimizer_class_and_keywords(args, model))
    assert overrides == [(model.embedding, "weight", {"optim_bits": 32})] * count


@pytest.mark.parametrize("kind", [Trainer, StepwiseTrainer])
def test_lomo_updates_in_its_fused_backward_at_the_schedules_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Trainer]
) -> None:
    rates = []

    def fused_backward(optimizer: Any, loss: torch.Tensor, rate: float) -> None:
        loss.backward()
        rates.append(rate)
        with torch.no_grad():
            for parameter in optimizer.params.parameters():
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
    assert trainer.optimizer.params is trainer.model
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


PATHS = ["", "embedding", "attention", "attention.query", "attention.key", "dense", "dense_norm"]
TARGETS: list[Any] = ["dense", ".*dense.*", r".*\.(query|key)", ["query"], ["attention.key", "den"], [r".*\.q.*y"]]


@pytest.mark.parametrize("targets", TARGETS, ids=str)
def test_targets_match_the_same_paths_as_in_transformers(targets: Any) -> None:
    assert [is_target(targets, path) for path in PATHS] == [check_target_module_exists(targets, path) for path in PATHS]


def get_projected_names(monkeypatch: pytest.MonkeyPatch, folder: Path, targets: Any) -> list[str]:
    """Return the names of the parameters in the get_projected_names group."""
    args = quiet_arguments(folder, optim="galore_adamw", optim_target_modules=targets)
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
    assert get_projected_names(monkeypatch, tmp_path, targets) == expected
    assert caplog.text.count("dense_norm, which is no linear layer") == (targets == ["query", "dense"])


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (None, r"galore_adamw.*optim_target_modules"),
        (["nothing"], r"optim_target_modules=\['nothing'\] names no linear layer of Projected"),
    ],
)
def test_targets_without_a_match_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, targets: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        get_projected_names(monkeypatch, tmp_path, targets)


def test_a_layerwise_optimizer_refuses_accumulation_and_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="gradient_accumulation_steps=1 instead of 2"):
        resolve(monkeypatch, tmp_path, "apollo_adamw_layerwise", gradient_accumulation_steps=2)
    monkeypatch.setattr(TrainingArguments, "parallel_mode", ParallelMode.DISTRIBUTED)
    with pytest.raises(NotImplementedError, match=r"galore_adamw_layerwise.*one process"):
        resolve(monkeypatch, tmp_path, "galore_adamw_layerwise")
