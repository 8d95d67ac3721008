from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from littrainer.optim.parameter_groups import (
    RequestedHyperparameters,
    get_decayed_parameter_names,
    have_hyperparameters_changed,
)
from littrainer.optim.schedules import get_linear_schedule_with_warmup
from tests.scenarios.models import (
    VectorClassifier,
    tiny_bert_classifier,
    tiny_bert_for_masked_tokens,
    tiny_gpt2,
    tiny_llama,
    tiny_t5,
)

STEPS = 10


def an_optimizer(rate: float) -> Any:
    """Two groups, of which the second never decays."""
    model = nn.Linear(2, 2)
    return torch.optim.AdamW([{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.0}], lr=rate)


def stepped(optimizer: Any, schedule: Any, times: int) -> None:
    for _ in range(times):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        if isinstance(schedule, ReduceLROnPlateau):
            schedule.step(1.0)
        else:
            schedule.step()


def gone_on(old: tuple[Any, Any], new: tuple[Any, Any], rate_then: float | None, rate_now: float) -> None:
    """Load what an optimizer and a schedule have come to into others, which have been asked for something else."""
    asked_for = RequestedHyperparameters(*new)
    for one, other in zip(old, new, strict=True):
        other.load_state_dict(one.state_dict())
    asked_for.apply_to(*new, rate_then, rate_now)


def rates(optimizer: Any) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize(("done", "total"), [(4, STEPS), (STEPS, 2 * STEPS)])
def test_the_schedule_goes_on_at_its_place_from_the_new_rate(done: int, total: int) -> None:
    old, new = an_optimizer(0.1), an_optimizer(0.02)
    old_schedule, schedule = (get_linear_schedule_with_warmup(*one) for one in ((old, 0, STEPS), (new, 0, total)))
    stepped(old, old_schedule, done)
    gone_on((old, old_schedule), (new, schedule), 0.1, 0.02)
    for step in (done, done + 1):
        assert rates(new) == schedule.get_last_lr() == pytest.approx([0.02 * (total - step) / total] * 2)
        stepped(new, schedule, 1)


def test_a_schedule_that_goes_by_a_metric_keeps_what_it_has_lowered_the_rate_by() -> None:
    old, new = an_optimizer(0.1), an_optimizer(0.02)
    old_schedule, schedule = (ReduceLROnPlateau(one, factor=0.5, patience=0) for one in (old, new))
    stepped(old, old_schedule, 2)
    assert rates(old) == pytest.approx([0.05] * 2)
    gone_on((old, old_schedule), (new, schedule), 0.1, 0.02)
    assert rates(new) == pytest.approx([0.01] * 2)


def test_other_groups_than_the_checkpoint_has_are_refused() -> None:
    old, new = an_optimizer(0.1), an_optimizer(0.02)
    asked_for = RequestedHyperparameters(new, None)
    old.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(ValueError, match="3 groups of parameters and the new one 2"):
        asked_for.apply_to(old, None, 0.1, 0.02)


@pytest.mark.parametrize(
    ("then", "now", "differ"),
    [
        ({"learning_rate": 0.1}, {"learning_rate": 0.1}, False),
        ({"learning_rate": 0.1}, {"learning_rate": 0.2}, True),
        ({"betas": [0.9, 0.99]}, {"betas": (0.9, 0.99)}, False),
        (None, {"learning_rate": 0.1}, True),
    ],
)
def test_hyperparameters_are_compared_as_a_file_holds_them(then: Any, now: Any, differ: bool) -> None:
    assert have_hyperparameters_changed(then, now) is differ


class OddlyNamed(nn.Module):
    """Names that hold `norm` or `bias` in every position."""

    NAMES = (
        *("norm", "norms", "prenorm", "q_norm", "norm_q", "normalizer", "LayerNorm2"),
        *("rmsnorm_in", "NORM", "BiasGate", "unbiased", "enormous"),
    )

    def __init__(self) -> None:
        super().__init__()
        for name in self.NAMES:
            self.add_module(name, nn.Linear(2, 2))
            self.register_parameter(f"own_{name}", nn.Parameter(torch.zeros(1)))
        self.inside = nn.ModuleDict(
            {"norm": nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), "batch": nn.GroupNorm(1, 2)}
        )
        self.nothing = None
        self.register_parameter("absent", None)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "vectors": VectorClassifier,
    "bert": tiny_bert_classifier,
    "bert with tied weights": tiny_bert_for_masked_tokens,
    "gpt2": tiny_gpt2,
    "llama": tiny_llama,
    "t5": tiny_t5,
    "odd names": OddlyNamed,
    "a bare norm": lambda: nn.LayerNorm(3),
    "a bare parameter list": lambda: nn.ParameterList([torch.zeros(1), torch.zeros(2)]),
    "no parameters": nn.Identity,
}


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS.keys())
def test_the_names_are_those_that_transformers_decays_in_its_order(build: Callable[[], nn.Module]) -> None:
    model = build()
    owner: Any = None
    assert get_decayed_parameter_names(model) == transformers.Trainer.get_decay_parameter_names(owner, model)
