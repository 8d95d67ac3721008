from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.optim import SGD

from littrainer.arguments.support import HONOURED_VALUES
from littrainer.optim.schedules import SCHEDULES, build_schedule

# Name, warm-up steps, steps of the training, options.
TABLE: list[tuple[str, int, int, dict[str, Any]]] = [
    *((name, warmup, total, {}) for name in SCHEDULES for warmup, total in ((0, 10), (3, 10), (0, 1))),
    # A polynomial divides by the steps after the warm-up.
    *((name, 10, 10, {}) for name in SCHEDULES if name != "polynomial"),
    ("cosine", 2, 9, {"num_cycles": 1.5}),
    ("cosine_with_restarts", 2, 11, {"num_cycles": 3}),
    ("polynomial", 2, 11, {"lr_end": 0.001, "power": 2.0}),
    ("inverse_sqrt", 2, 11, {"timescale": 7}),
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
    return build_schedule(name, optimizer(), warmup_steps=warmup, total_steps=total, options=options)


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
    steps = case[2] + STEPS_BEYOND
    expected = rates(theirs(*case), steps)
    assert rates(ours(*case), steps) == expected
    assert len(expected) == steps


def test_the_schedules_are_those_that_the_arguments_accept() -> None:
    assert set(SCHEDULES) == set(HONOURED_VALUES["lr_scheduler_type"])


@pytest.mark.parametrize("case", [("linear", 3, 10, {}), ("cosine_with_restarts", 0, 10, {"num_cycles": 2})])
@pytest.mark.parametrize(("first", "second"), [(ours, theirs), (theirs, ours)])
def test_a_saved_schedule_goes_on_in_the_other_library(tmp_path: Path, case: Any, first: Any, second: Any) -> None:
    whole = rates(first(*case), 10)
    interrupted = first(*case)
    rates(interrupted, 4)
    torch.save(interrupted.state_dict(), tmp_path / "scheduler.pt")
    torch.save(interrupted.optimizer.state_dict(), tmp_path / "optimizer.pt")

    resumed = second(*case)
    resumed.optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    resumed.load_state_dict(torch.load(tmp_path / "scheduler.pt", weights_only=True))
    assert rates(resumed, 6) == whole[4:]


def test_the_constant_schedule_has_no_warm_up_and_no_options() -> None:
    schedule = ours("constant", 5, 10, {"num_cycles": 3})
    assert rates(schedule, 3) == [[0.3, 0.07]] * 3


def test_a_known_name_without_a_schedule_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"lr_scheduler_type='reduce_lr_on_plateau'.*cosine.*linear"):
        ours("reduce_lr_on_plateau", 0, 10, {})


def test_an_option_that_a_schedule_does_not_take_is_refused() -> None:
    with pytest.raises(TypeError, match="num_cycles"):
        ours("linear", 0, 10, {"num_cycles": 2})


@pytest.mark.parametrize("lr_end", [0.3, 1.0])
def test_a_polynomial_that_does_not_fall_is_refused_with_both_rates(lr_end: float) -> None:
    with pytest.raises(ValueError, match=rf"lr_end={lr_end}.*0\.3.*lr_scheduler_kwargs"):
        ours("polynomial", 0, 10, {"lr_end": lr_end})


def test_the_options_handed_in_are_left_as_they_are() -> None:
    options = {"power": 2.0}
    ours("polynomial", 0, 10, options)
    assert options == {"power": 2.0}
