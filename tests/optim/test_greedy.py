from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD
from transformers.optimization import GreedyLR as TheirGreedyLR

from littrainer.optim.greedy import GreedyLR

FALLING = [2.0, 1.5, 1.2, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4]
NOISY = [2.0, 1.5, 1.6, 1.4, 1.4, 1.7, 1.8, 1.9, 1.2, 1.1, 1.0, 1.3, 1.3, 1.3, 1.3, 1.3, 0.9, 0.8, 0.7, 0.6]
STUCK = [1.0] * 24

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "impatient": {"patience": 0},
    "maximum": {"patience": 1, "mode": "max"},
    "relative threshold": {"patience": 0, "threshold": 0.1, "threshold_mode": "rel"},
    "relative threshold, maximum": {"patience": 0, "threshold": 0.1, "threshold_mode": "rel", "mode": "max"},
    "cooldown": {"patience": 0, "cooldown": 2, "factor": 0.5, "min_lr": 1e-5},
    "warmup": {"patience": 0, "warmup": 2, "factor": 0.5, "max_lr": 100.0},
    "bounds for each group": {"patience": 0, "factor": 0.5, "min_lr": [0.01, 0.02], "max_lr": (0.2, 0.3)},
    "smooth": {"patience": 0, "smooth": True, "window_size": 3},
    "starts again": {"patience": 0, "factor": 0.3, "min_lr": 0.02, "reset_start": 3, "cooldown": 1, "smooth": True},
    "small changes are not made": {"patience": 0, "factor": 0.9, "eps": 0.005},
}


def optimizer() -> SGD:
    return SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (0.1, 0.05)], lr=0.1)


def history(schedule: Any, metrics: list[float]) -> list[Any]:
    found = []
    for metric in metrics:
        schedule.step(metric)
        found.append((schedule.get_last_lr(), [group["lr"] for group in schedule.optimizer.param_groups]))
    return found


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("metrics", [FALLING, NOISY, STUCK], ids=["falling", "noisy", "stuck"])
def test_each_step_has_exactly_the_rates_and_state_of_transformers_greedy_schedule(
    options: dict[str, Any], metrics: list[float]
) -> None:
    ours, theirs = GreedyLR(optimizer(), **options), TheirGreedyLR(optimizer(), **options)
    assert history(ours, metrics) == history(theirs, metrics)
    assert ours.state_dict() == theirs.state_dict()


@pytest.mark.parametrize("kinds", [(GreedyLR, TheirGreedyLR), (TheirGreedyLR, GreedyLR)], ids=["ours", "theirs"])
@pytest.mark.parametrize("name", ["cooldown", "smooth", "starts again"])
def test_a_saved_schedule_goes_on_in_the_other_library(
    tmp_path: Path, kinds: tuple[Callable[..., Any], Callable[..., Any]], name: str
) -> None:
    whole = history(kinds[0](optimizer(), **OPTIONS[name]), NOISY)
    interrupted = kinds[0](optimizer(), **OPTIONS[name])
    history(interrupted, NOISY[:7])
    torch.save(interrupted.state_dict(), tmp_path / "scheduler.pt")
    # The state brings its settings along.
    resumed = kinds[1](optimizer(), smooth=OPTIONS[name].get("smooth", False))
    resumed.load_state_dict(torch.load(tmp_path / "scheduler.pt", weights_only=True))
    assert history(resumed, NOISY[7:]) == whole[7:]


def test_changes_are_printed_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    history(GreedyLR(optimizer(), patience=0, factor=0.5, min_lr=0.04, reset_start=1, verbose=True), [1.0, 2.0, 3.0])
    printed = capsys.readouterr().out
    assert "raises the learning rate of group 0 to 2.0000e-01 (evaluation 1)" in printed
    assert "lowers the learning rate of group 1 to 5.0000e-02 (evaluation 2)" in printed


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"factor": 1.0}, "factor=1.0"),
        ({"mode": "best"}, "mode='best'.*min, max"),
        ({"threshold_mode": "both"}, "threshold_mode='both'.*rel, abs"),
        ({"min_lr": [0.1]}, "min_lr has 1 values for 2"),
        ({"max_lr": [0.1, 0.2, 0.3]}, "max_lr has 3 values for 2"),
    ],
)
def test_a_value_that_cannot_be_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        GreedyLR(optimizer(), **options)


def test_what_is_no_optimizer_is_refused() -> None:
    not_one: Any = "sgd"
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer.*str"):
        GreedyLR(not_one)
