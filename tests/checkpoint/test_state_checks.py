from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from littrainer.checkpoint.state_checks import optimizer_differences, scaler_differences, schedule_differences


def stepped(optimizer_class: Any, *shapes: tuple[int, ...], groups: int = 1, **settings: Any) -> Any:
    """An optimizer over parameters of these shapes in each of its groups, after one step."""
    parameters = [[nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in range(groups)]
    optimizer = optimizer_class([{"params": group} for group in parameters], lr=0.1, **settings)
    for group in parameters:
        for parameter in group:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


OPTIMIZERS = [
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.Adafactor, {}),
    (torch.optim.Rprop, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adamax, {}),
]


@pytest.mark.parametrize(("optimizer_class", "settings"), OPTIMIZERS)
def test_an_optimizer_takes_a_state_of_its_own_shapes(optimizer_class: Any, settings: Any) -> None:
    saved, optimizer = (stepped(optimizer_class, (2, 3), (4,), (), groups=2, **settings) for _ in range(2))
    assert optimizer_differences(optimizer, saved.state_dict()) == []


@pytest.mark.parametrize(("optimizer_class", "settings"), [OPTIMIZERS[0], OPTIMIZERS[1], OPTIMIZERS[6]])
def test_a_state_of_other_shapes_names_entry_parameter_and_group(optimizer_class: Any, settings: Any) -> None:
    saved, optimizer = (
        stepped(optimizer_class, (2, 3), (4,), **settings),
        stepped(optimizer_class, (2, 3), (5,), **settings),
    )
    names = {id(parameter): f"layer.{index}" for index, parameter in enumerate(optimizer.param_groups[0]["params"])}
    differences = optimizer_differences(optimizer, saved.state_dict(), names)
    assert differences
    assert all("of layer.1 (parameter group 0) is (4,) in the checkpoint" in text for text in differences)


def test_a_state_with_other_groups_says_how_many() -> None:
    saved, optimizer = stepped(torch.optim.SGD, (2,), groups=3), stepped(torch.optim.SGD, (2,), groups=2)
    (text,) = optimizer_differences(optimizer, saved.state_dict())
    assert text == "it has 3 parameter groups and the optimizer has 2"


def test_a_group_with_other_parameters_is_named_by_its_number() -> None:
    saved, optimizer = stepped(torch.optim.SGD, (2,), (2,)), stepped(torch.optim.SGD, (2,))
    (text,) = optimizer_differences(optimizer, saved.state_dict())
    assert text.startswith("parameter group 0 has 2 parameters in it and 1")


def test_a_long_list_of_differences_is_cut_off() -> None:
    shapes, others = [(2,)] * 40, [(3,)] * 40
    saved, optimizer = stepped(torch.optim.AdamW, *shapes), stepped(torch.optim.AdamW, *others)
    differences = optimizer_differences(optimizer, saved.state_dict())
    assert len(differences) < 10 and differences[-1] == "and 74 more"


@pytest.mark.parametrize("state", [[], {"state": {}}, {"state": {}, "param_groups": [3]}, 7])
def test_what_is_no_state_of_an_optimizer_is_said(state: Any) -> None:
    assert optimizer_differences(stepped(torch.optim.SGD, (2,)), state)


def test_an_optimizer_of_a_users_own_judges_its_state_itself() -> None:
    class Own(torch.optim.SGD):
        def load_state_dict(self, state_dict: Any) -> None:
            pass

    assert optimizer_differences(stepped(Own, (2,)), {"anything": 1}) == []


def test_an_optimizer_of_another_library_may_have_entries_of_other_shapes_but_no_other_groups() -> None:
    class LowRank(torch.optim.SGD):
        pass

    saved = stepped(LowRank, (2,), momentum=0.9).state_dict()
    saved["state"][0]["momentum_buffer"] = torch.zeros(1)
    assert optimizer_differences(stepped(LowRank, (2,), momentum=0.9), saved) == []
    assert optimizer_differences(stepped(LowRank, (2,), groups=2), saved) == [
        "it has 1 parameter groups and the optimizer has 2"
    ]


def test_a_schedule_for_other_groups_is_told_apart() -> None:
    def schedule(groups: int) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(stepped(torch.optim.SGD, (2,), groups=groups), lambda step: 1.0)

    assert schedule_differences(schedule(2), schedule(2).state_dict()) == []
    assert schedule_differences(schedule(2), schedule(3).state_dict()) == [
        "it has 3 base learning rates and the schedule has 2"
    ]
    assert schedule_differences(schedule(2), [1]) == ["it holds no schedule's state"]


def test_a_state_of_the_loss_scaling_has_to_be_complete_and_of_numbers() -> None:
    scaler = torch.amp.GradScaler("cpu")
    assert scaler_differences(scaler, scaler.state_dict()) == []
    assert scaler_differences(scaler, {**scaler.state_dict(), "scale": "x"}) == ["scale is no number"]
    assert "it lacks _growth_tracker, backoff_factor" in scaler_differences(scaler, {})[0]
    assert scaler_differences(scaler, None) == ["it holds no state of a loss scaling"]
