from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from littrainer.optim.parameter_groups import AskedFor, are_others
from littrainer.optim.schedules import get_linear_schedule_with_warmup

STEPS = 10


def an_optimizer(rate: float, decay: float = 0.0, betas: tuple[float, float] = (0.9, 0.999)) -> Any:
    """Two groups, of which the second never decays."""
    model = nn.Linear(2, 2)
    groups = [
        {"params": [model.weight], "weight_decay": decay},
        {"params": [model.bias], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=betas)


def linear(optimizer: Any, warmup: int = 0) -> Any:
    return get_linear_schedule_with_warmup(optimizer, warmup, STEPS)


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
    asked_for = AskedFor(*new)
    for one, other in zip(old, new, strict=True):
        other.load_state_dict(one.state_dict())
    asked_for.put_back(*new, rate_then, rate_now)


def rates(optimizer: Any) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def test_the_schedule_goes_on_at_its_place_from_the_new_rate() -> None:
    old, new = an_optimizer(0.1), an_optimizer(0.02)
    old_schedule, schedule = linear(old), linear(new)
    stepped(old, old_schedule, 4)
    gone_on((old, old_schedule), (new, schedule), 0.1, 0.02)
    assert rates(new) == pytest.approx([0.02 * 6 / STEPS] * 2)
    assert schedule.get_last_lr() == rates(new)
    stepped(new, schedule, 1)
    assert rates(new) == pytest.approx([0.02 * 5 / STEPS] * 2)


def test_a_rate_that_had_fallen_to_zero_is_not_lost() -> None:
    old, new = an_optimizer(0.1), an_optimizer(0.02)
    old_schedule = linear(old)
    stepped(old, old_schedule, STEPS)
    schedule = get_linear_schedule_with_warmup(new, 0, 2 * STEPS)
    gone_on((old, old_schedule), (new, schedule), 0.1, 0.02)
    assert rates(new) == pytest.approx([0.01] * 2)


def test_decay_and_betas_are_those_asked_for_in_the_groups_that_have_them() -> None:
    old, new = an_optimizer(0.1, decay=0.3), an_optimizer(0.1, decay=0.01, betas=(0.8, 0.9))
    old_schedule, schedule = linear(old), linear(new)
    stepped(old, old_schedule, 1)
    gone_on((old, old_schedule), (new, schedule), 0.1, 0.1)
    assert [group["weight_decay"] for group in new.param_groups] == [0.01, 0.0]
    assert [group["betas"] for group in new.param_groups] == [(0.8, 0.9)] * 2


def test_what_the_optimizer_has_gathered_is_kept() -> None:
    old, new = an_optimizer(0.1), an_optimizer(0.02)
    old_schedule, schedule = linear(old), linear(new)
    stepped(old, old_schedule, 3)
    gone_on((old, old_schedule), (new, schedule), 0.1, 0.02)
    weight = new.param_groups[0]["params"][0]
    assert new.state[weight]["step"] == 3
    assert torch.equal(new.state[weight]["exp_avg"], old.state[old.param_groups[0]["params"][0]]["exp_avg"])


def test_a_schedule_that_multiplies_goes_on_from_the_new_rate() -> None:
    old, new = an_optimizer(0.1), an_optimizer(0.02)
    old_schedule, schedule = (StepLR(one, step_size=2, gamma=0.5) for one in (old, new))
    stepped(old, old_schedule, 3)
    gone_on((old, old_schedule), (new, schedule), 0.1, 0.02)
    assert rates(new) == pytest.approx([0.01] * 2)
    stepped(new, schedule, 1)
    assert rates(new) == pytest.approx([0.005] * 2)


def test_a_schedule_that_goes_by_a_metric_keeps_what_it_has_lowered_the_rate_by() -> None:
    old, new = an_optimizer(0.1), an_optimizer(0.02)
    old_schedule, schedule = (ReduceLROnPlateau(one, factor=0.5, patience=0) for one in (old, new))
    stepped(old, old_schedule, 2)
    assert rates(old) == pytest.approx([0.05] * 2)
    gone_on((old, old_schedule), (new, schedule), 0.1, 0.02)
    assert rates(new) == pytest.approx([0.01] * 2)


def test_other_groups_than_the_checkpoint_has_are_refused() -> None:
    old, new = an_optimizer(0.1), an_optimizer(0.02)
    asked_for = AskedFor(new, linear(new))
    old.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(ValueError, match="3 groups of parameters and the new one 2"):
        asked_for.put_back(old, linear(old), 0.1, 0.02)


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
    assert are_others(then, now) is differ
