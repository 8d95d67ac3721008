from __future__ import annotations

import inspect
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

import littrainer
from littrainer.arguments.choices import SchedulerType
from littrainer.optim.layerwise import LayerwiseOptimizer
from littrainer.optim.schedules import (
    FOLLOWING_A_METRIC,
    SCHEDULES,
    get_schedule_factory,
    get_scheduler,
    is_metric_driven,
    set_schedule_step,
    step_on_metric,
)

STEPPED_WITH_THE_OPTIMIZER = [name for name in SCHEDULES if name not in FOLLOWING_A_METRIC]

# Name, warm-up steps, steps of the training, options.
TABLE: list[tuple[str, int, int, dict[str, Any]]] = [
    *(
        (name, warmup, total, {})
        for name in STEPPED_WITH_THE_OPTIMIZER
        for warmup, total in ((0, 10), (3, 10), (0, 1), (12, 10), (10, 10))
    ),
    ("cosine", 2, 9, {"num_cycles": 1.5}),
    ("cosine_with_min_lr", 2, 13, {"min_lr_rate": 0.25, "num_cycles": 1.5}),
    ("warmup_stable_decay", 4, 17, {"num_decay_steps": 5, "warmup_type": "cosine"}),
]
STEPS_BEYOND = 3


def optimizer() -> SGD:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (0.3, 0.07)]
    return SGD(groups, lr=0.3)


def theirs(name: str, warmup: int, total: int, options: dict[str, Any]) -> Any:
    return transformers.get_scheduler(
        name, optimizer(), num_warmup_steps=warmup, num_training_steps=total, scheduler_specific_kwargs=options
    )


def ours(name: str, warmup: int, total: int, options: dict[str, Any]) -> Any:
    return get_scheduler(name, optimizer(), warmup, total, options)


def rates(schedule: Any, steps: int) -> list[list[float]]:
    """The learning rates of the groups at this and the following steps."""
    found = []
    for _ in range(steps):
        found.append(schedule.get_last_lr())
        schedule.optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("case", TABLE, ids=lambda case: "-".join(map(str, case)))
def test_each_step_has_exactly_the_rates_of_transformers_schedule(case: tuple[str, int, int, dict[str, Any]]) -> None:
    one, other, steps = ours(*case), theirs(*case), case[2] + STEPS_BEYOND
    assert one.state_dict() == other.state_dict()
    assert rates(one, steps) == rates(other, steps)
    assert one.state_dict() == other.state_dict()


def test_every_name_has_a_schedule_whose_function_is_public_and_takes_what_transformers_takes() -> None:
    for key in SchedulerType:
        make = get_schedule_factory(key.value)
        assert getattr(littrainer, make.__name__) is make
        described = [
            [(one.name, one.kind, one.default) for one in inspect.signature(made_by).parameters.values()]
            for made_by in (make, getattr(transformers.optimization, make.__name__))
        ]
        assert described[0] == described[1]


@pytest.mark.parametrize("module", [None, ModuleType("transformers.optimization")], ids=["absent", "too old"])
def test_a_schedule_of_transformers_says_where_it_is_to_be_had(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    monkeypatch.setitem(sys.modules, "transformers.optimization", module)
    with pytest.raises(ImportError, match=r"'greedy'.*`GreedyLR`.*pip install -U transformers"):
        get_scheduler("greedy", optimizer())


@pytest.mark.parametrize("name", ["constant", "constant_with_warmup"])
def test_options_of_a_schedule_without_any_are_left_out_with_a_warning(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert rates(ours(name, 0, 10, {"num_cycles": 3}), 3) == [[0.3, 0.07]] * 3
    assert "num_cycles" in caplog.text and name in caplog.text


REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("cosinus", {}, ValueError, r"'cosinus'.*SchedulerType.*'cosine'"),
    ("cosine", {"num_cycle": 2}, TypeError, r"has 'num_cycle'.*'cosine'.*did you mean 'num_cycles'"),
    ("reduce_lr_on_plateau", {"patient": 2}, TypeError, r"'patient'.*'reduce_lr_on_plateau'.*did you mean 'patience'"),
    ("greedy", {"patient": 2}, TypeError, r"'patient'.*'greedy'.*did you mean 'patience'"),
    ("warmup_stable_decay", {}, TypeError, "does not fit lr_scheduler_type='warmup_stable_decay'.*num_decay_steps"),
    ("cosine", {"num_cycles": None}, TypeError, "lr_scheduler_kwargs.*num_cycles"),
    ("greedy", {"factor": "small"}, TypeError, "lr_scheduler_kwargs.*factor"),
]


@pytest.mark.parametrize(("name", "options", "error", "named"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_a_schedule_cannot_be_made_with_is_refused_by_name(
    name: str, options: dict[str, Any], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        ours(name, 0, 10, options)


def test_what_a_schedule_lacks_is_named() -> None:
    for lacking in ("num_warmup_steps", "num_training_steps"):
        with pytest.raises(ValueError, match=lacking):
            get_scheduler("linear", optimizer(), **{"num_warmup_steps": 0, "num_training_steps": 3, lacking: None})
    parameter = torch.nn.Parameter(torch.zeros(1))
    layerwise = LayerwiseOptimizer({parameter: SGD([parameter], lr=0.1)})
    for name in FOLLOWING_A_METRIC:
        with pytest.raises(ValueError, match=f"'{name}'.*layer-wise"):
            get_scheduler(name, layerwise, 0, 10)


def test_those_that_follow_a_metric_are_known_whoever_made_them() -> None:
    followers = [
        ours("reduce_lr_on_plateau", 0, 10, {"patience": 3}),
        ours("greedy", 0, 10, {"patience": 3}),
        transformers.optimization.GreedyLR(optimizer()),
    ]
    assert [type(one) for one in followers[:2]] == [ReduceLROnPlateau, littrainer.GreedyLR]
    assert [one.patience for one in followers[:2]] == [3, 3]
    assert all(is_metric_driven(one) for one in followers)
    assert not is_metric_driven(LambdaLR(optimizer(), lambda step: 1.0))


def test_a_metric_is_found_with_or_without_its_prefix_and_the_loss_by_default() -> None:
    seen: list[float] = []
    schedule, metrics = SimpleNamespace(step=seen.append), {"eval_loss": 0.5, "eval_f1": 0.7}
    for name in ("f1", "eval_f1", None):
        step_on_metric(schedule, metrics, name)
    assert seen == [0.7, 0.7, 0.5]
    with pytest.raises(KeyError, match=r"metric_for_best_model.*eval_accuracy.*eval_loss.*compute_metrics"):
        step_on_metric(schedule, metrics, "accuracy")


def test_a_schedule_that_is_moved_goes_on_as_if_it_had_taken_so_many_steps() -> None:
    def schedule(steps: int) -> Any:
        optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
        made = get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=9)
        for _ in range(steps):
            optimizer.step()
            made.step()
        return made

    moved, expected = schedule(2), schedule(6)
    set_schedule_step(moved, 6)
    assert moved.last_epoch == 6 and moved.get_last_lr() == expected.get_last_lr()
    assert moved.optimizer.param_groups[0]["lr"] == expected.get_last_lr()[0]
    plateau = ReduceLROnPlateau(moved.optimizer)
    set_schedule_step(plateau, 6)
    assert plateau.last_epoch == 0
